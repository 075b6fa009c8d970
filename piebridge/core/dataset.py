"""A data set: classes and three lists of samples, with a record of how they were split."""

import csv
import io
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from piebridge.core.data_catalogue import locate_dataset
from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_json
from piebridge.core.images import MAX_MEGAPIXELS, BadImage, check_image, silence_pillow
from piebridge.core.layouts import Sample, read_layout
from piebridge.core.progress_bar import progress_bar
from piebridge.core.splits import portable_key, stratified_split
from piebridge.core.workers import resolve_workers

__all__ = ["Dataset", "Sample", "open_dataset", "verify_images"]

LOG = logging.getLogger(__name__)

PARTS = ("train", "val", "test")
_CHECKED_AT_ONCE = 512


class Dataset:
    """Labelled images in three parts.

    Attributes:
        name: of the set, or of the folder.
        folder: its absolute path (str).
        classes: sorted class names; a label is a position in this list.
        train, val, test: lists of `Sample(path, label)`; `test` is empty where the data has train and val only.
        split: how the parts came about: {"layout": "given" | "split", "seed", "val_fraction", "test_fraction"}.
        bad_files: [(path, reason)] of what `verify_images` left out.
        unlabelled: paths of the training images whose labels training must not know, see core/few_shot.py.
    """

    def __init__(self, name, folder, classes, parts, split, bad_files=(), unlabelled=()):
        self.name = name
        self.folder = str(folder)
        self.classes = list(classes)
        self.train, self.val, self.test = (list(parts.get(part, ())) for part in PARTS)
        self.split = dict(split)
        self.bad_files = list(bad_files)
        self.unlabelled = frozenset(unlabelled)
        self._fingerprint = None
        self._check_classes()

    @property
    def parts(self):
        return {part: getattr(self, part) for part in PARTS}

    @property
    def fingerprint(self):
        """sha256 over classes, relative paths, sizes and labels of each part. It does not depend on where the folder lies."""
        if self._fingerprint is None:
            rows = {part: [[self.relative_path(sample), _size(sample.path), sample.label] for sample in samples]
                    for part, samples in self.parts.items()}
            self._fingerprint = sha256_of_json({"classes": self.classes, "parts": rows})
        return self._fingerprint

    def relative_path(self, sample):
        """Path below the set's folder, with forward slashes, printable on every system."""
        relative = os.path.relpath(sample.path, self.folder)
        return portable_key(relative).decode("utf-8", "backslashreplace")

    def without(self, samples):
        """A Dataset that lacks these samples. Raises UserError when a class loses its last training image."""
        left_out = {sample.path for sample in samples}
        parts = {part: [sample for sample in kept if sample.path not in left_out] for part, kept in self.parts.items()}
        return Dataset(self.name, self.folder, self.classes, parts, self.split, self.bad_files, self.unlabelled)

    def as_table(self):
        """One dict per image: split (train, unlabelled, val or test), path (relative), label, class_name."""
        return [{"split": "unlabelled" if part == "train" and sample.path in self.unlabelled else part,
                 "path": self.relative_path(sample), "label": sample.label, "class_name": self.classes[sample.label]}
                for part, samples in self.parts.items() for sample in samples]

    def as_csv(self):
        """`as_table()` as the text of a run folder's splits.csv."""
        text = io.StringIO()
        writer = csv.DictWriter(text, ["split", "path", "label", "class_name"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.as_table())
        return text.getvalue()

    def _check_classes(self):
        if len(self.classes) < 2:
            raise UserError(f"{self.folder}: holds {len(self.classes)} class; a classifier needs two or more")
        empty = self._classes_missing_in(self.train)
        if empty:
            others = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
            raise UserError(f"{self._class_folder(empty[0])}: class '{empty[0]}'{others} has no readable image to train on; "
                            "add images (.jpg, .png, ...) or remove the folder")

    def _classes_missing_in(self, samples):
        present = {sample.label for sample in samples}
        return [name for label, name in enumerate(self.classes) if label not in present]

    def _class_folder(self, name):
        folders = [Path(self.folder) / "train" / name, Path(self.folder) / name]
        return next((folder for folder in folders if folder.is_dir()), Path(self.folder))


def open_dataset(name_or_folder, splits):
    """Open a data set by name (`datasets/NAME`) or a folder of images.

    Args:
        name_or_folder: see `data_catalogue.locate_dataset`; the layouts are those of `core.layouts`.
        splits: has `.val_fraction`, `.test_fraction` and `.seed`; what the folder itself divides stays as it is.

    Raises:
        UserError: unknown name, no images, a class without training images.
    """
    name, folder = locate_dataset(name_or_folder)
    folder = Path(os.path.abspath(str(folder)))
    layout = read_layout(folder)
    parts, split = _split(layout, folder, splits)
    dataset = Dataset(name, folder, layout.classes, parts, split)
    for part in ("val", "test"):
        missing = dataset._classes_missing_in(dataset.parts[part])
        if dataset.parts[part] and missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            LOG.warning("%s: %d of %d classes have no image in %s: %s", name, len(missing), len(layout.classes), part, shown)
    if not dataset.test:
        LOG.warning("%s: no test images; no test accuracy will be reported", name)
    LOG.info("%s: %d classes, %d images to train on, %d to validate, %d to test", name, len(layout.classes),
                len(dataset.train), len(dataset.val), len(dataset.test))
    return dataset


def _split(layout, folder, splits):
    """Complete the parts that the folder gives; returns them and the record of it."""
    given = layout.parts
    if "all" in given:
        wanted = {"test": splits.test_fraction, "val": splits.val_fraction}
    elif "val" not in given:
        wanted = {"val": splits.val_fraction}
    else:
        return given, {"layout": "given", "seed": None, "val_fraction": None, "test_fraction": None}
    pool = given["all" if "all" in given else "train"]
    keys = [portable_key(os.path.relpath(sample.path, str(folder))) for sample in pool]
    parts = dict(given)
    parts.update(stratified_split(pool, keys, wanted, splits.seed))
    return parts, {"layout": "split", "seed": splits.seed, "val_fraction": splits.val_fraction,
                   "test_fraction": wanted.get("test")}


def verify_images(dataset, max_bad_files=10, workers="auto", max_megapixels=MAX_MEGAPIXELS):
    """Check every file before anything is computed; returns the Dataset without the unreadable ones, listed in `.bad_files`.

    Each is logged with its path and reason. Mostly the header and the file's end are read (`images.check_image`).

    Raises:
        UserError: more than `max_bad_files` are unreadable, or a class has no readable training image.
    """
    silence_pillow()
    samples = [sample for kept in dataset.parts.values() for sample in kept]
    bad = [(sample, reason) for sample, reason in _reasons(samples, workers, max_megapixels) if reason]
    if not bad:
        return dataset
    for sample, reason in bad[:max_bad_files + 1]:
        LOG.warning("%s: cannot be read as an image (%s)", _printable(sample.path), reason)
    if len(bad) > max_bad_files:
        raise UserError(f"{dataset.folder}: {len(bad)} of {len(samples)} images cannot be read, more than loader.max_bad_files="
                        f"{max_bad_files}; the first is {_printable(bad[0][0].path)} ({bad[0][1]}); repair or remove them, "
                        "or raise that number")
    LOG.warning("%s: %d of %d images are skipped", dataset.name, len(bad), len(samples))
    remaining = dataset.without([sample for sample, _ in bad])
    remaining.bad_files = dataset.bad_files + [(_printable(sample.path), reason) for sample, reason in bad]
    return remaining


def _reasons(samples, workers, max_megapixels):
    """[(sample, None or why it is unreadable)], in order."""
    def check(sample):
        try:
            check_image(sample.path, max_megapixels)
            return sample, None
        except BadImage as error:
            return sample, error.reason

    results = []
    with ThreadPoolExecutor(max(1, resolve_workers(workers))) as executor, \
            progress_bar(total=len(samples), desc="checking images", unit="image") as progress:
        for start in range(0, len(samples), _CHECKED_AT_ONCE):  # in pieces, so that Ctrl-C has little to wait for
            results.extend(executor.map(check, samples[start:start + _CHECKED_AT_ONCE]))
            progress.update(len(results) - progress.n)
    return results


def _size(path):
    try:
        return os.path.getsize(path)
    except OSError:
        return -1


def _printable(path):
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
