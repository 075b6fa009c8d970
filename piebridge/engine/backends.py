"""What runs which part of a step: each candidate measured on this machine, the fastest within a tolerance kept as a plain dict.

A step is cut in two (see segments.py); prefix and rest each run on what is fastest for them. Where one executor of the whole step, such as
PyTorch itself, is faster than both together, that one runs.
"""

import logging
import time

import torch

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.engine.candidates import KNOWN, PREFIX, REFERENCE, REST, WHOLE, Origin, candidates_for
from piebridge.engine.interpreter import Interpreter
from piebridge.engine.probe_step import Trial, probe
from piebridge.engine.segments import cut
from piebridge.engine.step_graph import BATCH, DRAW, WEIGHTS

LOG = logging.getLogger(__name__)


class CutExecutor:
    """Executor (see interpreter.py) of a step from those of its two parts."""

    def __init__(self, step, division, prefix, rest):
        self._prefix, self._rest = prefix, rest
        self._to_prefix = [_positions(step, division.prefix, role) for role in (BATCH, DRAW)]
        self._to_rest = [_positions(step, division.rest, role) for role in (BATCH, DRAW)]

    def run(self, batch, weights, rate, count, draws=()):
        """-> (losses [B], outputs)."""
        inputs, own_draws = _taken(self._to_prefix, batch, draws)
        targets, other_draws = _taken(self._to_rest, batch, draws)
        crossing = self._prefix.results(inputs, draws=own_draws)
        return self._rest.run([*crossing, *targets], weights, rate, count, other_draws)


def _taken(positions, batch, draws):
    return [[tensors[place] for place in places] for places, tensors in zip(positions, (batch, draws))]


def _positions(step, part, role):
    """Which of the step's inputs of a role a part takes, in its order."""
    names = [value.name for _, value in step.inputs_of(role)]
    return [names.index(value.name) for _, value in part.inputs_of(role) if value.name in names]


class FastestExecutor:
    """Makes the executors of a StepProgram: `FastestExecutor(...)(step, tensors)`, by a choice that is measured at the first call.

    batch: list of real tensors in the order of the step's BATCH inputs. origin: an Origin. choice: an earlier one, such as the program's
    file has it; with it nothing is measured, and where it cannot be followed, the reference runs, with a warning. options: of `choose`.
    Attribute: choice, None before the first call.
    """

    def __init__(self, batch=None, origin=None, choice=None, **options):
        self.choice = choice
        self._batch, self._origin, self._options = batch, origin, options

    def __call__(self, step, tensors):
        if self.choice is None:
            executor, self.choice = choose(step, tensors, self._batch, self._origin, **self._options)
            return executor
        try:
            return build(step, tensors, self.choice, self._origin)
        except UserError as problem:
            LOG.warning("%s; until then it runs on the interpreter", problem)
            return Interpreter(step, tensors)


def choose(step, tensors, batch, origin=None, tolerance=1e-3, budget_seconds=120.0, turns=5, candidates=None, clock=time.perf_counter):
    """(executor, choice) of what is fastest.

    tensors: {(role, name): tensor}; those that a step changes are replaced by the winner's own, of equal values. tolerance: see probe_step.
    budget_seconds: for all measuring. candidates: names (see candidates.KNOWN) beside the reference, which is the interpreter; None: all.
    choice, JSON values: parts {"prefix", "rest"} or {"whole"}: candidate's name; milliseconds by part; crossing_bytes; tolerance; seconds
    that choosing took; measurements, a list of {part, candidate, verdict, milliseconds, error, build_seconds}.
    """
    for name in candidates or ():
        if name not in KNOWN:
            raise UserError(f"engine: no candidate {name!r}{closest(name, KNOWN)}; there are {', '.join(KNOWN)}")
    origin, start = origin or Origin(), clock()
    division, outcomes = cut(step), {}
    graphs = {PREFIX: division.prefix, REST: division.rest, WHOLE: step}
    parts = [WHOLE] if division.prefix is None else [PREFIX, REST] + ([WHOLE] if origin.module is not None else [])
    for number, part in enumerate(parts):
        entered = [each for each in candidates_for(part, graphs[part], step, origin)
                   if candidates is None or each.name in (REFERENCE, *candidates)]
        crossing = outcomes[PREFIX].values if part == REST else []
        given = [*crossing, *[batch[place] for place in _positions(step, graphs[part], BATCH)]]
        trial = Trial(part, graphs[part], tensors, given, None if part == PREFIX else _mean_weights(step))
        seconds = (budget_seconds - (clock() - start)) / (len(parts) - number)
        outcomes[part] = probe(trial, entered, tolerance, seconds, turns, clock)
    chosen = {part: outcomes[part] for part in _faster(outcomes)}
    for part, outcome in chosen.items():
        keys = [(value.role, value.name) for value in graphs[part].inputs]
        tensors.update({key: outcome.tensors[key] for key in keys if key in outcome.tensors})
    choice = {
        "parts": {part: outcome.candidate for part, outcome in chosen.items()},
        "milliseconds": {part: round(outcome.milliseconds, 3) for part, outcome in chosen.items()},
        "crossing_bytes": division.crossing_bytes, "tolerance": tolerance, "seconds": round(clock() - start, 3),
        "measurements": [each for outcome in outcomes.values() for each in outcome.measurements]}
    LOG.info("engine: %s", reason(choice))
    return _joined(step, division, {part: outcome.executor for part, outcome in chosen.items()}), choice


def build(step, tensors, choice, origin=None):
    """The executor of an earlier choice. UserError where it cannot run here: a package is missing, or the network that it needs."""
    division = cut(step)
    graphs = {PREFIX: division.prefix, REST: division.rest, WHOLE: step}
    executors = {part: _built(name, part, graphs[part], step, tensors, origin or Origin()) for part, name in choice["parts"].items()}
    return _joined(step, division, executors)


def reason(choice):
    """A sentence for the log: what was chosen, its time, and what became of the others."""
    said = []
    for part, name in choice["parts"].items():
        others = [f"{each['candidate']} " + (each["verdict"] if each["milliseconds"] is None else f"{each['milliseconds']:.3g} ms")
                  for each in choice["measurements"] if each["part"] == part and each["candidate"] != name]
        said.append(f"{part} on {name}, {choice['milliseconds'][part]:.3g} ms" + (f" ({'; '.join(others)})" if others else ""))
    return ", ".join(said)


def _faster(outcomes):
    """The parts whose executors are the fastest step."""
    cut_milliseconds = sum(outcomes[part].milliseconds for part in (PREFIX, REST)) if PREFIX in outcomes else None
    if WHOLE in outcomes and (cut_milliseconds is None or outcomes[WHOLE].milliseconds < cut_milliseconds):
        return [WHOLE]
    return [PREFIX, REST]


def _joined(step, division, executors):
    return executors[WHOLE] if WHOLE in executors else CutExecutor(step, division, executors[PREFIX], executors[REST])


def _built(name, part, graph, step, tensors, origin):
    if graph is None:
        raise UserError("engine: the program's choice cuts off a frozen prefix, and this step has none; compile it again")
    candidate = next((each for each in candidates_for(part, graph, step, origin) if each.name == name), None)
    cannot = "not known here" if candidate is None else candidate.cannot()
    if cannot:
        raise UserError(f"engine: the program's choice for its {part} is {name}: {cannot}; compile it again here")
    return candidate.build(tensors)


def _mean_weights(step):
    (_, weights), = step.inputs_of(WEIGHTS)
    return torch.full(weights.shape, 1.0 / weights.shape[0], dtype=weights.dtype)
