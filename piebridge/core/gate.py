"""The gate decides, sample by sample, whether a backward is worth running, and what it counts.

`gate.select(losses, indices)`: losses float [B] of the samples `indices` (list of int [B]) -> None, all of them run backward and
count alike, or (is_selected bool [B], weights float [B] or None). See `step.gated_loss` for what follows from it.
"""


class OpenGate:
    """Every sample runs backward."""

    def select(self, losses, indices=None):
        """None: all of them."""
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


class BatchGate:
    """A gate as a step sees it, which does not know whose losses it has: with the batch's samples filled in."""

    def __init__(self, gate, indices):
        self._gate, self.indices = gate, indices

    def select(self, losses):
        return self._gate.select(losses, self.indices)
