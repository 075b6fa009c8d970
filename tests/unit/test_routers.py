"""Importance routing: the paper's one-way rule, levels that go down again, lots at equal cost."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from piebridge.core.preparation import FrozenPart
from piebridge.core.router import ClosingRouter, DataAwareRouter, RandomRouter
from piebridge.core.trained_levels import TrainedLevels


def losses(*values):
    return torch.tensor(values)


RUN, SKIPPED = True, False


def test_the_papers_rule_only_ever_goes_up():
    router = DataAwareRouter(np.array([0, 1, 3]), cheapest=3)
    for _ in range(2):
        router.update([0, 1, 2], losses(1.0, 2.0, 3.0), torch.tensor([RUN, SKIPPED, SKIPPED]))
        router.update([0, 1, 2], losses(9.0, 9.0, 9.0), None)
        router.end_epoch()
    assert router.levels.tolist() == [0, 3, 3]


def test_a_level_goes_down_again_when_the_loss_rises():
    router = DataAwareRouter(np.array([2, 2, 2, 0]), cheapest=3, lowers=True)
    router.update([0, 1, 2, 3], losses(1.0, 1.0, 1.0, 1.0), None)  # seen for the first time: nothing can have risen
    router.end_epoch()
    assert router.levels.tolist() == [2, 2, 2, 0]
    router.update([3, 2, 1, 0], losses(2.0, 0.5, 2.0, 2.0), torch.tensor([RUN, RUN, SKIPPED, RUN]))
    assert router.levels.tolist() == [2, 2, 2, 0]  # the batches of this epoch stay what they are
    router.end_epoch()
    assert router.levels.tolist() == [1, 3, 2, 0]  # risen; skipped; fallen; risen, but the original already
    router.update([0], losses(1.9), None)  # below what it was last, though above the first
    router.end_epoch()
    assert router.levels.tolist() == [1, 3, 2, 0]


def test_a_level_that_is_given_up_serves_nobody_from_the_next_epoch_on():
    router = DataAwareRouter(np.array([0, 1, 2, 3]), cheapest=3)
    router.give_up(2)
    assert router.levels.tolist() == [0, 1, 2, 3]
    router.update([1], losses(1.0), torch.tensor([SKIPPED]))
    router.end_epoch()
    assert router.levels.tolist() == [0, 1, 1, 1] and router.cheapest == 1
    router.give_up(0)
    assert router.cheapest == 0


def test_lots_keep_the_level_shares_and_change_every_epoch():
    levels = np.array([0] * 50 + [1] * 30 + [2] * 20)
    router = RandomRouter(levels, cheapest=2, seed=4)
    drawn = []
    for _ in range(4):
        assert np.bincount(router.levels).tolist() == [50, 30, 20]
        drawn.append(router.levels.tolist())
        router.end_epoch()
    assert len({tuple(each) for each in drawn + [levels.tolist()]}) == 5
    hits = np.mean([np.mean(np.array(each) == levels) for each in drawn])
    assert 0.25 < hits < 0.55  # 0.38 where levels and samples have nothing to do with each other
    assert RandomRouter(levels, cheapest=2, seed=4).levels.tolist() == drawn[0] != RandomRouter(levels, cheapest=2, seed=5).levels.tolist()


def test_lots_follow_the_shares_that_importance_gives():
    router = RandomRouter(np.array([0] * 6), cheapest=2, seed=0)
    router.update(list(range(6)), torch.ones(6), torch.tensor([RUN, SKIPPED, SKIPPED, RUN, RUN, SKIPPED]))
    router.end_epoch()
    assert np.bincount(router.levels).tolist() == [3, 3]


def test_restored_routers_go_on_alike():
    for make in (lambda: DataAwareRouter(np.array([0, 1, 2, 0]), 2, lowers=True), lambda: RandomRouter(np.array([0, 1, 2, 0]), 2, True, 3)):
        router, other = make(), make()
        router.update([0, 1], losses(1.0, 2.0), torch.tensor([RUN, SKIPPED]))
        router.end_epoch()
        router.update([0], losses(3.0), None)
        router.give_up(2)
        other.restore(json.loads(json.dumps(router.state())))
        for each in (router, other):
            each.update([2, 3], losses(1.0, 1.0), torch.tensor([SKIPPED, SKIPPED]))
            each.end_epoch()
        assert router.levels.tolist() == other.levels.tolist() and router.state() == other.state()


def test_the_last_epochs_go_through_the_original_also_after_a_resumption():
    router = ClosingRouter(DataAwareRouter(np.array([1, 0, 2]), cheapest=2), epochs=4, closing=2)
    for expected in ([1, 0, 2], [1, 1, 2]):
        assert router.levels.tolist() == expected
        router.update([0, 1, 2], losses(1.0, 1.0, 1.0), torch.tensor([RUN, SKIPPED, SKIPPED]))
        router.end_epoch()
    again = ClosingRouter(DataAwareRouter(np.zeros(3), cheapest=2), epochs=4, closing=2)
    again.restore(json.loads(json.dumps(router.state())))
    for each in (router, again):
        assert each.levels.tolist() == [0, 0, 0] and each.cheapest == 2
        each.end_epoch()
        assert each.levels.tolist() == [0, 0, 0]
    assert ClosingRouter(DataAwareRouter(np.array([1]), cheapest=1), epochs=1, closing=5).levels.tolist() == [0]


@pytest.mark.parametrize("closing, at_original", [(3, 25), (12, 100), (99, 100)])
def test_lots_give_the_original_what_closing_epochs_would(closing, at_original):
    """3 of 12 epochs: a quarter of 100 samples, the others at one of two proxies."""
    config = SimpleNamespace(seed=0, epochs=12, router=SimpleNamespace(closing=closing))
    levels = TrainedLevels(SimpleNamespace(work=None, config=config, count=100))._by_lot(2)
    assert (levels == 0).sum() == at_original and set(levels) <= {0, 1, 2}
    config.router.closing = 0
    assert set(TrainedLevels(SimpleNamespace(work=None, config=config, count=100))._by_lot(2)) == {0, 1, 2}


@pytest.mark.parametrize("kind, is_at_head, last_levels", [
    ("level:1", False, {0}), ("level:1", True, {0}), ("importance", True, {0}), ("shuffled", False, {0}), ("random", True, {0}),
    ("random", False, {1})])
def test_closing_epochs_reach_the_loop(kind, is_at_head, last_levels):
    """Through every router but lots for a deeper trained part, which have spent them already."""
    part = FrozenPart.__new__(FrozenPart)  # without a network
    part.is_at_head = is_at_head
    part.config = SimpleNamespace(seed=0, epochs=3, router=SimpleNamespace(kind=kind, lowers=False, closing=1))
    router = part._router(np.ones(8, dtype=np.int64), 1)
    for _ in range(2):
        assert set(router.levels.tolist()) == {1}
        router.end_epoch()
    assert set(router.levels.tolist()) == last_levels
