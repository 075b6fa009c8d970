"""Fixtures that several tests share."""

import logging
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def one_thread():
    """For small forwards: threads gain little and, on a busy machine, wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def logger_as_before():
    """For commands that are run in the tests' own process and set the package's logger up."""
    logger = logging.getLogger("piebridge")
    before = logger.handlers[:], logger.level
    yield
    logger.handlers[:], logger.level = before


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the project in a folder whose name has a space and an umlaut, with 12 images per class of the embedded set."""
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))
    monkeypatch.delenv("PIEBRIDGE_DATASETS", raising=False)
    copy = tmp_path / "my chäckout"
    for name in ("piebridge", "scripts", "res/train_log", "res/expected"):
        shutil.copytree(str(ROOT / name), str(copy / name), ignore=_leave_out_runs)
    shutil.copytree(str(ROOT / "datasets" / "Clipart10"), str(copy / "datasets" / "Clipart10"), ignore=_twelve_images)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(str(ROOT / name), str(copy / name))
    return copy


def _leave_out_runs(folder, names):
    """Of run folders only the configuration."""
    if "train_log" not in Path(folder).relative_to(ROOT).parts:
        return [name for name in names if name == "__pycache__"]
    return [name for name in names if name != "config.yaml" and (not (Path(folder) / name).is_dir() or name in ("checkpoint",)
                                                                 or name.startswith("seed_"))]


def _twelve_images(folder, names):
    return sorted(name for name in names if name.endswith(".jpg"))[12:]
