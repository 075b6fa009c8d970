"""Head2Toe: pooling, unit length, relevance and selection against their formulas; the tuned network from its file."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forge_examples import Tower, images, network_of
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.core.head2toe import MASK, group_lasso_head, pooled, relevance, select_features, top_share, unit_lengths
from piebridge.core.labels import Labels, PseudoLabels
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.optimizers import build_optimizer
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**changes):
    return SimpleNamespace(**dict({"kind": "head2toe", "blocks": "all", "layer_features": 40, "keep": 0.1, "penalty": 1e-3}, **changes))


class Tokens(nn.Module):
    """A transformer's shapes without its attention: [N, 17, 12] with a class token in front."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)

        def forward(self, x):
            return x + self.linear(self.norm(x))

    def __init__(self):
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, 12, 4, stride=4), nn.Sequential(self.Block(), self.Block())
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x):
        x = torch.flatten(self.patches(x), 2).transpose(1, 2)
        return self.head(self.norm(self.blocks(torch.cat([x[:, 15:16], x], 1)))[:, 0])


class Rows:
    """A source of values that are there already."""

    needs_level_batches = False

    def __init__(self, values, usable):
        self.values, self.usable = values, usable
        self.streams, self.asked = 0, set()

    def stream(self, batches, epoch, levels):
        self.streams += 1
        for indices in batches:
            self.asked.update(indices)
            yield indices, self.values[indices], 0


def expected_features(network, x, cells, mask=None):
    """What the head is to see, written out: each layer pooled, masked, brought to unit length."""
    names = [block["output"] for block in network.description["blocks"]] + [network.description["tap"]]
    values = network.values(x, names)
    layers = [F.avg_pool2d(values[name], values[name].shape[-1] // cells).flatten(1) if values[name].dim() == 4 else
              values[name].mean(1) if values[name].dim() == 3 else values[name] for name in names]
    mask = torch.ones(sum(layer.shape[1] for layer in layers), dtype=x.dtype) if mask is None else mask
    pieces = (torch.cat(layers, 1) * mask).split([layer.shape[1] for layer in layers], 1)
    return torch.cat([piece / piece.norm(dim=1, keepdim=True).clamp(min=1e-12) for piece in pieces], 1)


@pytest.mark.parametrize("module, cells", [(Tower, 2), (Tokens, 1)])
def test_the_head_sees_every_layer_at_unit_length(module, cells):
    network = network_of(module())
    x = images(6)
    expected = expected_features(network, x, cells)
    tuning = Tuning(network, settings())
    assert tuning.tap.startswith("head2toe_layers_") and tuning.tap_shape() == (expected.shape[1],)
    values = tuning.frozen().features(x)
    torch.testing.assert_close(tuning(values), F.linear(expected, tuning.head.weight, tuning.head.bias), rtol=0, atol=1e-9)
    widths = [8 * cells ** 2] * 3 + [24] if module is Tower else [12] * 3
    torch.testing.assert_close(unit_lengths(values, widths), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape, target, operation, width", [
    ((16, 112, 112), 512, [4, 4], 256), ((24, 56, 56), 512, [4, 4], 384), ((80, 14, 14), 512, [2, 2], 320), ((320, 7, 7), 512, [1, 1], 320),
    ((1024, 7, 7), 512, [1, 1], 1024), ((8, 7, 7), 500, [7, 7], 392)])
def test_a_map_is_pooled_to_about_the_target(shape, target, operation, width):
    layer = pooled(shape, target)
    assert layer.arguments["output_size"] == operation and layer.width == width


def informative(count=120, width=30, seed=0):
    """Features [N, D], unit length, of which 3, 11 and 20 tell the classes apart; labels [N]."""
    random = np.random.RandomState(seed)
    labels = np.arange(count) % 3
    features = random.randn(count, width)
    features[np.arange(count), np.array([3, 11, 20])[labels]] += 4
    return F.normalize(torch.from_numpy(features), dim=1), torch.from_numpy(labels)


def objective(weight, bias, features, labels, penalty):
    scores = features @ weight.T + bias
    rest = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(labels)), labels]
    return rest.mean() + penalty * np.sqrt((weight ** 2).sum(0)).sum()


def test_the_group_lasso_is_solved():
    """Against proximal gradient descent in numpy, which reaches the minimum of this convex problem."""
    features, labels = informative()
    penalty, x, y = 0.01, features.numpy(), labels.numpy()
    weight, bias, rate = np.zeros((3, 30)), np.zeros(3), 1.5
    for _ in range(6000):
        scores = x @ weight.T + bias
        slope = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        slope[np.arange(120), y] -= 1
        weight, bias = weight - rate * slope.T @ x / 120, bias - rate * slope.mean(0)
        norms = np.sqrt((weight ** 2).sum(0))
        weight = weight * np.maximum(0, 1 - rate * penalty / np.maximum(norms, 1e-12))
    found = group_lasso_head(features, labels, 3, penalty, seed=0, steps=1500, rate=0.05)
    exact = np.sqrt((weight ** 2).sum(0))
    assert set(np.argsort(-exact)[:3]) == set(np.argsort(-relevance(found).numpy())[:3]) == {3, 11, 20}
    np.testing.assert_allclose(relevance(found).numpy(), exact, atol=0.02 * exact.max())
    assert objective(found.numpy(), bias, x, y, penalty) == pytest.approx(objective(weight, bias, x, y, penalty), rel=0.01)


