"""The router gives every sample its level: level 0 is the original, higher levels are cheaper.

The first level comes from difficulty (core/difficulty.py, core/policy.py); here importance moves it from epoch to epoch.
"""

import numpy as np


class FixedRouter:
    """Every sample uses one level, always."""

    def __init__(self, levels):
        self.levels = np.asarray(levels, dtype=np.int64)  # [samples]

    def update(self, indices, losses, is_selected):
        pass

    def end_epoch(self):
        pass

    def state(self):
        return {"levels": self.levels.tolist()}

    def restore(self, state):
        self.levels = np.array(state["levels"], dtype=np.int64)


class DataAwareRouter(FixedRouter):
    """Difficulty gives the first level; importance moves it: a sample whose backward was skipped goes one level up (cheaper).

    That is the paper's rule, and levels only ever go up. With `lowers` a sample whose backward ran and whose loss has risen since it
    was last seen goes one level down (dearer), to the original at most. Changes count from the next epoch on, so that the batches of
    the current one stay what they are.

    cheapest: the highest level that a sample may have.
    """

    def __init__(self, levels, cheapest, lowers=False):
        super().__init__(levels)
        self.cheapest = int(cheapest)
        self._lowers = lowers
        self._steps = np.zeros_like(self.levels)
        self._losses = np.full(len(self.levels), np.inf)  # when a sample was last seen; at first nothing can have risen

    def update(self, indices, losses, is_selected):
        """indices: list of int [B]; losses: float tensor [B]; is_selected: bool tensor [B], False where the gate skipped the sample;
        None: none was."""
        indices = np.asarray(indices)
        has_run = np.ones(len(indices), dtype=bool) if is_selected is None else is_selected.cpu().numpy()
        self._steps[indices[~has_run]] = 1
        if self._lowers:
            losses = losses.cpu().numpy().astype(np.float64)
            self._steps[indices[has_run & (losses > self._losses[indices])]] = -1
            self._losses[indices] = losses

    def give_up(self, level):
        """No sample may use `level` or a cheaper one, from the next epoch on."""
        self.cheapest = min(self.cheapest, max(0, level - 1))

    def end_epoch(self):
        self.levels = np.clip(self.levels + self._steps, 0, self.cheapest)
        self._steps[:] = 0

    def state(self):
        return {"levels": self.levels.tolist(), "steps": self._steps.tolist(), "cheapest": self.cheapest, "losses": self._losses.tolist()}

    def restore(self, state):
        super().restore(state)
        self._steps = np.array(state["steps"], dtype=np.int64)
        self.cheapest, self._losses = state["cheapest"], np.array(state["losses"], dtype=np.float64)


class RandomRouter(DataAwareRouter):
    """Levels by lot, at the cost of the data-aware router: as many samples at each level, each epoch other ones.

    levels: those that routing by difficulty gave; their shares are kept, and move with importance as they would there.
    """

    def __init__(self, levels, cheapest, lowers=False, seed=0):
        super().__init__(levels, cheapest, lowers)
        self._seed, self._draws = seed, 0
        self._draw()

    def _draw(self):
        self.levels = self.levels[np.random.RandomState([self._seed, self._draws]).permutation(len(self.levels))]
        self._draws += 1

    def end_epoch(self):
        super().end_epoch()
        self._draw()

    def state(self):
        return dict(super().state(), draws=self._draws)

    def restore(self, state):
        super().restore(state)
        self._draws = state["draws"]


class ClosingRouter:
    """Another router until the last epochs, which run through the original: what was trained through proxies meets what it will serve.

    closing: how many of `epochs` these are.
    """

    def __init__(self, router, epochs, closing):
        self._router, self._first, self._epoch = router, max(0, epochs - closing), 0

    @property
    def levels(self):
        return np.zeros_like(self._router.levels) if self._epoch >= self._first else self._router.levels

    @property
    def cheapest(self):
        return self._router.cheapest

    def update(self, indices, losses, is_selected):
        self._router.update(indices, losses, is_selected)

    def give_up(self, level):
        self._router.give_up(level)

    def end_epoch(self):
        self._router.end_epoch()
        self._epoch += 1

    def state(self):
        return {"router": self._router.state(), "epoch": self._epoch}

    def restore(self, state):
        self._router.restore(state["router"])
        self._epoch = state["epoch"]
