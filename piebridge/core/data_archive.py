"""Fetch the data sets that the authors published with the paper: one archive, with a folder `datasets/NAME_MNN` for each."""

import logging
import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from piebridge.core.archives import unpack_tar
from piebridge.core.errors import UserError
from piebridge.core.files import expand_user
from piebridge.core.progress_bar import progress_bar

LOG = logging.getLogger(__name__)

ARCHIVE_ID = "15iwkPHR1RutYDz4Yq4DGByYV78o51Z7e"
ARCHIVE_NAME = "datasets.tar.gz"
_MAX_BYTES = 64 << 30


def fetch_data(name, destination, source=None):
    """Make the folder `destination` from the published archive; returns a line that says where it is.

    Nothing that exists is changed or removed: the archive is downloaded and unpacked in a temporary folder beside `destination`,
    and the finished set is renamed into place.

    Args:
        name: a set of the archive, such as Caltech101 (its folder there is Caltech101_MNN, in any case).
        source: the archive, when it is there already; None downloads it.

    Raises:
        UserError: no network (says which file to provide), a damaged archive, one without this set, a folder in the way.
    """
    destination = Path(os.path.abspath(str(destination)))
    if destination.exists():
        raise UserError(f"{destination}: is there already; move it, or give output=FOLDER")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=str(destination.parent)) as temporary:
        archive = expand_user(source) if source is not None else _download(name, Path(temporary))
        if not archive.is_file():
            raise UserError(f"source={archive}: no such file; give the published {ARCHIVE_NAME}")
        unpacked = Path(temporary) / "set"
        count = _unpack(archive, name, unpacked)
        if not (unpacked / "train.txt").is_file():
            raise UserError(f"{archive}: holds no set {name} in the published layout ({name}_MNN/train.txt)")
        os.replace(str(unpacked), str(destination))
    return f"{name}: {count} files: {destination}"


def _download(name, folder):
    cure = (f"download {ARCHIVE_NAME} (Google Drive file {ARCHIVE_ID}) by hand, then: "
            f"piebridge data {name} source={ARCHIVE_NAME}")
    try:
        import gdown
    except ImportError:
        raise UserError(f"{name}: the package gdown is not installed (pip install gdown); or {cure}") from None
    path = folder / ARCHIVE_NAME
    try:
        result = gdown.download(id=ARCHIVE_ID, output=str(path), quiet=not LOG.isEnabledFor(logging.INFO))
    except Exception as error:  # requests', urllib's and gdown's own, which differ by version
        LOG.debug("gdown: %s", error)
        raise UserError(f"{name}: the download failed ({type(error).__name__}); {cure}") from error
    if not result or not path.is_file():
        raise UserError(f"{name}: the download was refused; {cure}")
    return path


def _unpack(archive, name, folder):
    """Write what lies below the archive's NAME_MNN to `folder`; returns the number of files."""
    wanted = {name.lower(), name.lower() + "_mnn"}

    def place(path):
        for position, part in enumerate(path.parts[:-1]):
            if part.lower() in wanted:
                return PurePosixPath(*path.parts[position + 1:])
        return None

    free = shutil.disk_usage(str(folder.parent)).free
    try:
        with tarfile.open(str(archive), "r:*") as tar, progress_bar(desc="unpacking", unit="file") as progress:
            return unpack_tar(tar, folder, place, archive, min(_MAX_BYTES, free), on_member=progress.update)
    except (tarfile.ReadError, EOFError) as error:
        raise UserError(f"{archive}: not a tar archive, or cut short ({error}); download {ARCHIVE_NAME} again") from error
