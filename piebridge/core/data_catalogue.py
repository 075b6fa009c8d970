"""The data sets that are known by name: where they are looked for, and how each is obtained (`piebridge data NAME`)."""

import os
from collections import namedtuple
from pathlib import Path

from piebridge.core.errors import UserError
from piebridge.core.files import expand_user
from piebridge.core.names import closest

ENVIRONMENT_KEY = "PIEBRIDGE_DATASETS"

Entry = namedtuple("Entry", "text how")

CATALOGUE = {
    "Clipart10": Entry("600 clip-art images in 10 classes, 160 px, public domain; part of the project's checkout", "openclipart"),
    "Openclipart": Entry("clip art in 28 classes, 256 px, public domain; built from Debian's openclipart-png", "openclipart"),
    "Caltech101": Entry("objects in 101 classes and background, in the published list layout", "archive"),
    "Caltech256": Entry("objects in 257 classes, in the published list layout", "archive"),
    "DogsVsCats": Entry("dogs and cats, in the published list layout", "archive"),
    "DTD": Entry("describable textures in 47 classes, in the published list layout", "archive"),
}


def locate_dataset(name_or_folder):
    """(name, folder) of a folder, or of a set by name: `NAME` or `NAME_MNN` below a root, or a folder NAME here.

    Raises:
        UserError: says where it was looked for and how to get what is known.
    """
    text = str(name_or_folder)
    given = expand_user(text)
    if os.sep in text or text in (".", "..") or text.startswith("~"):
        if not given.is_dir():
            what = "is a file; give the folder of images" if given.exists() else "no such folder"
            raise UserError(f"data={text}: {what}")
        return Path(os.path.abspath(str(given))).name, given
    name = _canonical(text)
    folder = find_installed(name)
    if folder:
        return name, folder
    if text and given.is_dir():
        return text, given
    looked_in = ", ".join(str(root) for root in dataset_roots())
    if name in CATALOGUE:
        raise UserError(f"data={name}: this set is not here yet (looked in {looked_in}); get it with: piebridge data {name}")
    raise UserError(f"data={text}: no such data set or folder{closest(text, CATALOGUE)}; known sets: {', '.join(CATALOGUE)}; "
                    f"looked in {looked_in}")


def find_installed(name):
    """The folder of the set called `name` below one of the roots, or None."""
    if not name:
        return None
    for root in dataset_roots():
        wanted = [name, name + "_MNN"]
        for each in wanted:
            if (root / each).is_dir():
                return root / each
        if name in CATALOGUE and root.is_dir():  # the published folders spell some names in another case
            lower = [each.lower() for each in wanted]
            for path in sorted(root.iterdir()):
                if path.name.lower() in lower and path.is_dir():
                    return path
    return None


def dataset_roots():
    """Folders of data sets, best first: $PIEBRIDGE_DATASETS, `datasets` here, `datasets` of the checkout this code runs from."""
    roots = [Path.cwd() / "datasets"]
    if os.environ.get(ENVIRONMENT_KEY):
        roots.insert(0, expand_user(os.environ[ENVIRONMENT_KEY]))
    checkout = Path(__file__).resolve().parent.parent.parent
    if (checkout / "pyproject.toml").is_file() and checkout / "datasets" not in roots:
        roots.append(checkout / "datasets")
    return roots


def describe():
    """Lines that list the known sets and where each is."""
    lines = []
    for name, entry in CATALOGUE.items():
        folder = find_installed(name)
        state = f"here: {folder}" if folder else f"not here; get it with: piebridge data {name}"
        lines.append(f"{name:<12} {entry.text}\n{'':<12} {state}")
    return lines


def prepare(name, source=None, output=None):
    """Fetch or build a set and return one line that says where it is. What is there already is left alone.

    Args:
        name: a key of CATALOGUE.
        source: a file or folder to take instead of downloading.
        output: the folder that becomes the set; default: `NAME` below the first root that exists.

    Raises:
        UserError: unknown name, unreadable source, no network, a folder of another kind in the way.
    """
    name = _canonical(str(name))
    if name not in CATALOGUE:
        raise UserError(f"{name}: no such data set{closest(name, CATALOGUE)}; known: {', '.join(CATALOGUE)}")
    installed = find_installed(name)
    if output is None and installed:
        return f"{name} is there already: {installed}"
    destination = expand_user(output) if output is not None else _default_root() / name
    if CATALOGUE[name].how == "openclipart":
        from piebridge.core.openclipart import build_openclipart

        return build_openclipart(destination, source, name)
    from piebridge.core.data_archive import fetch_data

    return fetch_data(name, destination, source)


def _default_root():
    roots = dataset_roots()
    if os.environ.get(ENVIRONMENT_KEY):
        return roots[0]
    return next((root for root in roots if root.is_dir()), roots[0])


def _canonical(text):
    """A known set's name whatever its case; any other text as it is."""
    return next((name for name in CATALOGUE if name.lower() == text.lower()), text)
