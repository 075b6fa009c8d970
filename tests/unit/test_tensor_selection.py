"""The choice of tensors: against trying every subset."""

import itertools

import numpy as np
import pytest

from piebridge.core.tensor_selection import best_subset, select_tensors


def cost(subset, own, reach):
    return sum(own[k] for k in subset) + max((reach[k] for k in subset), default=0)


def best_by_trying(importance, own, reach, budget):
    """The largest sum of importance over every subset within the budget."""
    every = itertools.chain.from_iterable(itertools.combinations(range(len(own)), size) for size in range(len(own) + 1))
    return max(sum(importance[k] for k in subset) for subset in every if cost(subset, own, reach) <= budget)


@pytest.mark.parametrize("seed", range(60))
def test_no_subset_is_better(seed):
    random = np.random.RandomState(seed)
    count = random.randint(1, 9)
    importance = random.randn(count) + 0.5  # some training steps would make it worse
    own = random.randint(0, 12, count)
    reach = np.cumsum(random.randint(0, 8, count))
    budget = int(random.randint(0, own.sum() + reach.max() + 2))
    subset = best_subset(importance, own, reach, budget)
    assert len(set(subset)) == len(subset) and cost(subset, own, reach) <= budget
    assert sum(importance[subset]) == pytest.approx(best_by_trying(importance, own, reach, budget), abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_seconds_in_any_order_stay_within_the_budget(seed):
    random = np.random.RandomState(seed)
    importance, own, reach = random.rand(8), random.rand(8) * 1e-3, random.rand(8) * 4e-3
    budget = 0.4 * (own.sum() + reach.max())
    subset = select_tensors(importance, own, reach, budget)
    assert subset == sorted(subset) and cost(subset, own, reach) <= budget * (1 + 1e-9)
    # rounding up takes at most a ten-thousandth of the budget from each of nine times
    assert importance[subset].sum() >= best_by_trying(importance, own, reach, budget * (1 - 9e-4)) - 1e-12


def test_the_way_to_the_deepest_tensor_is_paid_once():
    """By hand: two deep tensors share their way of 6, so that both fit into 10; the valuable shallow one fits in no longer."""
    assert select_tensors([3.0, 3.0, 5.0], own=[2, 2, 5], reach=[6, 6, 0], budget=10) == [0, 1]
    assert select_tensors([3.0, 3.0, 7.0], own=[2, 2, 5], reach=[6, 6, 0], budget=10) == [2]
    assert select_tensors([3.0, 3.0, 7.0], own=[2, 2, 5], reach=[6, 6, 0], budget=15) == [0, 1, 2]


def test_everything_that_helps_where_time_suffices_and_nothing_where_it_does_not():
    own, reach = np.array([0.1, 0.2, 0.3]), np.array([0.7, 0.3, 0.0])
    assert select_tensors([1, -1, 2], own, reach, own.sum() + reach.max()) == [0, 2]
    assert select_tensors([1, 1, 1], own, reach, own.sum() + reach.max()) == [0, 1, 2]
    assert select_tensors([1, 1, 1], own, reach, 0.0) == select_tensors([1, 1, 1], own, reach, 0.05) == []
    assert select_tensors([-1, 0, -1], own, reach, 10.0) == []
