"""The exact choice of layers and ratios, against trying every choice."""

import itertools

import numpy as np
import pytest
from search_examples import random_problem

from piebridge.engine.knapsack import Choice, Problem, solve

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def every_choice(problem):
    for depth, first in enumerate(problem.first):
        layers, options = problem.values.shape
        for tail in itertools.product(range(options), repeat=layers - int(first)):
            yield Choice(depth, (0,) * int(first) + tail)


def best_value(problem, limits):
    """Of all choices within the limits, whose costs are added up one by one; None where there is none."""
    values = []
    for choice in every_choice(problem):
        cost, value = list(problem.depth_costs[choice.depth]), problem.depth_values[choice.depth]
        for layer, option in enumerate(choice.options):
            value += problem.values[layer, option]
            cost = [total + own for total, own in zip(cost, problem.costs[layer, option])]
        if all(total <= limit for total, limit in zip(cost, limits)):
            values.append(value)
    return max(values, default=None)


@st.composite
def problems(draw, resources):
    layers, options = draw(st.integers(1, 4)), draw(st.integers(2, 3))
    number = st.integers(0, 12)

    def table(*shape):
        return np.array(draw(st.lists(number, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))).reshape(shape)

    values, costs = table(layers, options).astype(float), table(layers, options, resources).astype(float)
    values[:, 0], costs[:, 0] = 0, 0
    first = np.array(sorted(draw(st.sets(st.integers(0, layers), min_size=1)), reverse=True))
    return Problem(values, costs, first, table(len(first)).astype(float), np.sort(table(len(first), resources).astype(float), 0))


@settings(max_examples=150, deadline=None)
@given(problems(1), st.integers(0, 40))
def test_no_choice_within_a_budget_is_worth_more(problem, limit):
    check(problem, [limit])


@settings(max_examples=100, deadline=None)
@given(problems(2), st.integers(0, 40), st.integers(0, 40))
def test_no_choice_within_a_budget_and_a_time_is_worth_more(problem, limit, longest):
    check(problem, [limit, longest])


def check(problem, limits):
    choice, best = solve(problem, limits), best_value(problem, limits)
    assert (choice is None) == (best is None)
    if choice is not None:
        assert problem.value(choice) == best
        assert (problem.cost(choice) <= limits).all()
        assert not any(choice.options[:int(problem.first[choice.depth])])


@pytest.mark.parametrize("resources", [1, 2])
def test_rounding_never_breaks_a_limit(resources):
    for seed in range(5):
        problem = random_problem(seed, resources=resources)
        for limit in (10.0 ** 5, 3.3e6, 2.7e7):
            limits = [limit, 0.7 * limit][:resources]
            assert (problem.cost(solve(problem, limits)) <= limits).all()


def test_finer_parts_are_worth_no_less():
    problem = random_problem(1)
    values = [problem.value(solve(problem, [2e7], parts)) for parts in ([64], [512], [4096])]
    assert values[0] <= values[1] <= values[2]
    assert values[2] - values[1] < 0.02 * values[2]


def test_an_option_that_a_layer_lacks_is_never_taken():
    problem = random_problem(2)
    problem.values[3, 1:4] = -np.inf
    assert solve(problem, [1e12]).options[3] == 4
    problem.values[3, 1:] = -np.inf
    assert solve(problem, [1e12]).options[3] == 0


def test_without_a_depth_within_the_limit_there_is_no_choice():
    problem = random_problem(3)
    assert solve(Problem(problem.values, problem.costs, problem.first, problem.depth_values, problem.depth_costs + 100), [99]) is None
