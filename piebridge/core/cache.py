"""An exact feature cache on disk: rows in a fixed order, written in chunks, each chunk with a checksum.

A killed process loses nothing that it had written, and a torn write is found by its checksum and computed again, so no write has
to be synced while training. The whole file is bound to a key (network, data, transform, level, backend, samples): another key,
another file.
"""

import os
import zlib

import numpy as np

from piebridge.core.files import read_json, sha256_of_json, write_json

COPIED_AT_ONCE = 1024  # rows; what is read of the maps stays small
_CHUNK = np.dtype([("is_done", np.uint8), ("checksum", np.uint32)])


class FeatureCache:
    """float32 rows of `width` for the samples `indices` (list of int), in `folder`.

    Chunk k holds the samples indices[k * chunk_size : (k + 1) * chunk_size]; they are computed together, so that a resumed run
    computes what it lacks in the same batches and gets the same bits.
    """

    def __init__(self, folder, key, indices, width, chunk_size):
        self.indices = [int(index) for index in indices]
        self.chunk_size, self.width = chunk_size, width
        self.chunks = [self.indices[start:start + chunk_size] for start in range(0, len(self.indices), chunk_size)]
        self._row_of = {index: row for row, index in enumerate(self.indices)}
        digest = sha256_of_json({"key": key, "indices": self.indices, "width": width, "chunk_size": chunk_size})
        folder.mkdir(parents=True, exist_ok=True)
        header = folder / "key.json"
        shapes = {"features.f32": (np.dtype(np.float32), (max(1, len(self.indices)), width)),
                  "chunks.index": (_CHUNK, (max(1, len(self.chunks)),))}
        is_ours = read_json(header) == {"key": digest} and all(_has_size(folder / name, *shape) for name, shape in shapes.items())
        if not is_ours and header.exists():
            header.unlink()
        if not is_ours:
            for name, (dtype, shape) in shapes.items():
                _allocate(folder / name, dtype.itemsize * int(np.prod(shape)))
            write_json(header, {"key": digest})
        self._rows, self._index = [np.memmap(str(folder / name), dtype, "r+", shape=shape)
                                   for name, (dtype, shape) in shapes.items()]

    def missing_chunks(self):
        """Numbers of the chunks that have to be computed: never written, or damaged since."""
        return [number for number in range(len(self.chunks))
                if not self._index["is_done"][number] or self._checksum(number) != self._index["checksum"][number]]

    def write(self, number, indices, features):
        """Store chunk `number`: float32 [B, width] for its samples `indices`; the others could not be read and stay absent (NaN)."""
        self._rows[self._span(number)] = np.nan
        if indices:
            self._rows[[self._row_of[index] for index in indices]] = features
        self._index[number] = (1, self._checksum(number))

    def present(self):
        """The samples that have features, in order."""
        return [index for index, first in zip(self.indices, self._rows[:len(self.indices), 0]) if not np.isnan(first)]

    def read(self, indices):
        """Samples (list of int) -> float32 [B, width], a copy."""
        return self._rows[[self._row_of[index] for index in indices]]

    def _span(self, number):
        start = number * self.chunk_size
        return slice(start, start + len(self.chunks[number]))

    def _checksum(self, number):
        return zlib.crc32(np.ascontiguousarray(self._rows[self._span(number)]).tobytes())


class GatheredFeatures:
    """The features that training reads, from several caches, in one file: a row per sample, so that a batch is one look-up."""

    def __init__(self, path, samples, width, caches):
        """caches: list of (FeatureCache, samples to take from it)."""
        _allocate(path, max(1, samples) * width * 4)
        mapped = np.memmap(str(path), np.float32, "r+", shape=(max(1, samples), width))
        for cache, indices in caches:
            for start in range(0, len(indices), COPIED_AT_ONCE):
                piece = indices[start:start + COPIED_AT_ONCE]
                mapped[piece] = cache.read(piece)
        self._rows = np.asarray(mapped)  # the same memory without the map's slower indexing

    def read(self, indices):
        """Samples (list of int) -> float32 [B, width], a copy."""
        return self._rows[indices]


def _has_size(path, dtype, shape):
    return path.is_file() and path.stat().st_size == dtype.itemsize * int(np.prod(shape))


def _allocate(path, size):
    """A file of zeros whose blocks exist: writing through a map to a full disk would kill the process, failing here does not."""
    with open(str(path), "wb") as stream:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, size)
        else:
            stream.truncate(size)
