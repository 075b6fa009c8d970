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


class LossGate:
    """A sample runs backward when its loss is above a running threshold.

    PieBridge, data importance: theta starts at the first loss and follows theta <- m * theta + (1 - m) * loss with the mean loss of
    each batch; a sample with loss > theta runs backward, the others are skipped and may use a cheaper level from then on.
    """

    def __init__(self, momentum):
        self._momentum = momentum
        self._threshold = None

    def select(self, losses, indices=None):
        """losses: float [B] -> (bool [B], None), True where the sample's backward runs, or None for all of them."""
        mean = float(losses.mean())
        if self._threshold is None:
            self._threshold = mean
            return None  # nothing to compare the first batch with
        chosen = losses > self._threshold
        self._threshold = self._momentum * self._threshold + (1 - self._momentum) * mean
        return chosen, None

    def state(self):
        return {"threshold": self._threshold}

    def restore(self, state):
        self._threshold = state["threshold"]


class BatchGate:
    """A gate as a step sees it, which does not know whose losses it has: with the batch's samples filled in."""

    def __init__(self, gate, indices):
        self._gate, self._indices = gate, indices

    def select(self, losses):
        return self._gate.select(losses, self._indices)


GATES = {"none": lambda settings: OpenGate(), "loss": lambda settings: LossGate(settings.momentum)}
