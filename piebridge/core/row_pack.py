"""A pack: what one process has added to a row store, append-only.

`NAME.rows` has the rows, all of one size; `NAME.index` a header and a record for each chunk of rows that was written together, with the
rows' keys and checksums over rows and record. The record follows its rows, so a chunk counts whole or not at all: a killed writer
leaves nothing worse than a tail that nobody reads. Nothing is changed once written, so readers need no lock against the writer. Who
uses a pack holds a shared lock on its index, which goes with its process; only a pack that nobody uses is trimmed or removed.
"""

import contextlib
import errno
import fcntl
import json
import os
import struct
import time
import uuid
import zlib

import numpy as np

from piebridge.core.contents import KEY_BYTES, KEY_TYPE

MAGIC = b"piebridge rows 1\n"
_LENGTH = struct.Struct("<I")
_RECORD = struct.Struct("<4sIQIfI")  # mark, rows, number of the first, their crc32, their largest relative error, crc32 of this and keys
_MARK = b"rows"


class Pack:
    """path: without its suffix. records: (first row, count, checksum, error) of each chunk. is_used: whether a search found something."""

    def __init__(self, path, stream, row_bytes):
        self.path, self.row_bytes, self.is_used = path, row_bytes, False
        self._stream = stream  # of the index; holds the lock
        self._rows_file = None
        self._forget()

    def _forget(self):
        self.records, self._map = [], None
        self._keys, self._row_of, self._chunk_of = np.zeros(0, KEY_TYPE), np.zeros(0, np.int64), np.zeros(0, np.int64)  # by key
        self._added = []  # keys of the chunks that are not among those yet
        self._is_verified = {}  # {chunk: whether its rows have their checksum}

    @classmethod
    def create(cls, folder, layout, row_bytes):
        """A new pack of this process. layout: JSON value that its readers have to expect."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{int(time.time() * 1e9):020d}-{uuid.uuid4().hex[:8]}"
        stream = open(str(path) + ".index", "xb")
        fcntl.flock(stream, fcntl.LOCK_SH)
        stream.write(_header(layout))
        stream.flush()
        pack = cls(path, stream, row_bytes)
        pack._rows_file = open(str(path) + ".rows", "xb")
        return pack

    @classmethod
    def open(cls, index, layout, row_bytes):
        """The pack of an index file, in use from now on; None where it is gone, damaged or of another layout."""
        try:
            stream, is_alone = _open_locked(index)
        except OSError:
            return None
        path, header = index.with_suffix(""), _header(layout)
        content = stream.read()
        try:
            rows = os.path.getsize(str(path) + ".rows") // row_bytes
        except OSError:
            rows = 0
        if os.fstat(stream.fileno()).st_nlink and content.startswith(header):
            pack = cls(path, stream, row_bytes)
            for record, keys in _records(content[len(header):]):
                if record[0] + record[1] <= rows:
                    pack._add(record, keys)
            if is_alone:
                pack._give_back(rows)
            return pack
        stream.close()
        return None

    def search(self, keys):
        """Rows of the keys (KEY_TYPE [N]) -> int64 [N], -1 where there is none, or where its chunk is damaged."""
        self._tabulate()
        if not len(self._keys):
            return np.full(len(keys), -1, np.int64)
        slots = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        is_here = self._keys[slots] == keys
        chunks = np.unique(self._chunk_of[slots[is_here]])
        is_whole = np.zeros(len(self.records), bool)
        is_whole[chunks] = [self._is_whole(chunk) for chunk in chunks.tolist()]
        rows = np.where(is_here & is_whole[self._chunk_of[slots]], self._row_of[slots], -1)
        self.is_used = self.is_used or bool((rows >= 0).any())
        return rows

    def errors(self, rows):
        """The largest relative error of the chunks that hold `rows` (int64 [N])."""
        firsts = np.array([record[0] for record in self.records])
        chunks = np.unique(np.searchsorted(firsts, rows, side="right") - 1)
        return max([self.records[chunk][3] for chunk in chunks.tolist()] + [0.0])

    def take(self, rows):
        """int64 [N] -> uint8 [N, row_bytes], a copy."""
        return self.mapped().take(rows, axis=0)

    def mapped(self):
        """uint8 [rows, row_bytes], the file's memory."""
        if self._map is None or len(self._map) < self.used:
            if not self.used:
                return np.zeros((0, self.row_bytes), np.uint8)
            # asarray: the same memory without the map's slower indexing
            self._map = np.asarray(np.memmap(str(self.path) + ".rows", np.uint8, "r", shape=(self.used, self.row_bytes)))
        return self._map

    @property
    def is_own(self):
        """Whether this process adds to it."""
        return self._rows_file is not None

    @property
    def used(self):
        return self.records[-1][0] + self.records[-1][1] if self.records else 0

    def append(self, keys, rows, error):
        """Add a chunk: keys KEY_TYPE [N], rows uint8 [N, row_bytes]; returns the rows' numbers, int64 [N]."""
        first = self.used
        rows = np.ascontiguousarray(rows)
        self._rows_file.seek(first * self.row_bytes)
        self._rows_file.write(rows.data)
        self._rows_file.flush()
        record = (first, len(rows), zlib.crc32(rows.data), error)
        names = np.ascontiguousarray(keys).tobytes()
        self._stream.write(_sealed(record, names) + names)
        self._stream.flush()
        self._is_verified[len(self.records)] = True
        self._add(record, names)
        return np.arange(first, first + len(rows))

    def reserve(self, count):
        """Blocks for `count` further rows, so that a full disk shows before they are computed."""
        if count and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._rows_file.fileno(), self.used * self.row_bytes, count * self.row_bytes)
            except OSError as error:  # not every file system can
                if error.errno == errno.ENOSPC:
                    raise

    def trim(self):
        """Give back what was reserved and not used."""
        self._rows_file.truncate(self.used * self.row_bytes)

    def touch(self):
        """Note the use, for those who look for what was not used for long."""
        with contextlib.suppress(OSError):
            os.utime(str(self.path) + ".index", None)

    def close(self):
        """Give up the lock; there is nothing left to find or read here."""
        for stream in (self._stream, self._rows_file):
            if stream is not None:
                stream.close()
        self._forget()

    def _give_back(self, rows):
        """Cut off what a killed writer had reserved; from an exclusive lock to a shared one."""
        if rows > self.used:
            with contextlib.suppress(OSError):
                os.truncate(str(self.path) + ".rows", self.used * self.row_bytes)
        fcntl.flock(self._stream, fcntl.LOCK_SH)

    def _add(self, record, keys):
        self.records.append(record)
        self._added.append(keys)

    def _tabulate(self):
        """Sort the added chunks in. A stable sort: of two rows with one key, the first counts."""
        if not self._added:
            return
        start = len(self.records) - len(self._added)
        added = self.records[start:]
        keys = np.concatenate([self._keys, np.frombuffer(b"".join(self._added), KEY_TYPE)])
        rows = np.concatenate([self._row_of] + [np.arange(first, first + count) for first, count, _, _ in added])
        chunks = np.concatenate([self._chunk_of, np.repeat(np.arange(start, len(self.records)), [record[1] for record in added])])
        order = np.argsort(keys, kind="mergesort")
        self._keys, self._row_of, self._chunk_of, self._added = keys[order], rows[order], chunks[order], []

    def _is_whole(self, chunk):
        if chunk not in self._is_verified:
            first, count, checksum, _ = self.records[chunk]
            self._is_verified[chunk] = zlib.crc32(self.mapped()[first:first + count].data) == checksum
        return self._is_verified[chunk]


