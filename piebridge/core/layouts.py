"""Find the labelled images of a folder, in any of the layouts in use.

* `train/ val/ [test/]` or `train/ test/`, each with a folder of images per class (torchvision's ImageFolder);
* one folder with a folder of images per class;
* lists: `train.txt` and `test.txt` with a line `name label` per image, the images in `train/` and `test/`.
"""

import logging
import os
import re
from collections import Counter, namedtuple
from pathlib import Path

from piebridge.core.errors import UserError
from piebridge.core.images import IMAGE_EXTENSIONS
from piebridge.core.splits import portable_key

LOG = logging.getLogger(__name__)

Sample = namedtuple("Sample", "path label")  # str, int (position in the sorted class names)
Layout = namedtuple("Layout", "classes parts")  # list of str, {"train" | "val" | "test" | "all": [Sample]}

_VALIDATION_NAMES = ("val", "valid", "validation")
_SYSTEM_FILES = ("Thumbs.db", "desktop.ini")


def read_layout(folder):
    """Classes and samples of `folder` (Path). Parts that the folder does not have are missing from `.parts`.

    Raises:
        UserError: no images, a class without any, a class that training does not have, an unreadable list.
    """
    if (folder / "train.txt").is_file():
        return _read_lists(folder)
    if _has_class_folders(folder / "train"):
        return _read_split_folders(folder)
    if not _subfolders(folder):
        where = "images lie directly in it" if _images_directly_in(folder) else "it holds no folders"
        raise UserError(f"{folder}: {where}; one folder of images per class is needed, or train/, val/ and test/ with such")
    classes = _class_names(folder)
    return Layout(classes, {"all": _samples_of(folder, classes)})


def _read_split_folders(folder):
    classes = _class_names(folder / "train")
    parts = {"train": _samples_of(folder / "train", classes)}
    for part, names in (("val", _VALIDATION_NAMES), ("test", ("test",))):
        for name in names:
            if _has_class_folders(folder / name) and part not in parts:
                parts[part] = _samples_of(folder / name, classes)
    if len(parts) == 1:
        others = [name for name in _subfolders(folder) if name != "train"]
        if others:
            LOG.warning("%s: only train/ is read, not %s", folder, ", ".join(others))
        return Layout(classes, {"all": parts["train"]})
    return Layout(classes, parts)


def _class_names(folder):
    return sorted(_subfolders(folder), key=portable_key)


def _samples_of(folder, classes):
    """Samples below `folder`, by class and then by path."""
    unknown = sorted(set(_subfolders(folder)) - set(classes))
    if unknown:
        raise UserError(f"{folder / unknown[0]}: a class that train/ does not have; add images of it there or remove the folder")
    samples, ignored = [], Counter()
    for label, name in enumerate(classes):
        paths = images_below(folder / name, ignored) if (folder / name).is_dir() else []
        samples.extend(Sample(path, label) for path in paths)
    if ignored:
        kinds = ", ".join(f"{count} {suffix or 'without extension'}" for suffix, count in sorted(ignored.items()))
        LOG.warning("%s: %d files are not taken for images, by their extension: %s", folder, sum(ignored.values()), kinds)
    return samples


def images_below(folder, ignored):
    """Paths of the files with an image's extension below `folder`, sorted. Follows links, each folder once.

    `ignored` counts the other files by extension.
    """
    above = {os.path.realpath(str(parent)) for parent in Path(os.path.abspath(str(folder))).parents}
    found, seen, waiting = [], set(above), [str(folder)]  # a link upwards would give this class the images of the others
    while waiting:
        current = waiting.pop()
        real = os.path.realpath(current)
        if real in seen:  # a link to a folder above
            continue
        seen.add(real)
        for name in _visible_names(current):
            path = os.path.join(current, name)
            if os.path.isdir(path):
                waiting.append(path)
            # a broken link is kept, to be reported as unreadable; pipes and devices would block
            elif name.lower().endswith(IMAGE_EXTENSIONS) and (os.path.isfile(path) or not os.path.exists(path)):
                found.append(path)
            elif name not in _SYSTEM_FILES:
                ignored[os.path.splitext(name)[1].lower()] += 1
    return sorted(found, key=portable_key)


def _subfolders(folder):
    if not folder.is_dir():
        return []
    return [name for name in _visible_names(str(folder)) if os.path.isdir(str(folder / name))]


def _visible_names(folder):
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".") and name != "__MACOSX"]
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed ({error.strerror}); change its permissions or remove it") from error


def _images_directly_in(folder):
    return [path for path in folder.iterdir() if path.name.lower().endswith(IMAGE_EXTENSIONS)]


def _has_class_folders(folder):
    """Whether `folder` is a part (train, val, test) and not itself a class that happens to bear such a name."""
    return bool(_subfolders(folder)) and not _images_directly_in(folder)


def _read_lists(folder):
    """The published layout. Labels are whole numbers, or names; `classes.txt`, where there is one, names the numbers."""
    rows = {part: _read_list(folder, part) for part in ("train", "test") if part == "train" or (folder / "test.txt").is_file()}
    labels = sorted({label for _, label, _ in rows["train"]}, key=_label_order)
    position = {label: index for index, label in enumerate(labels)}
    parts = {}
    for part, part_rows in rows.items():
        parts[part] = []
        for path, label, line in part_rows:
            if label not in position:
                raise UserError(f"{folder / (part + '.txt')} line {line}: label {label} has no image in train.txt")
            parts[part].append(Sample(path, position[label]))
    if "test" not in parts:
        parts = {"all": parts["train"]}
    return Layout(_names_of_labels(folder, labels), parts)


def _read_list(folder, part):
    """[(path, label text, line number)] of `<part>.txt`."""
    list_path, rows, label_of = folder / (part + ".txt"), [], {}
    with open(str(list_path), encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            fields = line.strip().rsplit(None, 1)
            if not fields:
                continue
            if len(fields) != 2:
                raise UserError(f"{list_path} line {number}: '{line.strip()}' is not `name label`")
            name, label = os.path.normpath(fields[0]), fields[1]
            if os.path.isabs(name) or name.split(os.sep)[0] == "..":
                raise UserError(f"{list_path} line {number}: '{fields[0]}' is outside of {folder / part}")
            if label_of.setdefault(name, label) != label:
                raise UserError(f"{list_path} line {number}: '{fields[0]}' has label {label} here and {label_of[name]} above")
            rows.append((name, label, number))
    if not rows:
        raise UserError(f"{list_path}: lists no image; a line is `name label`")
    first = rows[0][0]
    is_from_above = not (folder / part / first).exists() and (folder / first).exists()  # names given as train/...
    base = folder if is_from_above else folder / part
    return [(str(base / name), label, number) for name, label, number in rows]


def _label_order(label):
    """Numbers by value, before names."""
    return (0, int(label), label) if re.fullmatch("[0-9]{1,9}", label) else (1, 0, label)


def _names_of_labels(folder, labels):
    path = Path(str(folder)) / "classes.txt"
    if not path.is_file():
        return labels
    names = [line.strip() for line in path.read_text(encoding="utf-8-sig", errors="backslashreplace").splitlines() if line.strip()]
    if len(names) != len(labels):
        raise UserError(f"{path}: names {len(names)} classes, and train.txt has {len(labels)} labels")
    return names
