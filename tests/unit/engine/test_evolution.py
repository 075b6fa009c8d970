"""The published evolutionary search: within its limits, repeatable, and no worse than the knapsack where that can be told."""

import numpy as np
import pytest
from search_examples import random_problem

from piebridge.core.errors import UserError
from piebridge.engine.evolution import EvolutionSettings, evolve
from piebridge.engine.knapsack import Problem, solve


@pytest.mark.parametrize("resources", [1, 2])
def test_is_never_over_a_limit(resources):
    for seed in range(4):
        problem = random_problem(seed, resources=resources)
        for limit in (10.0 ** 5, 3.3e6, 2.7e7):
            limits = [limit, 0.7 * limit][:resources]
            choice = evolve(problem, limits, EvolutionSettings(generations=5, seed=seed))
            assert (problem.cost(choice) <= limits).all()
            assert not any(choice.options[:int(problem.first[choice.depth])])


def test_one_seed_gives_one_choice():
    problem = random_problem(0)
    first, again, other = (evolve(problem, [1e7], EvolutionSettings(generations=3, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_reaches_the_optimum_of_small_problems():
    for seed in range(6):
        problem = random_problem(seed, layers=6, options=4)
        best = problem.value(solve(problem, [6e6]))
        assert problem.value(evolve(problem, [6e6], EvolutionSettings(seed=seed))) == pytest.approx(best, rel=1e-3)


def test_more_generations_come_closer_to_the_optimum_of_a_large_problem():
    problem = random_problem(4, layers=60)
    best = problem.value(solve(problem, [3e7]))
    shares = [problem.value(evolve(problem, [3e7], EvolutionSettings(generations=count))) / best for count in (0, 10, 60)]
    assert shares[0] < shares[1] <= shares[2] <= 1.001
    assert shares[2] > 0.9


def test_an_option_that_a_layer_lacks_is_never_taken():
    problem = random_problem(2, layers=8)
    problem.values[3, 1:] = -np.inf
    assert evolve(problem, [1e12]).options[3] == 0


def test_without_a_depth_within_the_limit_there_is_no_choice():
    problem = random_problem(3)
    assert evolve(Problem(problem.values, problem.costs, problem.first, problem.depth_values, problem.depth_costs + 100), [99]) is None


def test_settings_that_leave_no_child_are_refused():
    with pytest.raises(UserError, match="parents=8: give at least 1 and less than population=8"):
        EvolutionSettings(population=8, parents=8)