def remove_unused(index):
    """Remove a pack that no process uses; whether it is gone."""
    try:
        with open(str(index), "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                index.with_suffix(".rows").unlink()
            index.unlink()
            return True
    except OSError:
        return False


def _open_locked(index):
    """(an index opened with a lock, whether nobody else uses it: the lock is then an exclusive one)."""
    try:
        stream = open(str(index), "r+b")
    except PermissionError:
        stream = open(str(index), "rb")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stream, True
    except OSError:
        fcntl.flock(stream, fcntl.LOCK_SH)
        return stream, False


def _header(layout):
    text = json.dumps(layout, sort_keys=True).encode("utf-8")
    return MAGIC + _LENGTH.pack(len(text)) + text


def _sealed(record, keys):
    body = _RECORD.pack(_MARK, record[1], record[0], record[2], record[3], 0)
    return body[:-4] + _LENGTH.pack(zlib.crc32(body[:-4] + keys))


def _records(content):
    """Yield ((first, count, checksum, error), keys as bytes) up to the first record that is damaged or not whole."""
    place = 0
    while place + _RECORD.size <= len(content):
        mark, count, first, checksum, error, _ = _RECORD.unpack_from(content, place)
        keys = content[place + _RECORD.size:place + _RECORD.size + count * KEY_BYTES]
        record = (first, count, checksum, error)
        if mark != _MARK or content[place:place + _RECORD.size] != _sealed(record, keys):
            return
        yield record, keys
        place += _RECORD.size + len(keys)
