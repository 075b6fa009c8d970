"""Which candidate runs a part of a step fastest, and right? Each is checked against the reference; those that agree are timed in turns."""

import importlib.util
import logging
import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

import torch

from piebridge.core.errors import UserError
from piebridge.core.packages import one_line
from piebridge.engine.step_graph import BUFFER, DRAW, STATE, TRAINED, StepGraph

LOG = logging.getLogger(__name__)
CHANGED = (TRAINED, STATE, BUFFER)
# The check's update: states as after many updates, so that the new values depend smoothly on the gradients (AdamW's first update is
# their sign, which rounding may turn), and a rate at which changes are larger than the rounding of the values.
CHECKED_RATE, CHECKED_COUNT, CHECKED_SQUARE = 1.0, 1000.0, 1.0
# An update that is smaller than this share of its tensor, or of the largest update beside it, counts as if it were that large: below it
# is rounding, as in the bias before a train-mode batch norm, whose gradient is zero.
LEAST_UPDATE, LEAST_SHARE = 1e-4, 1e-3
HOPELESS = 1.5  # times the fastest: no further turns


@dataclass(frozen=True)
class Candidate:
    """build(tensors) -> an executor on them; it may replace entries of the dict. packages: must be installed. rounding: relative error
    that its number format makes unavoidable. build_seconds: what building typically takes, where that is long. hindrance: why it cannot
    run this part, where that is known beforehand.
    """

    name: str
    build: Callable
    packages: Tuple[str, ...] = ()
    rounding: float = 0.0
    build_seconds: float = 0.0
    hindrance: Optional[str] = None

    def cannot(self):
        """Why it cannot run here, or None."""
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        return "not installed: " + ", ".join(missing) if missing else self.hindrance


@dataclass
class Trial:
    """A part of a step and what it is tried on. part: its name in the records; tensors: {(role, name): tensor}, the live ones, which stay
    as they are; batch, weights: of real shapes and values (weights None for a prefix).
    """

    part: str
    step: StepGraph
    tensors: Dict[Tuple[str, str], torch.Tensor]
    batch: List[torch.Tensor]
    weights: Optional[torch.Tensor] = None
    draws: List[torch.Tensor] = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(0)  # a probe leaves the run's random numbers alone
        self.draws = [torch.empty(value.shape, dtype=value.dtype).bernoulli_(value.facts["keep"], generator=generator)
                      for _, value in self.step.inputs_of(DRAW)]

    def run(self, executor, rate):
        """One step at this rate: [losses, outputs]; of a prefix, its values."""
        if self.weights is None:
            return executor.results(self.batch, draws=self.draws)
        return executor.run(self.batch, self.weights, rate, CHECKED_COUNT, self.draws)

    def own_tensors(self):
        """The tensors for one candidate, with copies of those that it changes."""
        keys = [(value.role, value.name) for value in self.step.inputs if (value.role, value.name) in self.tensors]
        return {key: self.tensors[key].detach().clone() if key[0] in CHANGED else self.tensors[key] for key in keys}


@dataclass
class Outcome:
    """candidate: the fastest's name; executor, on `tensors`, which have the live ones' values; milliseconds: its median; values: what the
    reference's run gave (losses, outputs). measurements: [{part, candidate, verdict, milliseconds, error, build_seconds}].
    """

    candidate: str
    executor: object
    tensors: dict
    milliseconds: float
    values: list
    measurements: List[dict]


def probe(trial, candidates, tolerance=1e-3, budget_seconds=60.0, turns=5, clock=time.perf_counter):
    """Outcome of a race. The first candidate is the reference: it is always built, and the others' results are compared with its own.

    tolerance: largest relative error of an output, and of an update against the update itself. budget_seconds: when they are over, nothing
    new is built and no further turn begins. clock() -> seconds. Whatever another candidate raises, it is refused with the reason.
    """
    race = _Race(trial, tolerance, clock, clock() + budget_seconds)
    for candidate in candidates:
        race.enter(candidate)
    race.time(turns)
    return race.outcome()


