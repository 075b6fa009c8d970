"""Which channels each level keeps: nested sets, in even steps of cost, of widths that devices like."""

import math
from dataclasses import dataclass

import torch

from piebridge.core.errors import UserError
from piebridge.forge.structure import product_size


@dataclass(frozen=True)
class Level:
    """Level `number` keeps these indices of each group (ascending); macs: multiply-accumulates of one image."""

    number: int
    kept: dict
    macs: int


def nested_levels(structure, scores, count=10, narrowest=0.2, multiple=8):
    """Levels 0 (the original) to `count`, in even steps of MACs down to `narrowest` of the original's.

    scores: {group name: [size]}, see `taylor_scores`. multiple: channel counts are multiples of this where the original's allow;
    heads, and groups of a grouped convolution, are cut as wholes. What level n+1 keeps, level n keeps. One after the other, the
    lowest-scoring channels of that group go whose scores are lowest for the MACs they free; each level stops at the first count
    that does not exceed its step, below it by less than the last `multiple` channels cost; in a tiny network that can be more
    than a step, and two levels are then the same. UserError when `narrowest` is out of reach, with the least that can be reached.
    """
    name = structure.description["name"]
    if count < 1 or not 0 < narrowest < 1 or multiple < 1:
        raise UserError(f"network {name}: count={count}, narrowest={narrowest}, multiple={multiple}: at least one level, a width "
                        "between 0 and 1, and a multiple of at least 1")
    cutter = _Cutter(structure, scores, multiple)
    least_macs = cutter.least_macs()
    if least_macs > narrowest * structure.macs:
        raise UserError(f"network {name}: narrowest={narrowest} cannot be met by pruning inside its blocks, which leaves at least "
                        f"{math.ceil(1000 * least_macs / structure.macs) / 1000} of its MACs; ask for that or more")
    levels = [cutter.level(0)]
    for number in range(1, count + 1):
        limit = structure.macs * (1 - (1 - narrowest) * number / count)
        while cutter.macs > max(limit, least_macs):
            cutter.cut()
        levels.append(cutter.level(number))
    return levels


class _Cutter:
    """Removes one bundle of indices after another; `counts` are left of each group."""

    def __init__(self, structure, scores, multiple):
        self.groups, self.macs = structure.groups, structure.macs
        self.structure = structure
        self.order, self.gone = {}, {}
        for name, group in structure.groups.items():
            score = torch.as_tensor(scores[name], dtype=torch.float64)
            if score.shape != (group.size,) or not torch.isfinite(score).all():
                raise UserError(f"network {structure.description['name']}: the scores of group {name!r} must be {group.size} "
                                "finite numbers")
            self.order[name] = score.argsort(stable=True).tolist()  # least first
            self.gone[name] = [0.0] + score.sort(stable=True).values.cumsum(0).tolist()  # score of the first n
        self.units = {name: multiple // math.gcd(multiple, group.width) for name, group in structure.groups.items()}
        self.counts = {name: group.size for name, group in structure.groups.items()}
        self.products = {name: [] for name in structure.groups}  # those that the group's count enters
        for product in (product for products in structure.products.values() for product in products):
            for name in {factor.group for factor in product[1]} - {None}:
                self.products[name].append(product)
        self.prices = {name: self._price(name) for name in structure.groups}

    def level(self, number):
        kept = {name: tuple(sorted(order[len(order) - self.counts[name]:])) for name, order in self.order.items()}
        return Level(number, kept, self.macs)

    def least_macs(self):
        return self.structure.macs_with({name: min(self.units[name], group.size) for name, group in self.groups.items()})

    def cut(self):
        """Remove the bundle with the lowest score per MAC; whoever shares a product with it has a new price then."""
        name = min(self.prices, key=self.prices.get)
        self.macs -= self._freed(name)
        self.counts[name] -= self._step(name)
        for product in self.products[name]:
            for each in {factor.group for factor in product[1]} - {None}:
                self.prices[each] = self._price(each)

    def _step(self, name):
        """How many go next: down to the next multiple, and not below the first; 0 when none may."""
        count, unit = self.counts[name], self.units[name]
        return 0 if count <= unit else count % unit or unit

    def _freed(self, name):
        after = dict(self.counts)
        after[name] -= self._step(name)
        return sum(product_size(product, self.counts) - product_size(product, after) for product in self.products[name])

    def _price(self, name):
        step = self._step(name)
        if not step:
            return math.inf
        done = len(self.order[name]) - self.counts[name]
        return (self.gone[name][done + step] - self.gone[name][done]) / self._freed(name)