def test_relevance_is_the_norm_over_the_classes_and_the_top_share_is_taken():
    weight = torch.tensor([[3.0, 0.0, 1.0, -2.0], [4.0, 0.0, -1.0, 0.0]])
    scores = relevance(weight)
    torch.testing.assert_close(scores, torch.tensor([5.0, 0.0, 2 ** 0.5, 2.0]))
    assert top_share(scores, 0.5).tolist() == [True, False, False, True]
    assert top_share(scores, 1e-6).tolist() == [True, False, False, False]


@pytest.fixture(scope="module")
def selected(tmp_path_factory):
    """(Tuning whose features are selected, the network, images, the numbers of the features, what was recorded)."""
    network, x = network_of(Tower()), images(60)
    tuning = Tuning(network, settings())
    source = Rows(tuning.frozen().features(x), list(range(0, 60, 2)))
    labels = (expected_features(network, x, 2)[:, [40, 100]] @ torch.tensor([1.0, -1.0], dtype=x.dtype) > 0).long()
    recorded = {}

    def decide(name, make):
        if name not in recorded:
            recorded[name] = json.loads(json.dumps(make()))
        return recorded[name]

    labels, config = Labels(labels), SimpleNamespace(pet=settings(), loader=SimpleNamespace(batch_size=7), seed=0)
    chosen = select_features(tuning, source, labels, config, decide)
    assert select_features(tuning, source, labels, config, decide) == chosen and source.streams == 1  # a resumed run looks once
    return tuning, network, x, chosen


def test_the_selection_goes_by_the_samples_whose_labels_are_known():
    tuning, x = Tuning(network_of(Tower()), settings()), images(20)
    source = Rows(tuning.frozen().features(x), list(range(20)))
    is_labelled = torch.arange(20) % 5 == 0
    labels = PseudoLabels(torch.arange(20) % 3, is_labelled, SimpleNamespace(), None, None)
    config = SimpleNamespace(pet=settings(), loader=SimpleNamespace(batch_size=7), seed=0)
    select_features(tuning, source, labels, config, lambda name, make: make())
    assert source.asked == {0, 5, 10, 15}


def test_the_selection_is_a_mask_before_the_unit_length(selected):
    tuning, network, x, chosen = selected
    width = tuning.head.in_features
    assert len(chosen) == round(0.1 * width) and len(set(chosen)) == len(chosen)
    mask = torch.zeros(width, dtype=x.dtype)
    mask[chosen] = 1
    assert torch.equal(tuning.state()[MASK].detach(), mask)
    features = expected_features(network, x[:6], 2, mask)
    torch.testing.assert_close(tuning(tuning.frozen().features(x[:6])), F.linear(features, tuning.head.weight, tuning.head.bias),
                               rtol=0, atol=1e-9)
    assert tuning.count() == 5 * width + 5


def test_training_moves_the_head_and_not_the_selection(selected, tmp_path):
    tuning, network, x, chosen = selected
    before = {key: tensor.clone() for key, tensor in tuning.state().items()}
    frozen = {key: tensor.clone() for key, tensor in network.state_dict().items() if not key.startswith("head.")}
    rule = build_optimizer(tuning.parameters(), SimpleNamespace(kind="adamw", weight_decay=0.01))
    F.cross_entropy(tuning(tuning.frozen().features(x)), torch.arange(60) % 5).backward()
    rule.step(0.1)
    assert torch.equal(tuning.state()[MASK], before[MASK]) and not torch.equal(tuning.head.weight, before["head.weight"])
    assert all(torch.equal(network.state_dict()[key], tensor) for key, tensor in frozen.items())
    path = tmp_path / "tuned.safetensors"
    save_network(tuning.bridged(), path)
    loaded = load_network_file(path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), tuning(tuning.frozen().features(x)), rtol=0, atol=1e-12)
    with pytest.raises(UserError, match="pet.kind=head2toe: network tower has a multi-layer head already; give the original"):
        Tuning(loaded, settings())


def test_another_level_has_the_same_head_and_selection(selected):
    tuning, network, x, _ = selected
    number = tuning.add_level(network.without_blocks(["blocks.1"]))
    values = tuning.frozen(number).features(x[:4])
    torch.testing.assert_close(values[:, 32:64], values[:, :32], rtol=0, atol=0)  # the block that was left out passes on its input
    tuning(values, number).sum().backward()
    assert tuning.head.weight.grad is not None


def test_blocks_that_make_no_head_are_refused():
    network = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), "flat", [3, 16, 16],
                      [0.5] * 3, [0.5] * 3)
    with pytest.raises(UserError, match="pet.kind=head2toe: a head on 0 blocks is not possible; choose 1 to 63 with pet.blocks"):
        Tuning(network, settings())
