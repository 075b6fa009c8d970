"""Stratified splits that depend on the images' relative paths and the seed, and on nothing else.

Not on the order in which a file system lists a folder, nor on a random generator of some library's version: within each class the
images are ranked by a hash of seed and path. Adding images leaves the rank of the others as it was.
"""

import hashlib
import unicodedata

from piebridge.core.errors import UserError


def portable_key(relative_path):
    """A relative path as it is compared and hashed on every system: forward slashes, composed accents, as bytes."""
    text = unicodedata.normalize("NFC", str(relative_path).replace("\\", "/"))
    return text.encode("utf-8", "surrogateescape")


def stratified_split(samples, keys, fractions, seed):
    """Divide `samples` class by class.

    Args:
        samples: sequence of objects with a `.label`.
        keys: their portable keys (bytes), all different.
        fractions: {part: share}, such as {"test": 0.2, "val": 0.1}; what is left is "train".
        seed: whole number.

    Returns:
        {part: [samples]} with "train", each list in the order of `samples`. A class of three or more images has one at least in
        each part that asks for a share; every class keeps one for training.

    Raises:
        UserError: when the shares leave nothing to train on.
    """
    total = sum(fractions.values())
    if any(share < 0 for share in fractions.values()) or total >= 1:
        listed = " and ".join(f"splits.{part}_fraction={share}" for part, share in fractions.items())
        raise UserError(f"{listed}: shares must not be negative, and must leave images to train on (a sum below 1)")
    part_of = ["train"] * len(samples)
    by_class = {}
    for position, sample in enumerate(samples):
        by_class.setdefault(sample.label, []).append(position)
    for positions in by_class.values():
        ranked = sorted(positions, key=lambda position: (rank(seed, keys[position]), keys[position]))
        start = 0
        for part, count in _counts(len(ranked), fractions).items():
            for position in ranked[start:start + count]:
                part_of[position] = part
            start += count
    parts = {part: [] for part in ["train"] + list(fractions)}
    for sample, part in zip(samples, part_of):
        parts[part].append(sample)
    return parts


def _counts(n, fractions):
    """{part: number of images} out of n in a class; the sum is below n."""
    counts = {}
    for part, share in fractions.items():
        count = int(n * share + 0.5)
        if share > 0 and n >= 3:
            count = max(1, count)
        counts[part] = min(count, n - 1 - sum(counts.values()))
    return counts


def rank(seed, key):
    """Where an image with this portable key (bytes) comes among others: by these bytes."""
    return hashlib.sha256(b"%d/%s" % (seed, key)).digest()
