"""The one atomic writer, and content hashes.

A file appears under its final name whole or not at all: it is written under a temporary name in the same folder, synced, renamed,
and the folder is synced, so that neither a kill nor a power cut leaves a half-written file where a reader looks.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path


@contextlib.contextmanager
def atomic_path(path):
    """Yield a temporary path beside `path`; rename it to `path` when the block ends without an exception."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="." + path.name[:60] + ".", suffix=".part", dir=str(path.parent))
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _sync(temporary)
        os.chmod(str(temporary), 0o666 & ~_umask())  # mkstemp makes files that only the owner can read
        os.replace(str(temporary), str(path))
        _sync(path.parent)
    finally:
        if temporary.exists():
            temporary.unlink()


def write_text(path, text):
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path, value):
    write_text(path, json.dumps(value, indent=2, sort_keys=False, ensure_ascii=False) + "\n")


def sha256_of_file(path):
    digest = hashlib.sha256()
    with open(str(path), "rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_json(value):
    """Hash of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path):
    handle = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some file systems refuse to sync a folder; the rename itself is still atomic
        pass
    finally:
        os.close(handle)
