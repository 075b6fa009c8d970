"""The gate decides, sample by sample, whether a backward is worth running."""


class OpenGate:
    """Every sample runs backward."""

    def select(self, losses):
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

    def select(self, losses):
        """losses: float [B] -> bool [B], True where the sample's backward runs, or None for all of them."""
        mean = float(losses.mean())
        if self._threshold is None:
            self._threshold = mean
            return None  # nothing to compare the first batch with
        chosen = losses > self._threshold
        self._threshold = self._momentum * self._threshold + (1 - self._momentum) * mean
        return chosen

    def state(self):
        return {"threshold": self._threshold}

    def restore(self, state):
        self._threshold = state["threshold"]


GATES = {"none": lambda settings: OpenGate(), "loss": lambda settings: LossGate(settings.momentum)}
