"""The gate decides, sample by sample, whether a backward is worth running, and what it counts.

`gate.select(losses, indices)`: losses float [B] of the samples `indices` (list of int [B]) -> None, all of them run backward and
count alike, or (is_selected bool [B], weights float [B] or None). See `step.gated_loss` for what follows from it.
"""

import torch

NO_AVERAGE = -1.0  # a running loss before the first batch, in the released artifact


class OpenGate:
    """Every sample runs backward."""

    def select(self, losses, indices=None):
        """None: all of them."""
        return None

    def weights(self, indices=None):
        """What each sample counts, float [B], for a step that has to know it before the losses; None: all alike."""
        return None

    def state(self):
        return {}

    def restore(self, state):
        pass


class RunningLoss:
    """theta starts at the first batch's mean loss and follows theta <- m * theta + (1 - m) * (a batch's mean loss)."""

    def __init__(self, momentum):
        self._momentum = momentum
        self.value = None

    def follow(self, losses):
        """losses: float [B]. theta as it was before this batch, None at the first one."""
        mean, before = float(losses.mean()), self.value
        self.value = mean if before is None else self._momentum * before + (1 - self._momentum) * mean
        return before


class LossGate:
    """A sample runs backward when its loss is above a running threshold (PieBridge, data importance).

    A sample with loss > theta (see RunningLoss) runs backward, the others are skipped and may use a cheaper level from then on.
    """

    def __init__(self, momentum):
        self._running = RunningLoss(momentum)

    def select(self, losses, indices=None):
        """losses: float [B] -> (bool [B], None), True where the sample's backward runs, or None for all of them."""
        threshold = self._running.follow(losses)
        return None if threshold is None else (losses > threshold, None)  # there is nothing to compare the first batch with

    def state(self):
        return {"threshold": self._running.value}

    def restore(self, state):
        self._running.value = state["threshold"]


class WholeBatchGate:
    """All of a batch runs backward, or none: where its mean loss is above factor * a, a running average of such losses.

    a starts at -1, is then the first batch's loss, and follows a <- m * a + (1 - m) * loss. So a factor of -1 lets every batch pass, but
    for a first one whose loss is at most 1; the artifact's other factor is 0.8, its m 9/11.
    """

    def __init__(self, factor, momentum):
        self._factor, self._momentum = factor, momentum
        self._average = NO_AVERAGE

    def select(self, losses, indices=None):
        """losses: float [B] -> None where the batch runs backward, else (bool [B], all False, None)."""
        loss = float(losses.mean())
        is_selected = loss > self._factor * self._average
        is_first = self._average == NO_AVERAGE
        self._average = loss if is_first else self._momentum * self._average + (1 - self._momentum) * loss
        return None if is_selected else (torch.zeros(len(losses), dtype=torch.bool, device=losses.device), None)

    def state(self):
        return {"average": self._average}

    def restore(self, state):
        self._average = state["average"]


class BatchGate:
    """A gate as a step sees it, which does not know whose losses it has: with the batch's samples filled in."""

    def __init__(self, gate, indices):
        self._gate, self.indices = gate, indices

    def select(self, losses):
        return self._gate.select(losses, self.indices)

    def weights(self):
        return self._gate.weights(self.indices)
