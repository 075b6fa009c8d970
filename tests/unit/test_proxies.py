"""Proxies against independent computations on a small network: the same layers written out, and what hooks on them see."""

import pytest
import torch
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.core.proxies import CostModel, blocks_to_drop, make_proxy, match_batch_norm, parse_spec

# of the blocks' branches. By what they change: 1, 3, 0, 2; by how much they add: 1, 0, 3, 2, since block 2 makes all values larger
STRENGTHS = (0.3, 0.05, 2.0, 0.5)


class Block(nn.Module):
    def __init__(self, strength):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        nn.init.constant_(self.norm.weight, strength)

    def forward(self, x):
        return x + self.norm(self.conv(x))


class Tower(nn.Module):
    """A stem, four residual blocks, and a last layer that only widens."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(*[Block(strength) for strength in STRENGTHS])
        self.last = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(16, 5)

    def features(self, x, without=()):
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = x if number in without else block(x)
        return torch.flatten(self.pool(self.last(x)), 1)

    def forward(self, x):
        return self.classifier(self.features(x))


def images(seed, size=32, count=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.interpolate(torch.randn(count, 3, 8, 8, generator=generator), size=size, mode="bilinear",
                                           align_corners=False)


@pytest.fixture(scope="module")
def tower():
    torch.manual_seed(0)
    tower = Tower().train()
    with torch.no_grad():
        for seed in range(30):  # statistics of other images than those below
            tower(1.5 * images(100 + seed) + 0.3)
    return tower.eval()


@pytest.fixture
def network(tower):
    return capture(tower, "tower", [3, 32, 32], [0.5] * 3, [0.5] * 3)


def relative_changes(tower, x):
    """|branch| / |block's output| of each block, from hooks on the plain modules."""
    seen = []
    handles = [block.register_forward_hook(lambda block, inputs, output: seen.append(
        ((output - inputs[0]).norm() / output.norm()).item())) for block in tower.blocks]
    with torch.no_grad():
        tower(x)
    for handle in handles:
        handle.remove()
    return seen


def test_blocks_that_change_least_go_first(tower, network):
    changes = relative_changes(tower, images(1))
    order = [f"blocks.{number}" for number in sorted(range(4), key=lambda number: changes[number])]
    assert order == ["blocks.1", "blocks.3", "blocks.0", "blocks.2"]
    for count in range(5):
        assert blocks_to_drop(network, count, images(1)) == order[:count]
    with pytest.raises(UserError, match="network tower: has 4 blocks that can be dropped, a proxy asks for 5"):
        blocks_to_drop(network, 5, images(1))


@pytest.mark.parametrize("text, without", [("32px", ()), ("24px-drop1", (1,)), ("32px-drop2-int8", (1, 3))])
def test_a_proxy_is_the_network_without_these_blocks(tower, network, text, without):
    changes = relative_changes(tower, images(1))
    assert set(without) == set(sorted(range(4), key=lambda number: changes[number])[:len(without)])
    spec = parse_spec(text)
    proxy = make_proxy(network, spec, images(1))
    x = images(2, spec.resolution)
    with torch.no_grad():
        torch.testing.assert_close(proxy.features(x), tower.features(x, without), rtol=1e-4, atol=1e-5)
    assert not any(module.training for module in proxy.modules())
    originals = dict(network.named_parameters())
    assert all(parameter is originals[name] for name, parameter in proxy.named_parameters())
    assert not any(buffer is dict(network.named_buffers())[name] for name, buffer in proxy.named_buffers())


def norm_outputs(network, x):
    """{layer: (mean, deviation) of what it puts out, [C] each, over the batch and all places}."""
    seen = {}
    handles = [layer.register_forward_hook(lambda layer, inputs, output, name=name: seen.__setitem__(name, output.double()))
               for name, layer in network.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    with torch.no_grad():
        network.features(x)
    for handle in handles:
        handle.remove()
    return {name: (values.mean((0, 2, 3)), values.std((0, 2, 3))) for name, values in seen.items()}


@pytest.mark.parametrize("text", ["32px-drop1", "32px-drop3", "16px", "20px-drop2"])
def test_matched_layers_put_out_the_originals_mean_and_deviation(network, text):
    spec = parse_spec(text)
    large, small = images(3), images(3, spec.resolution)
    proxy = make_proxy(network, spec, large)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    wanted, unmatched = norm_outputs(network, large), norm_outputs(proxy, small)
    assert max((unmatched[name][0] - wanted[name][0]).abs().max() for name in unmatched) > 0.01
    match_batch_norm(network, proxy, large, small)
    matched = norm_outputs(proxy, small)
    assert len(matched) == 6 - spec.dropped
    for name, (mean, deviation) in matched.items():
        torch.testing.assert_close(mean, wanted[name][0], rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(deviation, wanted[name][1], rtol=2e-3, atol=2e-4)
    for name, buffer in network.named_buffers():  # the original is as it was
        assert torch.equal(buffer, before[name])
    assert not any(module._forward_pre_hooks for each in (network, proxy) for module in each.modules())


def test_a_network_matched_with_itself_stays_as_it_is(network):
    proxy = make_proxy(network, parse_spec("32px"), images(4))
    match_batch_norm(network, proxy, images(4), images(4))
    buffers = dict(network.named_buffers())
    for name, buffer in proxy.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=1e-4, atol=1e-5)


def test_costs_are_counted_in_multiply_accumulates(network):
    macs_per_block, rest = 8 * 8 * 9 * 16 * 16, 8 * 3 * 9 * 16 * 16 + 16 * 8 * 16 * 16 + 16 * 5
    whole = 4 * macs_per_block + rest
    model = CostModel(network)
    assert model.share(parse_spec("32px")) == 1
    assert model.share(parse_spec("16px-int8")) == 0.125
    assert model.share(parse_spec("32px-drop3")) == pytest.approx((macs_per_block + rest) / whole)
