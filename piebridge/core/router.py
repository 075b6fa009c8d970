"""The router gives every sample its level: level 0 is the original, higher levels are cheaper."""

import numpy as np
import torch


class FixedRouter:
    """Every sample uses one level, always."""

    def __init__(self, count, level=0):
        self.levels = np.full(count, level, dtype=np.int64)

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
        self.levels = np.asarray(levels, dtype=np.int64)
        self._cheapest = cheapest
        self._steps = np.zeros_like(self.levels)

    def update(self, indices, is_selected):
        """indices: list of int [B]; is_selected: bool tensor [B], False where the gate skipped the sample."""
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


def image_descriptors(images):
    """float32 [N, 3, H, W] normalised images -> float32 [N, 12]: what they lose at each halving of the resolution, and their colours.

    A proxy at a lower resolution, or with fewer blocks, fails on images whose content is in fine detail; the energy that each octave
    holds says so for a fraction of the cost of any network.
    """
    columns = [images.mean(dim=(2, 3)), images.std(dim=(2, 3))]
    current = images
    for _ in range(5):
        if min(current.shape[-2:]) < 4:
            break
        smaller = torch.nn.functional.avg_pool2d(current, 2)
        lost = (current ** 2).mean(dim=(1, 2, 3)) - (smaller ** 2).mean(dim=(1, 2, 3))  # Pythagoras: averaging is a projection
        columns.append(torch.log(lost.clamp_min(1e-6))[:, None])
        current = smaller
    columns.append((images.amin(1) > images.amax() - 1e-3).float().mean(dim=(1, 2))[:, None])  # share of white paper
    return torch.cat(columns, dim=1)


class ResidualPredictor:
    """Ridge regression of the log residual of a bridged proxy on image descriptors."""

    def __init__(self, descriptors, residuals, penalty=1.0):
        descriptors = np.asarray(descriptors, np.float64)
        self._mean, self._scale = descriptors.mean(0), descriptors.std(0) + 1e-6
        inputs = (descriptors - self._mean) / self._scale
        targets = np.log(np.asarray(residuals, np.float64) + 1e-6)
        self._offset = targets.mean()
        gram = inputs.T @ inputs + penalty * np.eye(inputs.shape[1])
        self._weights = np.linalg.solve(gram, inputs.T @ (targets - self._offset))

    def __call__(self, descriptors):
        """float [N, F] -> predicted relative residual, float [N]."""
        inputs = (np.asarray(descriptors, np.float64) - self._mean) / self._scale
        return np.exp(self._offset + inputs @ self._weights)


def levels_by_residual(predictions, tolerance):
    """predictions: float [L, N], predicted residual of level l + 1 for each sample -> int [N]: the cheapest level within `tolerance`, else 0."""
    levels = np.zeros(predictions.shape[1], dtype=np.int64)
    for level, row in enumerate(predictions, start=1):
        levels[row <= tolerance] = level
    return levels
