"""What is in the samples' files, as hashes: a cached row belongs to a content, wherever the file lies and whatever its place."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from piebridge.core.errors import RunFailed
from piebridge.core.files import sha256_of_json
from piebridge.core.workers import resolve_workers

KEY_BYTES = 32
KEY_TYPE = f"S{KEY_BYTES}"  # all keys have this length, so that numpy's way with trailing zeros changes no comparison
_AT_ONCE = 512


class SampleContents:
    """sha256 of each sample's file, computed when it is first asked for.

    samples: sequence of objects with a `.path`. The decoder opens the files again, so `confirm` says afterwards whether it can have
    seen what was hashed.
    """

    def __init__(self, samples, workers="auto"):
        self._samples = samples
        self._workers = max(1, resolve_workers(workers))
        self._digests = np.zeros(len(samples), KEY_TYPE)
        self._stamps = np.zeros((len(samples), 4), np.int64)
        self._is_known = np.zeros(len(samples), bool)

    def digests(self, indices):
        """Array of 32-byte hashes, [N]; empty for a file that cannot be read."""
        indices = np.asarray(indices, np.int64)
        unknown = indices[~self._is_known[indices]]
        if len(unknown):
            with ThreadPoolExecutor(self._workers) as executor:
                for start in range(0, len(unknown), _AT_ONCE):  # in pieces, so that Ctrl-C has little to wait for
                    list(executor.map(self._hash, unknown[start:start + _AT_ONCE].tolist()))
        return self._digests[indices]

    def confirm(self, indices):
        """Raise RunFailed if the file of one of these samples (list of int) has another content than when it was hashed."""
        for index in indices:
            before = self._digests[index]
            if (self._stamps[index] != _stamp(self._samples[index].path)).any():
                self._hash(index)  # touched is not changed
                if self._digests[index] != before:
                    raise RunFailed(f"{self._samples[index].path}: changed while it was read; start again when the images are at rest")

    def _hash(self, index):
        path = self._samples[index].path
        digest = hashlib.sha256()
        try:
            if not os.path.isfile(path):  # opening a pipe would wait for ever
                raise OSError
            self._stamps[index] = _stamp(path)
            with open(path, "rb") as stream:
                for piece in iter(lambda: stream.read(1 << 20), b""):
                    digest.update(piece)
            self._digests[index] = digest.digest()
        except OSError:
            self._digests[index] = b""
        self._is_known[index] = True


def _stamp(path):
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0, 0)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino % 2 ** 63)


def row_keys(settings, digests, indices, is_by_position=False):
    """Array of 32-byte keys [N]: sha256 over what decides a row.

    settings: JSON dict of what all rows have in common. digests: contents of the samples `indices` (array [N]); an unreadable one has a
    key of its own. is_by_position: views are drawn by the sample's place (`loader.batches`), so its row depends on that too.
    """
    common = sha256_of_json(settings).encode("ascii")
    keys = np.zeros(len(digests), KEY_TYPE)
    for slot, (content, index) in enumerate(zip(digests.tolist(), indices)):
        place = b" %d" % index if is_by_position or not content else b""
        keys[slot] = hashlib.sha256(common + content.ljust(KEY_BYTES, b"\0") + place).digest()
    return keys
