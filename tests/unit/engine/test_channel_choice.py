"""Which channels a ratio means, and which of them are chosen."""

import pytest
import torch
from scheme_examples import Tower
from torch import nn

from piebridge.core.errors import UserError
from piebridge.engine.channel_choice import (
    channel_count,
    channel_information,
    channels_of_units,
    chosen,
    fisher_information,
    importance_of,
    unit_scores,
)
from piebridge.engine.losses import cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("channels, ratio, count", [
    (96, 1 / 8, 12),  # 16 would be a third more
    (120, 1 / 2, 64), (16, 1 / 8, 2), (3, 1 / 8, 1), (5, 1 / 2, 3), (62, 1.0, 62), (1, 1 / 8, 1), (960, 1 / 4, 240), (100, 1 / 2, 56)])
def test_counts_are_rounded_up_and_to_multiples_of_eight_where_that_is_cheap(channels, ratio, count):
    assert channel_count(channels, ratio) == count


def test_the_best_are_taken_in_ascending_order_and_of_equals_the_first():
    assert chosen(2, torch.tensor([1.0, 5.0, 2.0, 5.0])).tolist() == [1, 3]
    assert chosen(2, torch.ones(4)).tolist() == [0, 1]
    assert channels_of_units(torch.tensor([0, 2]), 3).tolist() == [0, 1, 2, 6, 7, 8]


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1, 1), (4, 6, 3, 3), (4, 6, 5)])
@pytest.mark.parametrize("dim", [0, 1])
def test_magnitudes_order_channels_as_their_norms_do(shape, dim):
    weight = torch.randn(shape)
    others = [each for each in range(len(shape)) if each != dim]
    euclidean = unit_scores(importance_of("magnitude", "w", weight), dim, shape[dim])
    torch.testing.assert_close(euclidean.sqrt(), torch.linalg.vector_norm(weight, 2, others))
    absolute = unit_scores(importance_of("magnitude_l1", "w", weight), dim, shape[dim])
    torch.testing.assert_close(absolute, torch.linalg.vector_norm(weight, 1, others))


def test_groups_of_channels_are_scored_together():
    assert unit_scores(torch.arange(8.0).view(4, 2), 0, 2).tolist() == [6.0, 22.0]


def batches(count=3, size=1):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64), torch.randint(0, 5, (size,), generator=generator))
            for _ in range(count)]


def test_fisher_information_is_the_sum_of_squared_gradients():
    module = Tower().double().eval().requires_grad_(False)
    module.head.weight.requires_grad_(True)
    found = fisher_information(module, cross_entropy, batches(size=2))
    assert {key for key, each in module.named_parameters() if each.requires_grad} == {"head.weight"} and module.head.weight.grad is None
    assert set(found) == {key for key, each in module.named_parameters() if each.dim() > 1}
    module.requires_grad_(True)
    wanted = torch.zeros_like(module.blocks[1].expand.weight)
    for images, labels in batches(size=2):
        module.zero_grad()
        nn.functional.cross_entropy(module(images), labels).backward()
        wanted += module.blocks[1].expand.weight.grad ** 2
    torch.testing.assert_close(found["blocks.1.expand.weight"], wanted, rtol=1e-12, atol=0)


def test_a_channels_information_is_that_of_its_activation_times_gradient():
    module = Tower().double().eval()
    found = channel_information(module, cross_entropy, batches(), {"blocks.1.expand.weight": 0})
    kept = []
    module.blocks[1].expand.register_forward_hook(lambda _, given, result: (result.retain_grad(), kept.append(result))[0])
    wanted = 0
    for images, labels in batches():
        nn.functional.cross_entropy(module(images), labels).backward()
        wanted = wanted + (kept[-1] * kept[-1].grad).sum((0, 2, 3)).square().detach() / 2
    torch.testing.assert_close(found["blocks.1.expand.weight"], wanted, rtol=1e-9, atol=0)


def test_without_batches_there_is_no_information():
    with pytest.raises(UserError, match="fisher information: no batches"):
        fisher_information(Tower(), cross_entropy, [])


def test_fisher_without_scores_says_how_to_get_them():
    with pytest.raises(UserError, match=r"channels=fisher: no scores for w; give scores=fisher_information\(module, loss, batches\)"):
        importance_of("fisher", "w", torch.ones(2, 2), {})
