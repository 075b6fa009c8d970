"""k labelled training images per class; the other training images count as unlabelled."""

import logging
from collections import Counter

from piebridge.core.dataset import Dataset
from piebridge.core.splits import portable_key, rank

LOG = logging.getLogger(__name__)


def limit_labels(dataset, shots, seed, keeps_unlabelled):
    """A Dataset of which training may know `shots` labels per class; the same one where `shots` is 0.

    Within each class the training images are ranked by seed and path, as for the split (core/splits.py), and the first ones are
    taken: 5 shots are among the 10 shots of the same seed. keeps_unlabelled: whether the others stay among the training images,
    with their paths in `.unlabelled`; without, they are left out, so that nothing is computed for them. Validation and test stay.
    `.split` gains {"shots", "labelled", "unlabelled"}. A class that has fewer images gives all it has, and the log says so.
    """
    if not shots:
        return dataset
    counts = Counter(sample.label for sample in dataset.train)
    short = [f"{dataset.classes[label]} ({count})" for label, count in sorted(counts.items()) if count < shots]
    if short:
        shown = ", ".join(short[:5]) + (", ..." if len(short) > 5 else "")
        LOG.warning("splits.shots=%d: %d of %d classes have fewer training images, and give all: %s", shots, len(short), len(counts), shown)
    chosen = {sample.path for sample in _first_of_each_class(dataset, shots, seed)}
    train = [sample for sample in dataset.train if keeps_unlabelled or sample.path in chosen]
    unlabelled = {sample.path for sample in train} - chosen
    split = dict(dataset.split, shots=shots, labelled=len(chosen), unlabelled=len(dataset.train) - len(chosen))
    return Dataset(dataset.name, dataset.folder, dataset.classes, dict(dataset.parts, train=train), split, dataset.bad_files, unlabelled)


def _first_of_each_class(dataset, shots, seed):
    by_class = {}
    for sample in dataset.train:
        key = portable_key(dataset.relative_path(sample))
        by_class.setdefault(sample.label, []).append((rank(seed, key), key, sample))
    return [sample for ranked in by_class.values() for _, _, sample in sorted(ranked)[:shots]]
