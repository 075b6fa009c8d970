"""The folder of a forge's finished pieces: one process at a time works there, and what is somebody else's is not touched."""

import contextlib
import fcntl
import os
import shutil

from piebridge.core.errors import UserError
from piebridge.core.files import read_json, remove_parts

KEY_FILE = "key.json"  # says that the folder is a forge's, and of which work


@contextlib.contextmanager
def locked(folder):
    """Make a folder (Path) if it is not there, and refuse a second process on it. The lock is on the folder itself, so a killed process
    leaves none behind. UserError where it holds something else, or cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(str(folder), os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{folder}: the forge keeps its work there, and cannot ({error.strerror}); choose another --out") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder) from None
        if os.fstat(handle).st_nlink == 0:  # whoever had the lock has just finished, and removed the folder
            raise _in_use(folder)
        remove_parts(folder)
        found = read_json(folder / KEY_FILE)
        if any(folder.iterdir()) and not (isinstance(found, dict) and "forge" in found):
            raise UserError(f"{folder}: the forge keeps its work there, and it is something else; move it away or choose another --out")
        yield
    finally:
        os.close(handle)


def _in_use(folder):
    return UserError(f"{folder}: another process is forging this set; wait for it, or choose another --out")


def empty(folder):
    """Remove all pieces. The key goes last: a folder that is killed half-empty is still known for what it is."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == KEY_FILE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(str(path))
        else:
            path.unlink()
