"""A folder of rows by key, which any number of processes read and add to at once, within a disk budget.

Each process adds to a pack of its own (core/row_pack.py). Two processes that add the same rows both do, and are both right. Where the
budget asks for it, the packs that were not used for longest go, but never one that a live process uses.
"""

import contextlib
import fcntl
import shutil
from pathlib import Path

import numpy as np

from piebridge.core.byte_sizes import shown_bytes
from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_json
from piebridge.core.row_pack import Pack, remove_unused

_PACK_SHIFT = 40  # a location is pack << 40 | row
_ROW_MASK = (1 << _PACK_SHIFT) - 1


class RowStore:
    """Rows of `row_bytes` bytes below `root`, among others there; those of one `layout` (JSON dict) lie together.

    budget: bytes that all rows below `root` may take; None: no limit.
    """

    def __init__(self, root, layout, row_bytes, budget=None):
        self.root, self.row_bytes = Path(str(root)), row_bytes
        self._layout = dict(layout, row_bytes=row_bytes)
        self.folder = self.root / sha256_of_json(self._layout)[:16]
        self._budget = budget
        self._packs = None  # found at the first look
        self._own = None  # number of this process's pack

    def find(self, keys):
        """Locations int64 [N] of the rows of `keys` (KEY_TYPE [N]), -1 where there is none that is whole."""
        locations = np.full(len(keys), -1, np.int64)
        for number, pack in enumerate(self._open_packs()):
            missing = np.flatnonzero(locations < 0)
            if not len(missing):
                break
            rows = pack.search(keys[missing])
            is_found = rows >= 0
            locations[missing[is_found]] = (number << _PACK_SHIFT) | rows[is_found]
            if is_found.any():
                pack.touch()
        return locations

    def reserve(self, count):
        """Make room for `count` rows, evicting what nobody uses where the budget asks for it. UserError where there is no room."""
        if not count:
            return
        with self._exclusive():
            needed = count * self.row_bytes
            packs = {index: _size(index.with_suffix(".rows")) for index in self.root.glob("*/*.index")}
            total = sum(packs.values())
            if self._budget is not None and needed <= self._budget < total + needed:
                total -= self._evict(packs, total + needed - self._budget)
            self._check_room(count, needed, total)
            if self._own is None:
                self._own = len(self._open_packs())
                self._packs.append(Pack.create(self.folder, self._layout, self.row_bytes))
        self._packs[self._own].reserve(count)

    def trim(self):
        """Give back what was reserved and not used."""
        if self._own is not None:
            self._packs[self._own].trim()

    def append(self, keys, rows, error):
        """Add rows uint8 [N, row_bytes] in one piece; returns their locations, int64 [N]. error: the largest relative one."""
        if self._own is None:
            self.reserve(len(rows))
        return (self._own << _PACK_SHIFT) | self._packs[self._own].append(keys, rows, error)

    def take(self, locations):
        """Locations int64 [N], in any order -> uint8 [N, row_bytes], a copy."""
        packs, rows = locations >> _PACK_SHIFT, locations & _ROW_MASK
        numbers = np.unique(packs)
        if len(numbers) == 1:
            return self._packs[numbers[0]].take(rows)
        taken = np.empty((len(rows), self.row_bytes), np.uint8)
        for number in numbers:
            is_here = packs == number
            taken[is_here] = self._packs[number].take(rows[is_here])
        return taken

    def error(self, locations):
        """The largest relative error with which one of these rows was written."""
        packs = locations >> _PACK_SHIFT
        return max([self._packs[number].errors(locations[packs == number] & _ROW_MASK) for number in np.unique(packs)] + [0.0])

    def in_one_piece(self, locations):
        """(memory uint8 [R, row_bytes], rows int64 [N]) where all of the locations are in one pack, else None."""
        numbers = np.unique(locations >> _PACK_SHIFT)
        return (self._packs[numbers[0]].mapped(), locations & _ROW_MASK) if len(numbers) == 1 else None

    def close(self):
        """Let go of the packs; rows cannot be read any more."""
        for pack in self._packs or ():
            pack.close()
        self._packs, self._own = None, None

    def _open_packs(self):
        """The packs of this layout, oldest first."""
        if self._packs is None:
            opened = [Pack.open(path, self._layout, self.row_bytes) for path in sorted(self.folder.glob("*.index"))]
            self._packs = [pack for pack in opened if pack is not None]
        return self._packs

    def _evict(self, packs, wanted):
        """Remove packs ({index: bytes}) that nobody uses, the longest unused first, until `wanted` bytes are free; returns how many are."""
        for pack in self._open_packs():
            if not pack.is_used and not pack.is_own:
                pack.close()
        freed = 0
        for index in sorted(packs, key=_last_use):
            if freed < wanted and remove_unused(index):
                freed += packs[index]
                with contextlib.suppress(OSError):  # not empty
                    index.parent.rmdir()
        return freed

    def _check_room(self, count, needed, total):
        what = f"{count} rows of {shown_bytes(self.row_bytes)} take {shown_bytes(needed)}"
        cure = "choose cache.dtype=float16 or int8, or cache.kind=none"
        if self._budget is not None and total + needed > self._budget:
            taken = f", of which others in use take {shown_bytes(total)}" if total else ""
            raise UserError(f"cache.budget={shown_bytes(self._budget).replace(' ', '')}: {what}{taken}; raise it, {cure}")
        free = shutil.disk_usage(str(self.root)).free
        if needed > free:
            raise UserError(f"{self.root}: {what}, and the disk has {shown_bytes(free)} free; free some space, {cure}")

    @contextlib.contextmanager
    def _exclusive(self):
        """One process at a time makes room. The lock goes with its process."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            stream = open(str(self.root / ".lock"), "ab")
        except OSError as error:
            raise UserError(f"cache.folder={self.root}: cannot be written: {error.strerror}; choose another folder") from None
        with stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _size(path):
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last_use(index):
    try:
        return index.stat().st_mtime_ns
    except OSError:
        return 0
