"""The router gives every sample its level: level 0 is the original, higher levels are cheaper."""

import numpy as np


class FixedRouter:
    """Every sample uses one level, always."""

    def __init__(self, levels):
        self.levels = np.asarray(levels, dtype=np.int64)  # [samples]

    def update(self, indices, is_selected):
        pass

    def end_epoch(self):
        pass

    def state(self):
        return {"levels": self.levels.tolist()}

    def restore(self, state):
        self.levels = np.array(state["levels"], dtype=np.int64)


class DataAwareRouter(FixedRouter):
    """Difficulty gives the first level; importance moves it: a sample whose backward was skipped goes one level up (cheaper).

    Changes count from the next epoch on, so that the batches of the current one stay what they are.
    """

    def __init__(self, levels, cheapest):
        super().__init__(levels)
        self._cheapest = cheapest
        self._steps = np.zeros_like(self.levels)

    def update(self, indices, is_selected):
        """indices: list of int [B]; is_selected: bool tensor [B], False where the gate skipped the sample; None: none was."""
        if is_selected is None:
            return
        skipped = np.asarray(indices)[~is_selected.cpu().numpy()]
        self._steps[skipped] = 1

    def end_epoch(self):
        self.levels = np.minimum(self.levels + self._steps, self._cheapest)
        self._steps[:] = 0

    def state(self):
        return {"levels": self.levels.tolist(), "steps": self._steps.tolist()}

    def restore(self, state):
        super().restore(state)
        self._steps = np.array(state["steps"], dtype=np.int64)


class ResidualPredictor:
    """Ridge regression of a level's log residual on the direction of a proxy's features, in dual form (few samples, many columns)."""

    def __init__(self, features, residuals, penalty=0.1):
        """features: float [N, D] of the calibration images through one proxy; residuals: float [N] of the level that is predicted."""
        inputs = _unit_rows(features)
        self._mean = inputs.mean(0)
        inputs = inputs - self._mean
        targets = np.log(np.asarray(residuals, np.float64) + 1e-9)
        self._offset = targets.mean()
        gram = inputs @ inputs.T
        damped = gram + penalty * max(np.trace(gram) / len(gram), 1e-12) * np.eye(len(gram))
        self._weights = inputs.T @ np.linalg.solve(damped, targets - self._offset)

    def __call__(self, features):
        """float [N, D] -> predicted relative residual, float [N]."""
        return np.exp(self._offset + (_unit_rows(features) - self._mean) @ self._weights)


def _unit_rows(features):
    features = np.asarray(features, np.float64)
    return features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-12)
