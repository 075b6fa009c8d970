"""Rows of samples, computed once: features at any tap, or pixels. A sample is known by what its file holds, not by its place."""

import numpy as np

READ_AT_ONCE = 1024  # rows; what is read of the maps stays small
_NOWHERE = np.iinfo(np.int64).max  # an index error for whoever reads it


class FeatureCache:
    """The rows of the samples `indices` (list of int) in a RowStore.

    codec: RowCodec. keys: of the samples, KEY_TYPE [N]; samples with one key share a row. confirm: called with the samples of a chunk
    before it is stored; raises where they are not what their keys say.

    Chunk k holds the samples indices[k * chunk_size : (k + 1) * chunk_size]; what it lacks is computed together and stored in one
    piece. So a resumed run computes what it lacks in the batches of the run that was killed, and gets the same bits.
    """

    def __init__(self, store, codec, keys, indices, chunk_size, confirm=lambda indices: None):
        self.codec, self.shape = codec, codec.shape
        self.indices = [int(index) for index in indices]
        self.chunks = [self.indices[start:start + chunk_size] for start in range(0, len(self.indices), chunk_size)]
        self.store, self._confirm, self._chunk_size = store, confirm, chunk_size
        self._keys, first, self._row_of = np.unique(keys, return_index=True, return_inverse=True)
        self._is_first = np.zeros(len(self.indices), bool)  # of those with its key
        self._is_first[first] = True
        self._place = np.full(max(self.indices) + 1 if self.indices else 0, -1, np.int64)
        self._place[self.indices] = np.arange(len(self.indices))
        self._locations = store.find(self._keys)
        self.found = int((self._locations >= 0).sum())  # of the rows; the others have to be computed
        self.lacking = len(self._keys) - self.found

    def missing_chunks(self):
        """Numbers of the chunks that lack a row: never computed, of a content that has changed, or damaged since."""
        lacks = self._is_first & (self._locations[self._row_of] < 0)
        return sorted(set((np.flatnonzero(lacks) // self._chunk_size).tolist()))

    def missing(self, number):
        """The samples of a chunk whose rows have to be computed, in order; of several with one content the first."""
        return [index for index in self.chunks[number] if self._is_first[self._place[index]] and not self._is_here(index)]

    def untried(self):
        """The samples without a row that no chunk tries, since another one with their content does."""
        return [index for (index, is_here), is_first in zip(self._marked(), self._is_first.tolist()) if not (is_here or is_first)]

    def present(self):
        """The samples that have a row, in order."""
        return [index for index, is_here in self._marked() if is_here]

    def reserve(self):
        """Make room for what is missing. UserError where there is none."""
        self.store.reserve(int((self._locations < 0).sum()))

    def write(self, indices, rows):
        """Store rows [B, *shape] of the samples `indices` (one or more), which were computed together."""
        self._confirm(indices)
        packed, error = self.codec.encode(rows)
        slots = self._row_of[self._place[indices]]
        self._locations[slots] = self.store.append(self._keys[slots], packed, error)

    def close(self):
        """All that could be computed is; give back what was reserved for the rest."""
        self.store.trim()

    def read(self, indices):
        """Samples (list of int) -> rows [B, *shape], a copy."""
        return self.codec.decode(self.store.take(self.locations(indices)))

    def locations(self, indices):
        """Where the rows of samples (list of int) are in the store, int64 [B]."""
        return self._locations[self._row_of[self._place[indices]]]

    def error(self):
        """The largest relative error with which a row was written."""
        return self.store.error(self._locations[self._locations >= 0])

    def _is_here(self, index):
        return self._locations[self._row_of[self._place[index]]] >= 0

    def _marked(self):
        return zip(self.indices, (self._locations >= 0)[self._row_of].tolist())


class RowTable:
    """The rows that training reads, from several caches of one store, by sample: a batch is one look-up, and nothing is copied before."""

    def __init__(self, store, codec, samples, served):
        """samples: how many there are. served: list of (FeatureCache, samples to take from it); those without a row are not `usable`."""
        self.codec = codec
        self._store = store
        self._locations = np.full(samples, _NOWHERE, np.int64)
        for cache, indices in served:
            self._locations[indices] = cache.locations(indices)
        self._locations[self._locations < 0] = _NOWHERE
        self.usable = np.flatnonzero(self._locations != _NOWHERE).tolist()
        self._memory = None  # of the pack, where all rows are in one
        piece = store.in_one_piece(self._locations[self.usable])
        if piece is not None:
            self._memory, self._locations[self.usable] = piece

    def read(self, indices):
        """Samples (list of int) -> rows [B, *shape], a copy."""
        locations = self._locations[indices]
        return self.codec.decode(self._store.take(locations) if self._memory is None else self._memory.take(locations, axis=0))

    def pieces(self):
        """Yield the rows of the usable samples, a thousand at a time."""
        for start in range(0, len(self.usable), READ_AT_ONCE):
            yield self.read(self.usable[start:start + READ_AT_ONCE])
