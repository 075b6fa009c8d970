"""The published search for a scheme: evolution of depth and ratios towards the largest summed contribution within the budget.

Lin et al., On-Device Training Under 256KB Memory, NeurIPS'22, section 3.2, which PockEngine takes over: a population of schemes, each
generation bred from the best by crossover and mutation. What breaks the budget is brought back below it instead of being drawn again.
"""

from dataclasses import dataclass

import numpy as np

from piebridge.core.errors import UserError
from piebridge.engine.knapsack import Choice


@dataclass(frozen=True)
class EvolutionSettings:
    """population: schemes per generation; parents: how many of them breed and live on; mutation: each gene's chance to be drawn anew."""

    population: int = 128
    parents: int = 32
    generations: int = 60
    mutation: float = 0.05
    seed: int = 0

    def __post_init__(self):
        if not 1 <= self.parents < self.population:
            raise UserError(f"engine: evolution: parents={self.parents}: give at least 1 and less than population={self.population}")


def evolve(problem, limits, settings=None):
    """The best Choice found within `limits` (see `knapsack.solve`), or None where not even a depth is. Repeatable by its seed."""
    settings = settings or EvolutionSettings()
    limits = np.asarray(limits, dtype=np.float64)
    depths = np.flatnonzero((problem.depth_costs <= limits).all(1))
    if not len(depths):
        return None
    draw = np.random.default_rng(settings.seed)
    breeder = _Breeder(problem, limits, depths, draw)
    population = breeder.repaired(breeder.drawn(settings.population))
    for _ in range(settings.generations):
        population = np.unique(population, axis=0)  # or the best would soon breed with copies of itself
        parents = population[np.argsort(-breeder.values(population), kind="stable")][:settings.parents]
        children = breeder.crossed(parents, settings.population - len(parents))
        population = np.concatenate([parents, breeder.repaired(breeder.mutated(children, settings.mutation))])
    best = population[int(np.argmax(breeder.values(population)))]
    return Choice(int(best[0]), tuple(int(option) for option in best[1:]))


class _Breeder:
    """Genomes are rows of int [1 + layers]: the depth, then one option per layer.

    depths: int, those within the limits.
    """

    def __init__(self, problem, limits, depths, draw):
        self._problem, self._limits, self._depths, self._draw = problem, limits, depths, draw
        self._layers = np.arange(len(problem.values))
        # only options that are worth something and could be paid for at the cheapest depth; 0 is always one of them
        room = limits - problem.depth_costs[depths].min(0)
        self._known = [np.concatenate([[0], 1 + np.flatnonzero((values[1:] > 0) & (costs[1:] <= room).all(1))])
                       for values, costs in zip(problem.values, problem.costs)]

    def values(self, genomes):
        return self._problem.depth_values[genomes[:, 0]] + self._problem.values[self._layers, genomes[:, 1:]].sum(1)

    def drawn(self, count):
        """Half of all layers stay frozen at first, or most genomes would have to be cut down by chance."""
        options = np.stack([self._draw.choice(known, count) for known in self._known], 1) if len(self._known) else np.zeros((count, 0), int)
        options[self._draw.random(options.shape) < 0.5] = 0
        return np.concatenate([self._draw.choice(self._depths, (count, 1)), options], 1).astype(np.int64)

    def crossed(self, parents, count):
        """Each gene from either of two parents."""
        pairs = self._draw.integers(len(parents), size=(2, count))
        is_first = self._draw.random((count, parents.shape[1])) < 0.5
        return np.where(is_first, parents[pairs[0]], parents[pairs[1]])

    def mutated(self, genomes, chance):
        return np.where(self._draw.random(genomes.shape) < chance, self.drawn(len(genomes)), genomes)

    def repaired(self, genomes):
        """Nothing is trained before the depth, and no limit broken: random layers get lesser options until that holds."""
        for genome in genomes:
            options = genome[1:]
            options[:int(self._problem.first[genome[0]])] = 0
            while (self._cost(genome) > self._limits).any():
                layer = self._draw.choice(np.flatnonzero(options))
                lesser = self._known[layer]
                options[layer] = self._draw.choice(lesser[lesser < options[layer]])
        return genomes

    def _cost(self, genome):
        return self._problem.depth_costs[genome[0]] + self._problem.costs[self._layers, genome[1:]].sum(0)
