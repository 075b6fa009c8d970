"""The scheme that is worth the most within a memory budget (PockEngine, MICRO'23, section 3: contribution analysis, then a search).

Contributions are added up, and so, in the model that is searched, is memory. A planned peak is not a sum, so each choice goes through the
planner, and the model's limit is moved until the best choice that truly fits is found.
"""

import functools
import logging
import time
from dataclasses import asdict, dataclass
from typing import Any, Tuple

import torch

from piebridge.core.byte_sizes import shown_bytes
from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_json
from piebridge.core.names import closest
from piebridge.engine.channel_choice import CHOICES
from piebridge.engine.contribution import fisher, multi_objective_scores, worth
from piebridge.engine.evolution import EvolutionSettings, evolve
from piebridge.engine.fitting import Meter, affordable_depths, filled, fitted
from piebridge.engine.knapsack import solve
from piebridge.engine.remembered import Remembered, batches_hash, module_hash, name_of
from piebridge.engine.search_space import RATIOS, SearchSpace, option_bytes, problem_of

LOG = logging.getLogger(__name__)
CONTRIBUTIONS = ("fisher", "runs")
METHODS = {"knapsack": lambda problem, limits, seed: solve(problem, limits),
           "evolution": lambda problem, limits, seed: evolve(problem, limits, EvolutionSettings(seed=seed))}


@dataclass(frozen=True)
class SearchSettings:
    """contribution: one of CONTRIBUTIONS; method: a key of METHODS; ratios: of channels that a weight may be trained at; channels: how they
    are chosen (see channel_choice.py); always: selectors of what is trained whole in any case; checks: how many choices of each of the two
    stages, fitting and filling, the planner sees; states: of the update rule for each trained number (momentum 1, AdamW 2).
    """

    contribution: str = "fisher"
    method: str = "knapsack"
    ratios: Tuple = RATIOS
    channels: str = "fisher"
    always: Tuple[str, ...] = ("head",)
    checks: int = 12
    states: int = 0
    seed: int = 0

    def __post_init__(self):
        for name, known in (("contribution", CONTRIBUTIONS), ("method", tuple(METHODS)), ("channels", CHOICES)):
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"engine: search: {name}={value!r}{closest(value, known)}; known: {', '.join(known)}")


@dataclass(frozen=True)
class Found:
    """scheme: a Scheme; parts: what it resolves to; planned_bytes, milliseconds: as asked of the planner and of the times (None without);
    report: JSON of how it was found.
    """

    scheme: Any
    parts: dict
    planned_bytes: int
    milliseconds: float
    report: dict


def search(module, loss, batches, budget, memory_of, latency=None, milliseconds_of=None, settings=None, runs=None, folder=None):
    """The Found scheme of the largest summed contribution whose planned memory is within `budget` bytes.

    module: nn.Module, left as it was. loss: see losses.py. batches: list of (inputs, targets) that contributions are measured on, the
    first one's inputs an example of what the step will get. memory_of: {key: Part} -> bytes, the planner. latency: milliseconds per
    step at most, with milliseconds_of: {key: Part} -> milliseconds (see layer_times.py). runs: a ShortRuns for contribution="runs".
    folder: where contributions are kept, see remembered.py. UserError where nothing fits, with the least that does.
    """
    settings = settings or SearchSettings()
    if not batches:
        raise UserError("engine: search: no batches to measure contributions on; give at least one")
    if (latency is None) != (milliseconds_of is None) or (settings.contribution == "runs") != (runs is not None):
        raise UserError("engine: search: give latency and milliseconds_of together, and runs for contribution='runs' alone")
    started = time.perf_counter()
    remembered = Remembered({"what": "contributions", "module": module_hash(module), "loss": name_of(loss), "torch": torch.__version__,
                             "batches": batches_hash(batches)}, folder)
    scores = None
    if "fisher" in (settings.contribution, settings.channels):
        scores = remembered.tensors("fisher", lambda: fisher(module, loss, batches))
    space = SearchSpace(module, batches[0][0], settings.ratios, settings.channels, settings.always, scores)
    meter = Meter(memory_of, milliseconds_of, budget, latency)
    depth_costs = affordable_depths(space, meter)
    depths = space.depths[:len(depth_costs)]
    gains = _Gains(space, remembered, scores, runs)
    problem = problem_of(space, [gains.of_depth(depth) for depth in depths], gains.of_options(depths[-1].first), depth_costs,
                         _option_costs(space, meter, settings.states))
    measured = time.perf_counter()
    pick = functools.partial(METHODS[settings.method], problem, seed=settings.seed)
    choice = fitted(problem, space, meter, pick, settings.checks)
    choice = filled(problem, space, meter, choice, settings.checks)
    found = _found(space, problem, meter, choice, settings)
    found.report.update(remembered=remembered.found, measured=remembered.computed, contribution_seconds=measured - started,
                        search_seconds=time.perf_counter() - measured)
    return found


