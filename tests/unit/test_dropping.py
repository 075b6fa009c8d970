"""Which blocks to drop: on a network where it can be said beforehand, and on real images against refits written out."""

import numpy as np
import pytest
import torch
from torch import nn

from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.capture import capture
from piebridge.core.costs import network_costs
from piebridge.core.errors import UserError
from piebridge.core.proxies import blocks_to_drop, match_batch_norm
from piebridge.forge.dropping import drop_order, recover


class Residual(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


def random_branch(strength):
    branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False))
    with torch.no_grad():
        branch[3].weight.mul_(strength)
    return branch


def doubling_branch():
    """x + x: changes its input as much as can be, and the batch norm behind it can make up for all of it."""
    branch = nn.Conv2d(8, 8, 3, padding=1, bias=False)
    with torch.no_grad():
        branch.weight.zero_()
        branch.weight[range(8), range(8), 1, 1] = 1.0
    return branch


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(Residual(random_branch(1.0)), Residual(random_branch(0.3)), Residual(doubling_branch()))
        self.last = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Linear(64, 5)

    def forward(self, x):
        return self.classifier(torch.flatten(self.pool(self.last(self.blocks(self.stem(x)))), 1))


@pytest.fixture(scope="module")
def network(clip_art):
    torch.manual_seed(0)
    tower = Tower().train()
    with torch.no_grad():
        for _ in range(40):
            tower(clip_art)
    return capture(tower.eval(), "tower", [3, 32, 32], [0.5] * 3, [0.5] * 3)


@pytest.fixture(scope="module")
def clip_art():
    """Training images of Clipart10: float32 [40, 3, 32, 32]."""
    from types import SimpleNamespace

    from piebridge.core.dataset import open_dataset
    from piebridge.core.images import load_image
    from piebridge.core.transforms import Transform
    samples = open_dataset("Clipart10", SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=0)).train[::10][:40]
    transform = Transform(32, [0.5] * 3, [0.5] * 3)
    return torch.stack([transform(load_image(sample.path)) for sample in samples])


def test_a_block_that_can_be_made_up_for_goes_first(network, clip_art):
    """By how much it changes its input it would be the last."""
    assert blocks_to_drop(network, 3, clip_art)[2] == "blocks.2"
    drops = drop_order(network, clip_art, 3, dict.fromkeys(["blocks.0", "blocks.1", "blocks.2"], 1))
    assert [drop.block for drop in drops] == ["blocks.2", "blocks.1", "blocks.0"]
    assert drops[0].residual < 0.001 < drops[1].residual < drops[2].residual


def test_what_is_left_is_what_a_refit_without_the_image_leaves(network, clip_art):
    """The residual of an image, against the map fitted anew on all others with the same penalty; the statistics against core's."""
    recovery = recover(network, ["blocks.0"], clip_art)
    proxy = network.without_blocks(["blocks.0"]).eval()
    match_batch_norm(network, proxy, clip_art, clip_art)
    for name, buffer in proxy.named_buffers():
        torch.testing.assert_close(buffer, dict(recovery.network.named_buffers())[name], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        found, wanted = proxy.features(clip_art).double().numpy(), network.features(clip_art).double().numpy()
        torch.testing.assert_close(recovery.network.features(clip_art).double().numpy(), found, rtol=1e-4, atol=1e-5)
    bridge, residuals = fit_bridge_map(found, wanted)
    np.testing.assert_allclose(recovery.residuals, residuals, rtol=1e-3)
    left = []
    for image in range(len(found)):
        others = np.arange(len(found)) != image
        refit, _ = fit_bridge_map(found[others], wanted[others])
        left.append(np.linalg.norm(refit(found[image:image + 1])[0] - wanted[image]) / np.linalg.norm(wanted[image]))
    assert np.sqrt(np.mean(np.square(left))) == pytest.approx(np.sqrt(np.mean(recovery.residuals ** 2)), rel=0.1)


def test_the_order_is_the_greedy_one(network, clip_art):
    """Against the definition: of all blocks that are left, the least growth of the squared residual for what it saves."""
    def squared(blocks):
        return float((recover(network, blocks, clip_art).residuals ** 2).mean())

    savings = {"blocks.0": 1e9, "blocks.1": 1.0, "blocks.2": 1e-9}
    drops = drop_order(network, clip_art, 3, savings)
    chosen, before = [], 0.0
    for drop in drops:
        prices = {block: max(squared(chosen + [block]) - before, 0) / savings[block] for block in savings if block not in chosen}
        assert drop.block == min(prices, key=prices.get)
        chosen.append(drop.block)
        before = squared(chosen)
        assert drop.residual == pytest.approx(before ** 0.5) and drop.saved == savings[drop.block]
    assert chosen[0] == "blocks.0"  # the dearest by far, though not the easiest


def test_macs_are_the_savings_where_none_are_given(network, clip_art):
    costs = network_costs(network)["blocks"]
    assert drop_order(network, clip_art, 1) == drop_order(network, clip_art, 1, costs)
    assert costs["blocks.2"] == 8 * 8 * 9 * 16 * 16


def test_the_original_is_left_as_it_was_and_lends_its_parameters(network, clip_art):
    before = network.fingerprint()
    recovery = recover(network, ["blocks.1"], clip_art)
    drop_order(network, clip_art, 2)
    assert network.fingerprint() == before
    originals = dict(network.named_parameters())
    assert all(parameter is originals[name] for name, parameter in recovery.network.named_parameters())
    assert [block["name"] for block in recovery.network.description["blocks"]] == ["blocks.0", "blocks.2"]
    assert not any(module._forward_pre_hooks for each in (network, recovery.network) for module in each.modules())


@pytest.mark.parametrize("most, savings, message", [
    (4, None, "network tower: has 3 blocks that can be dropped, 4 are asked for"),
    (0, None, "network tower: most=0 blocks to drop: give a whole number of at least 1"),
    (1, {"blocks.0": 1, "blocks.1": 1, "block.2": 1}, "network tower: savings lack block 'blocks.2' (did you mean 'block.2'?)"),
    (1, {"blocks.0": 1, "blocks.1": 0, "blocks.2": 1}, "network tower: savings['blocks.1']=0: give a number above 0"),
])
def test_what_cannot_be_dropped(network, clip_art, most, savings, message):
    with pytest.raises(UserError) as caught:
        drop_order(network, clip_art, most, savings)
    assert message in str(caught.value)


def test_images_that_show_nothing(network, clip_art):
    with pytest.raises(UserError, match="network tower: 7 images show too little of what a block does; give 8 or more"):
        drop_order(network, clip_art[:7], 1)
    with pytest.raises(UserError, match="network tower: features that are not finite; are the weights or the images broken?"):
        drop_order(network, clip_art * float("nan"), 1)
