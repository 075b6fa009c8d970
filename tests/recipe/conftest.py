"""A small set of real images, and a process environment, for tests of the command line. Some files have larger ones of their own."""

import os
import shutil
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """3 classes with 12 images each, from the embedded set."""
    folder = tmp_path_factory.mktemp("data") / "small set"
    for name in ("arrows", "flags", "mammals"):
        (folder / name).mkdir(parents=True)
        for image in sorted((CHECKOUT / "datasets" / "Clipart10" / name).iterdir())[:12]:
            shutil.copy(str(image), str(folder / name))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A device profile of its own, and one thread, so that tests may share a machine."""
    return dict(os.environ, PIEBRIDGE_CACHE=str(tmp_path_factory.mktemp("profile")), OMP_NUM_THREADS="1", PYTHONPATH=str(CHECKOUT))
