"""The one clock: what training costs, phase by phase, and what it does not."""

import contextlib
import time

# every phase that training is split into; `other` is what runs in none
PHASES = ("setup", "probe", "proxies", "cache", "decode", "frozen", "trainable", "checkpoint", "other")
EVALUATION = "evaluation"


class Clock:
    """Counts `train_seconds` (everything but evaluation) and splits it into exclusive phases.

    A phase inside a phase takes its time away from the outer one, so phases plus `other` add up to `train_seconds`.
    `synchronize` is called before each reading, so that queued accelerator work is charged to the phase that queued it.
    """

    def __init__(self, synchronize=None, now=time.perf_counter):
        self._synchronize = synchronize or (lambda: None)
        self._now = now
        self._started = now()
        self._stack = []  # names of the open phases, innermost last
        self._mark = self._started
        self._seconds = {}
        self._carried_wall = 0.0

    @contextlib.contextmanager
    def phase(self, name):
        if name not in PHASES and name != EVALUATION:
            raise ValueError(f"clock: unknown phase '{name}'; known: {', '.join(PHASES)}")
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def evaluation(self):
        """A phase that `train_seconds` leaves out."""
        return self.phase(EVALUATION)

    @property
    def phases(self):
        """Seconds by phase, `evaluation` left out, `other` for what ran in no phase."""
        self._charge()
        return {name: seconds for name, seconds in self._seconds.items() if name != EVALUATION}

    @property
    def train_seconds(self):
        return sum(self.phases.values())

    @property
    def evaluation_seconds(self):
        self._charge()
        return self._seconds.get(EVALUATION, 0.0)

    @property
    def wall_seconds(self):
        """Everything since the run began, over all its sessions."""
        return self._carried_wall + self._now() - self._started

    def state(self):
        return {"seconds": dict(self.phases, evaluation=self.evaluation_seconds), "wall_seconds": self.wall_seconds}

    def restore(self, state):
        """Go on from a checkpoint: its seconds come on top of what this session has counted so far."""
        for name, seconds in state["seconds"].items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._carried_wall += state["wall_seconds"]

    def _charge(self):
        self._synchronize()
        now = self._now()
        name = "other"
        if self._stack:  # time inside an evaluation is never training, whatever it calls
            name = EVALUATION if EVALUATION in self._stack else self._stack[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now
