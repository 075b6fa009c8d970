"""The one atomic writer, and content hashes.

A file appears under its final name whole or not at all: it is written under a temporary name in the same folder, synced, renamed,
and the folder is synced, so that neither a kill nor a power cut leaves a half-written file where a reader looks.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import uuid
from pathlib import Path

from piebridge.core.errors import UserError

PART_SUFFIX = ".part"


@contextlib.contextmanager
def atomic_path(path):
    """Yield a temporary path beside `path`; rename it to `path` when the block ends without an exception."""
    path = Path(path)
    if path.exists() and not path.is_file():  # a folder, or a device such as /dev/null, which a rename would replace
        raise UserError(f"{path}: is not a regular file; choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{path}: {path.parent} is no folder, and cannot become one; choose another name") from None
    temporary = path.parent / f".{path.name[:60]}.{uuid.uuid4().hex[:8]}{PART_SUFFIX}"
    os.close(os.open(str(temporary), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        sync(temporary)
        os.replace(str(temporary), str(path))
        with contextlib.suppress(OSError):  # some file systems refuse to sync a folder; the rename itself is still atomic
            sync(path.parent)
    finally:
        if temporary.exists():
            temporary.unlink()


def remove_parts(folder):
    """Delete the temporary files that killed writers left in `folder`; nobody else may be writing there."""
    for part in Path(folder).glob(".*.????????" + PART_SUFFIX):
        part.unlink()


def write_text(path, text):
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names may hold any bytes


def expand_user(path):
    """`~` and `~name` expanded, as a Path; a name that nobody has stays as it is written, and is then not found."""
    with contextlib.suppress(RuntimeError):
        return Path(str(path)).expanduser()
    return Path(str(path))


def user_cache_folder():
    """`$PIEBRIDGE_CACHE`, or piebridge in `$XDG_CACHE_HOME`, or in ~/.cache: where torch and Hugging Face keep theirs."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("PIEBRIDGE_CACHE") or os.path.join(base, "piebridge"))


def write_json(path, value):
    write_text(path, json.dumps(value, indent=2, sort_keys=False, ensure_ascii=False) + "\n")


def read_json(path):
    """The JSON value in a file, or None where there is no file that can be read as JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def sha256_of_file(path):
    digest = hashlib.sha256()
    with open(str(path), "rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_json(value):
    """Hash of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def sync(path):
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked_folder(folder, unusable, in_use):
    """Make a folder (Path) if it is not there, and refuse a second process on it. The lock is on the folder itself, so a killed process
    leaves none behind; what one left half-written in it goes.

    unusable: what the UserError says where it cannot be a folder, "{reason}" standing for the system's words; in_use: where another
    process has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(str(folder), os.O_RDONLY)
    except OSError as error:
        raise UserError(unusable.replace("{reason}", error.strerror)) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(in_use) from None
        if os.fstat(handle).st_nlink == 0:  # whoever had the lock has just finished, and removed the folder
            raise UserError(in_use)
        remove_parts(folder)
        yield
    finally:
        os.close(handle)
