"""The level that each sample starts at, by what the configured router looks at."""

import functools

import numpy as np

from piebridge.core.as_released import NoisyPolicy
from piebridge.core.loader import in_batches

POLICY_BATCH = 32  # images that a policy looks at together
PREDICTED_ROWS = 512  # features that a predictor reads together


class Routing:
    """part: a FrozenPart, which has the images, and computes and keeps features through a level."""

    def __init__(self, part):
        self.part, self.work, self.config = part, part.work, part.config

    def of(self, levels, proxies):
        """The level of every sample [samples], and a list of (cache, samples that it serves)."""
        kind, filled = self.config.router.kind, {}
        if proxies.predictor is not None:
            routing, filled[len(levels) - 1] = self._by_prediction(levels[-1], proxies.residual_router())
        elif kind in ("residual", "random"):
            return self._cascade(levels, proxies)
        elif kind in ("policy", "shuffled"):
            with self.work.clock.phase("proxies"):
                routing = self.by_policy(*proxies.policy())
        else:
            routing = np.full(self.part.count, 0 if kind == "importance" else 1, dtype=np.int64)
        if not self.part.is_cached:
            return routing, []
        served = {number: np.flatnonzero(routing == number).tolist() for number in range(len(levels))}
        for number, indices in served.items():
            if indices and number not in filled:
                filled[number] = self.part.filled(levels[number], indices)
        return routing, [(filled[number], indices) for number, indices in served.items() if indices]

    def by_policy(self, policy, numbers):
        """The level of each sample [samples] by its image; one that cannot be read has level 0. numbers: level for each output.

        router.kind=shuffled: the same levels, dealt out by lot.
        """
        if self.config.as_released:  # with noise, and its time not counted
            with self.work.clock.evaluation():
                return self._looked_at(NoisyPolicy(policy, self.part.count, self.config.seed), numbers)
        routing = self._looked_at(policy, numbers)
        is_dealt = self.config.router.kind == "shuffled"
        return np.random.RandomState(self.config.seed).permutation(routing) if is_dealt else routing

    def _looked_at(self, policy, numbers):
        routing = np.zeros(self.part.count, dtype=np.int64)
        for indices, images in self.part.loader(policy.size).batches(in_batches(self.part.count, POLICY_BATCH), self.work.view_seed(0)):
            if indices:
                routing[indices] = numbers[policy(images, indices)]
        return routing

    def _by_prediction(self, cheapest, router):
        """(level of each sample [samples] by its features through the cheapest level, the cache of these)."""
        cache, routing = self.part.filled(cheapest, list(range(self.part.count))), np.zeros(self.part.count, dtype=np.int64)
        with self.work.clock.phase("proxies"):
            present = cache.present()
            for start in range(0, len(present), PREDICTED_ROWS):
                piece = present[start:start + PREDICTED_ROWS]
                routing[piece] = router(cache.read(piece))
        return routing, cache

    def _cascade(self, levels, proxies):
        """Route every sample to the cheapest level whose residual is bounded by the tolerance: (routing, caches).

        The bound is computed from the level's own features, which therefore have to be computed first; accepted, they are
        what the cache keeps, rejected, the sample goes on to the next dearer level.
        """
        routing = np.zeros(self.part.count, dtype=np.int64)
        calibration, cascade = set(proxies.calibration), proxies.cascade()
        caches, filled = [(proxies.calibration_cache, proxies.calibration)], {}
        pending = [index for index in range(self.part.count) if index not in calibration]
        for number in range(len(levels) - 1, 0, -1):
            level = levels[number]
            filled[number] = self.part.filled(level, pending)
            accepted = self.work.decisions.decide(f"served by {level.name}", functools.partial(
                cascade.accepted, number, filled, filled[number].present()))
            routing[accepted] = number
            caches.append((filled[number], accepted))
            pending = sorted(set(pending) - set(accepted))
        if self.part.is_cached:
            caches.append((self.part.filled(self.part.original, pending), pending))
        return routing, caches