def _found(space, problem, meter, choice, settings):
    parts = space.parts(choice)
    memory, milliseconds, budget = int(meter.memory(parts)), meter.milliseconds(parts), int(meter.limits[0])
    about = f"found for {shown_bytes(budget)} by {settings.contribution} and {settings.method}; planned {shown_bytes(memory)}"
    report = {"budget_bytes": budget, "planned_bytes": memory, "latency_ms": meter.limits[1] if meter.has_latency else None,
              "milliseconds": milliseconds, "value": problem.value(choice), "depth": space.depths[choice.depth].selector,
              "planner_calls": meter.calls, "settings": dict(asdict(settings), ratios=[str(ratio) for ratio in settings.ratios]),
              "layers": _layer_rows(space, problem, choice)}
    return Found(space.scheme(choice, "searched", about), parts, memory, milliseconds, report)


def _option_costs(space, meter, states):
    """[items][options][resources] of the additive model: bytes by formula, milliseconds as differences."""
    costs = []
    for item, (layer, options) in enumerate(zip(space.items, space.options)):
        depth = next((depth for depth in space.depths if depth.first <= item), space.depths[-1])
        own = []
        for option in options:
            cost = [option_bytes(layer, option, states)]
            if meter.has_latency:
                more = meter.milliseconds(dict(depth.parts, **{option.key: option.part}))
                cost.append(max(0.0, more - meter.milliseconds(dict(depth.probe, **depth.parts))))
            own.append(cost)
        costs.append(own)
    return costs


class _Gains:
    """What depths and options are worth: Fisher information of their parts, or the accuracy that short runs gain."""

    def __init__(self, space, remembered, scores, runs):
        self._space, self._remembered, self._scores, self._runs = space, remembered, scores, runs
        self._identity = runs and runs.identity()

    def of_depth(self, depth):
        base = self._space.depths[0]
        if self._runs is None:
            values = worth(self._scores, depth.parts)
            return sum(value for key, value in values.items() if key not in base.parts)
        return self._accuracy(depth.parts) - self._accuracy(base.parts)

    def of_options(self, first):
        """[items][options], what a share gains beyond all biases down to its depth. By short runs only from the item `first` on."""
        values = []
        for item, options in enumerate(self._space.options):
            if self._runs is not None and item < first:
                values.append([])  # no depth that fits gets there
                continue
            if self._runs is None:
                values.append([worth(self._scores, {option.key: option.part})[option.key] for option in options])
                continue
            depth = next((depth for depth in self._space.depths if depth.first <= item), self._space.depths[-1])
            base = self._accuracy(depth.parts)
            values.append([self._accuracy(dict(depth.parts, **{option.key: option.part})) - base for option in options])
            LOG.info("search: %d of %d layers tried", item + 1, len(self._space.items))
        return values

    def _accuracy(self, parts):
        named = {key: None if part.is_whole else [part.dim, part.index.tolist()] for key, part in parts.items()}
        name = sha256_of_json({"runs": self._identity, "parts": named})
        return self._remembered.value(name, lambda: self._runs.accuracy(parts))


def _layer_rows(space, problem, choice):
    """One row per layer that could be trained, for tables: what it is, what it is worth and costs whole, and what was chosen.

    A layer that was not measured is worth 0.
    """
    values = [max(own[len(options)], 0.0) for own, options in zip(problem.values, space.options)]
    scores = multi_objective_scores(values, [options[-1].bytes for options in space.options], [layer.macs for layer in space.items])
    rows = []
    for item, (layer, options) in enumerate(zip(space.items, space.options)):
        place = choice.options[item]
        rows.append({"path": layer.path, "kind": layer.kind, "block": layer.block, "macs": layer.macs,
                     "contribution": float(values[item]), "bytes": float(problem.costs[item, len(options), 0]),
                     "score": float(scores[item]), "ratio": str(options[place - 1].ratio) if place else "0"})
    return rows
