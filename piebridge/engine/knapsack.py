"""Which share of which layer to train: the exact multiple-choice knapsack, by dynamic programming.

The model is additive: a choice costs what reaching down to its depth costs (biases and the way of the error included), and on top of
it what each trained weight costs by itself.
"""

from dataclasses import dataclass
from typing import Tuple

import numpy as np

PARTS = 4096  # of the limit: costs are rounded up to whole ones, so a choice is never dearer than allowed
PARTS_OF_TWO = 512, 256  # of bytes and of milliseconds, where both are limited


@dataclass(frozen=True)
class Problem:
    """Layers in the order of the forward, options of a layer (option 0: its weight stays frozen), and depths, the shallowest first.

    values: float [layers, options], contributions, -inf for an option that a layer does not have; costs: float [layers, options,
    resources], of the order bytes, milliseconds. first: int [depths], the first layer whose weight may be trained at that depth, from
    the number of layers on down; depth_values: float [depths]; depth_costs: float [depths, resources].
    """

    values: np.ndarray
    costs: np.ndarray
    first: np.ndarray
    depth_values: np.ndarray
    depth_costs: np.ndarray

    def value(self, choice):
        return float(self.depth_values[choice.depth] + self.values[np.arange(len(self.values)), list(choice.options)].sum())

    def cost(self, choice):
        """float [resources]."""
        return self.depth_costs[choice.depth] + self.costs[np.arange(len(self.values)), list(choice.options)].sum(0)


@dataclass(frozen=True)
class Choice:
    """A depth and one option for each layer; 0 for all layers before the depth's first."""

    depth: int
    options: Tuple[int, ...]


def solve(problem, limits, parts=None):
    """The Choice of the largest value whose costs are within `limits` (one number per resource), or None where not even a depth is.

    Exact, with each option's costs rounded up to a part of its limit; `parts`: in how many parts each limit is divided. Costs and limits
    that are whole numbers no larger than `parts` are not rounded. Of equal values the shallower depth, and the earlier option, is taken.
    """
    limits = np.asarray(limits, dtype=np.float64)
    parts = np.asarray(parts or ((PARTS,) if len(limits) == 1 else PARTS_OF_TWO), dtype=np.int64)
    parts = np.where(limits < parts, np.maximum(np.floor(limits), 1), parts).astype(np.int64)
    grain = np.maximum(limits, 1.0) / parts
    costs = np.ceil(problem.costs / grain - 1e-9).astype(np.int64)
    rooms = np.floor((limits - problem.depth_costs) / grain + 1e-9).astype(np.int64)
    tables, taken = _tables(problem.values, costs, tuple(parts + 1), set(problem.first.tolist()))
    best, choice = -np.inf, None
    for depth, room in enumerate(rooms):
        if (problem.depth_costs[depth] > limits).any() or (room < 0).any():
            continue
        first = int(problem.first[depth])
        value = problem.depth_values[depth] + tables[first][tuple(room)]
        if value > best:
            best, choice = value, Choice(depth, _traced(taken, costs, first, room))
    return choice


def _tables(values, costs, shape, wanted):
    """tables[k], of the layers k in `wanted`: the largest sum of values of the layers from k on, by room; taken[k], of every layer k:
    its option in that sum.

    From the last layer down, so that one pass serves all depths.
    """
    layers, best = len(values), np.zeros(shape)
    tables = {layers: best}
    taken = np.zeros((layers,) + shape, dtype=np.int16)
    for layer in reversed(range(layers)):
        behind, best = best, best.copy()
        for option in range(1, values.shape[1]):
            cost = costs[layer, option]
            if not values[layer, option] > 0 or (cost >= shape).any():
                continue
            above = tuple(slice(int(each), None) for each in cost)
            below = tuple(slice(0, extent - int(each)) for extent, each in zip(shape, cost))
            sums = behind[below] + values[layer, option]
            is_better = sums > best[above]
            best[above][is_better] = sums[is_better]
            taken[layer][above][is_better] = option
        if layer in wanted:
            tables[layer] = best
    return tables, taken


def _traced(taken, costs, first, room):
    """The options that lead to the best value of the layers from `first` on within `room`."""
    options = [0] * len(taken)
    for layer in range(first, len(taken)):
        options[layer] = int(taken[layer][tuple(room)])
        room = room - costs[layer, options[layer]]
    return tuple(options)
