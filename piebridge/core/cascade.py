"""Routing from the cheapest level upwards: a level keeps the samples that it may serve, and the rest goes on to the next dearer one."""

import numpy as np

PIECE = 512  # features that a predictor reads together


class Cascade:
    """Which samples a level may serve: those whose residual is within the tolerance, or (kind=random) as many by lot.

    candidates: `router` (a ResidualRouter of this level alone) and `share` (of the samples that it is expected to serve) of levels
    1, 2, ..., dearest first.
    """

    def __init__(self, candidates, kind, seed):
        self._candidates, self._kind, self._seed = candidates, kind, seed

    def accepted(self, number, caches, indices):
        """The samples of `indices` that level `number` may serve; `caches` has their features: {level: cache}, this and cheaper ones."""
        if not indices:
            return []
        if self._kind == "random":
            return self._by_lot(number, caches, indices)
        return self._within_tolerance(number, caches, indices)

    def _within_tolerance(self, number, caches, indices):
        router, cache = self._candidates[number - 1].router, caches[number]
        pieces = [indices[start:start + PIECE] for start in range(0, len(indices), PIECE)]
        return [index for piece in pieces for index, level in zip(piece, router(cache.read(piece))) if level]

    def _by_lot(self, number, caches, indices):
        """As many as the residual router would take here, so that both cost the same: its share is seen on those of the samples
        that it, too, would not have given a cheaper level."""
        left = indices
        for cheaper in range(len(self._candidates), number, -1):
            taken = set(self._within_tolerance(cheaper, caches, left))
            left = [index for index in left if index not in taken]
        share = len(self._within_tolerance(number, caches, left)) / len(left) if left else self._candidates[number - 1].share
        random = np.random.RandomState((self._seed * 1000 + number) % 2 ** 32)
        chosen = random.permutation(len(indices))[:int(round(share * len(indices)))]
        return sorted(np.asarray(indices)[chosen].tolist())
