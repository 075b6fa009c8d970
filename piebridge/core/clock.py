"""The one clock: what training costs, phase by phase, in seconds and joules, and what it does not."""

import contextlib
import threading
import time

# every phase that training is split into; `other` is what runs in none
PHASES = ("setup", "probe", "proxies", "cache", "decode", "frozen", "trainable", "checkpoint", "other")
EVALUATION = "evaluation"


class Clock:
    """Counts `train_seconds` (everything but evaluation) and splits it into exclusive phases.

    A phase inside a phase takes its time away from the outer one, so phases plus `other` add up to `train_seconds`.
    `synchronize` is called before each reading, so that queued accelerator work is charged to the phase that queued it.
    Energy comes from a meter in a thread of its own (core/power.py): `start_energy`, then `charge_energy` some times a second.
    """

    def __init__(self, synchronize=None, now=time.perf_counter):
        self._synchronize = synchronize or (lambda: None)
        self._now = now
        self._started = now()
        self._stack = []  # names of the open phases, innermost last
        self._mark = self._started
        self._seconds = {}
        self._carried_wall = 0.0
        self._lock = threading.Lock()  # seconds and mark change together
        self._joules = None  # by phase; None: not known for the whole run
        self._metered = {}  # the seconds by phase that have their energy

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

    @property
    def joules(self):
        """Joules by phase, `evaluation` among them; None where they are not known for the whole run."""
        with self._lock:
            return None if self._joules is None else dict(self._joules)

    def start_energy(self):
        """From here on the energy of every moment is known, until `charge_energy(None)`."""
        with self._lock:
            self._joules, self._metered = {}, self._seconds_until_now()

    def charge_energy(self, joules):
        """Charge what was spent since the last call (or `start_energy`) to the phases, by their shares of that time.

        A phase may last a millisecond and a meter is read ten times a second: the power is taken as constant in between. May be
        called from any thread. None: it is not known, and so neither is the run's energy.
        """
        with self._lock:
            if joules is None:
                self._joules = None
            if self._joules is None:
                return
            seconds = self._seconds_until_now()
            taken = {name: max(0.0, count - self._metered.get(name, 0.0)) for name, count in seconds.items()}
            self._metered = seconds
            total = sum(taken.values())
            for name, share in taken.items() if total else [(self._current(), 1.0)]:
                self._joules[name] = self._joules.get(name, 0.0) + joules * share / (total or 1.0)

    def state(self):
        return {"seconds": dict(self.phases, evaluation=self.evaluation_seconds), "wall_seconds": self.wall_seconds,
                "joules": self.joules}

    def restore(self, state):
        """Go on from a checkpoint: its seconds and joules come on top of what this session has counted so far."""
        with self._lock:
            for name, seconds in state["seconds"].items():
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
                self._metered[name] = self._metered.get(name, 0.0) + seconds
            earlier = state.get("joules")
            if earlier is None or self._joules is None:
                self._joules = None
            else:
                self._joules = {name: self._joules.get(name, 0.0) + earlier.get(name, 0.0) for name in {**self._joules, **earlier}}
        self._carried_wall += state["wall_seconds"]

    def _charge(self):
        self._synchronize()
        with self._lock:
            now, name = self._now(), self._current()
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
            self._mark = now

    def _seconds_until_now(self):
        """Seconds by phase with what has passed of the present one, as seen from another thread. The lock must be held."""
        name = self._current()
        return dict(self._seconds, **{name: self._seconds.get(name, 0.0) + self._now() - self._mark})

    def _current(self):
        """The present phase. Time inside an evaluation is never training, whatever it calls."""
        if EVALUATION in self._stack:
            return EVALUATION
        return self._stack[-1] if self._stack else "other"