class _Race:
    def __init__(self, trial, tolerance, clock, end):
        self.trial, self.tolerance, self.clock, self.end = trial, tolerance, clock, end
        self.built, self.seconds, self.notes, self.reference = {}, {}, {}, None

    def enter(self, candidate):
        verdict = None if self.reference is None else self._why_not(candidate)
        if verdict is None:
            verdict = self._build(candidate)
        self.notes.setdefault(candidate.name, {}).update(verdict=verdict)

    def _why_not(self, candidate):
        if candidate.cannot():
            return candidate.cannot()
        if candidate.rounding > self.tolerance:
            return f"refused: its numbers are rounded to {candidate.rounding:.2g}, more than the tolerance {self.tolerance:.2g}"
        left = self.end - self.clock()
        if left < candidate.build_seconds or left <= 0:
            return f"not tried: takes about {candidate.build_seconds:.0f} s to build, and {max(left, 0):.0f} s are left for it"
        return None

    def _build(self, candidate):
        note = self.notes[candidate.name] = {}
        tensors = self.trial.own_tensors()
        try:
            begin = self.clock()
            executor = candidate.build(tensors)
            _prepare(tensors)
            results = self._results(self.trial.run(executor, CHECKED_RATE), tensors)  # the first run belongs to what building costs
            note["build_seconds"] = self.clock() - begin
            if self.reference is None:
                self.reference = results
        except Exception as failure:  # whatever a library raises, the others can still run
            if self.reference is None:
                raise
            LOG.debug("candidate %s failed", candidate.name, exc_info=True)
            return "refused: " + one_line(failure)
        finally:
            self._restore(tensors)
        note["error"], where = self._error(results)
        if note["error"] > self.tolerance:
            return f"refused: its {where} differs by {note['error']:.2g}, more than the tolerance {self.tolerance:.2g}"
        self.built[candidate.name] = executor, tensors
        return "agrees"

    def _restore(self, tensors):
        for key, tensor in tensors.items():
            if key[0] in CHANGED:
                tensor.copy_(self.trial.tensors[key])

    def _results(self, returned, tensors):
        changed = {(value.role, value.name) for value in self.trial.step.outputs if value.role in CHANGED}
        return [each.detach().clone() for each in returned], {key: tensors[key].detach().clone() for key in changed}

    def _error(self, results):
        """(largest relative error, of what)."""
        values, updates = results
        names = [f"{value.role} {value.name}" for value in self.trial.step.outputs if value.role not in CHANGED]
        errors = [(_distance(found, expected) / max(_size(expected), 1e-30), name)
                  for found, expected, name in zip(values, self.reference[0], names)]
        if any(found.shape != expected.shape for found, expected in zip(values, self.reference[0])) or len(values) != len(names):
            raise UserError("its results have other shapes than the reference's")
        errors += self._update_errors(updates)
        worst = max(errors, default=(0.0, ""), key=lambda each: each[0] if math.isfinite(each[0]) else math.inf)
        return worst if math.isfinite(worst[0]) else (math.inf, worst[1])

    def _update_errors(self, updates):
        sizes, largest = {}, {}
        for key, expected in self.reference[1].items():
            old = self._old(key)
            sizes[key] = max(_distance(expected, old), LEAST_UPDATE * _size(old))
            largest[_kind(key)] = max(largest.get(_kind(key), 1e-30), sizes[key])
        return [(_distance(updates[key], self.reference[1][key]) / max(size, LEAST_SHARE * largest[_kind(key)]), f"new {key[0]} {key[1]}")
                for key, size in sizes.items()]

    def _old(self, key):
        live = self.trial.tensors[key]
        return torch.full_like(live, _checked_state(key)) if key[0] == STATE else live

    def time(self, turns):
        """In turns, so that whatever else the machine does falls on all alike. At rate 0: trained values stay, and so does the work.

        Each runs once before it is timed: a library's threads spin for a while after their last call, and take the cores from those of the
        next one (measured: PyTorch's step 1.8 times slower behind another runtime's).
        """
        running = list(self.built)
        self.seconds = {name: [] for name in running}
        for turn in range(turns):
            if turn and self.clock() > self.end:
                break
            for name in running:
                self.trial.run(self.built[name][0], 0.0)
                begin = self.clock()
                self.trial.run(self.built[name][0], 0.0)
                self.seconds[name].append(self.clock() - begin)
            fastest = min(min(self.seconds[name]) for name in running)
            running = [name for name in running if min(self.seconds[name]) <= HOPELESS * fastest]
        for _, tensors in self.built.values():
            self._restore(tensors)

    def outcome(self):
        medians = {name: statistics.median(seconds) for name, seconds in self.seconds.items()}
        best = min(medians, key=medians.get)
        measurements = [{
            "part": self.trial.part, "candidate": name, "verdict": "fastest" if name == best else note["verdict"],
            "milliseconds": round(1000 * medians[name], 3) if name in medians else None,
            "error": note["error"] if math.isfinite(note.get("error", math.inf)) else None,
            "build_seconds": round(note["build_seconds"], 3) if "build_seconds" in note else None} for name, note in self.notes.items()]
        executor, tensors = self.built[best]
        return Outcome(best, executor, tensors, 1000 * medians[best], self.reference[0], measurements)


def _prepare(tensors):
    for key, tensor in tensors.items():
        if key[0] == STATE:
            tensor.fill_(_checked_state(key))


def _checked_state(key):
    return CHECKED_SQUARE if key[1].endswith("/square") else 0.0


def _kind(key):
    """Updates of one kind are of comparable size: "running_var" of all batch norms, "mean" of all states, all trained tensors."""
    role, name = key
    return role, {STATE: name.rpartition("/")[2], BUFFER: name.rpartition(".")[2]}.get(role, "")


def _distance(a, b):
    return float((a.double() - b.double()).norm())


def _size(a):
    return float(a.double().norm())
