"""The folder of a forge's finished pieces: one process at a time works there, and what is somebody else's is not touched."""

import contextlib
import shutil

from piebridge.core.errors import UserError
from piebridge.core.files import locked_folder, read_json

KEY_FILE = "key.json"  # says that the folder is a forge's, and of which work


@contextlib.contextmanager
def locked(folder):
    """Make a folder (Path) if it is not there, and refuse a second process on it. UserError where it holds something else, or cannot be."""
    with locked_folder(folder, f"{folder}: the forge keeps its work there, and cannot ({{reason}}); choose another --out",
                       f"{folder}: another process is forging this set; wait for it, or choose another --out"):
        found = read_json(folder / KEY_FILE)
        if any(folder.iterdir()) and not (isinstance(found, dict) and "forge" in found):
            raise UserError(f"{folder}: the forge keeps its work there, and it is something else; move it away or choose another --out")
        yield


def empty(folder):
    """Remove all pieces. The key goes last: a folder that is killed half-empty is still known for what it is."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == KEY_FILE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(str(path))
        else:
            path.unlink()
