"""Training a slice inside a pruned network against training the whole one, whose cut channels are silent: plain torch throughout."""

import pytest
import torch
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.core.slices import cut
from piebridge.core.widths import lora_cuts, narrow, widen
from piebridge.forge import prune, structure_of, tensor_cuts

KEPT = [6, 1, 2, 9, 11]
GONE = [index for index in range(12) if index not in KEPT]


class Bottleneck(nn.Module):
    """x + conv(relu(norm(conv(x)))), as plain torch; `mask` [12] silences channels behind the norm."""

    def __init__(self):
        super().__init__()
        self.narrow, self.norm, self.wide = nn.Conv2d(4, 12, 1), nn.BatchNorm2d(12), nn.Conv2d(12, 4, 1)

    def forward(self, x, mask=None):
        hidden = torch.relu(self.norm(self.narrow(x)))
        return x + self.wide(hidden if mask is None else hidden * mask[:, None, None])


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 4, 3), Bottleneck(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(self.block(self.stem(x)), 1), 1))

    def masked(self, x, mask):
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(self.block(self.stem(x), mask), 1), 1))


@pytest.fixture
def small():
    torch.manual_seed(0)
    module = Small().double().eval()
    with torch.no_grad():
        module.block.norm.weight.uniform_(0.5, 1.5)
        module.block.norm.bias.uniform_(-0.5, 0.5)
    images, labels = torch.randn(6, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    return module, images, labels


TRAINABLE = ["block.narrow.bias", "block.norm.weight", "block.norm.bias", "block.wide.bias", "head.weight", "head.bias"]


def sgd_step(parameters, loss, rate=0.3):
    """{key: value after one step}, of {key: parameter}."""
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return {key: (each - rate * gradient).detach() for (key, each), gradient in zip(parameters.items(), gradients)}


def test_biases_and_norms_trained_in_a_proxy_are_those_trained_in_the_whole(small):
    module, images, labels = small
    network = capture(Small().eval(), "small", [3, 6, 6], [0.5] * 3, [0.5] * 3).double()
    network.load_state_dict(module.state_dict())
    structure = structure_of(network)
    cuts = tensor_cuts(structure, {"block.narrow": KEPT})
    proxy = prune(network, {"block.narrow": KEPT}, structure)
    wholes = {key: dict(network.named_parameters())[key] for key in TRAINABLE}
    parts = narrow(wholes, cuts)
    proxy_parameters = {key: dict(proxy.named_parameters())[key] for key in TRAINABLE}
    assert all(torch.equal(parts[key], proxy_parameters[key]) for key in TRAINABLE)

    trained = sgd_step(proxy_parameters, nn.functional.cross_entropy(proxy(images), labels))
    before = {key: tensor.detach().clone() for key, tensor in wholes.items()}
    widen(wholes, trained, cuts)

    mask = torch.zeros(12, dtype=torch.float64)
    mask[KEPT] = 1
    own = dict(module.named_parameters())
    wanted = sgd_step({key: own[key] for key in TRAINABLE}, nn.functional.cross_entropy(module.masked(images, mask), labels))
    for key in TRAINABLE:
        torch.testing.assert_close(wholes[key].detach(), wanted[key], rtol=1e-11, atol=1e-13)  # silent channels have no gradient
        assert torch.equal(cut(wholes[key].detach(), cuts.get(key, [])), trained[key])  # exact where kept
        assert not torch.equal(wholes[key], before[key])
    for key in TRAINABLE[:3]:
        assert torch.equal(wholes[key][GONE], before[key][GONE])  # untouched where cut
    assert wholes["head.bias"] is network.head.bias  # in place: optimizers and layers see it


class LoRA(nn.Module):
    """(W + B A) x, W frozen."""

    def __init__(self, weight, down, up):
        super().__init__()
        self.weight, self.down, self.up = weight, nn.Parameter(down), nn.Parameter(up)

    def forward(self, x):
        return x @ self.weight.T + (x @ self.down.T) @ self.up.T


def test_lora_factors_trained_in_a_proxy_are_those_trained_in_the_whole():
    torch.manual_seed(1)
    weights = {"up.weight": torch.randn(12, 5).double(), "down.weight": torch.randn(4, 12).double()}
    factors = {"up.A": torch.randn(2, 5).double(), "up.B": torch.randn(12, 2).double(),
               "down.A": torch.randn(2, 12).double(), "down.B": torch.randn(4, 2).double()}
    inputs, targets = torch.randn(7, 5).double(), torch.randn(7, 4).double()
    cuts = {"up.weight": [(0, KEPT)], "down.weight": [(1, KEPT)]}
    cuts = dict(cuts, **lora_cuts(cuts, {"up.weight": ("up.A", "up.B"), "down.weight": ("down.A", "down.B")}))
    assert {key: cuts[key] for key in factors if key in cuts} == {"up.B": [(0, KEPT)], "down.A": [(1, KEPT)]}

    def step(tensors, mask):
        up, down = [LoRA(*[tensors[f"{name}.{part}"] for part in ("weight", "A", "B")]) for name in ("up", "down")]
        loss = (down(torch.nn.functional.gelu(up(inputs)) * mask) - targets).square().mean()
        return sgd_step({"up.A": up.down, "up.B": up.up, "down.A": down.down, "down.B": down.up}, loss)

    mask = torch.zeros(12).double()
    mask[KEPT] = 1
    wanted = step(dict(weights, **factors), mask)
    trained = step(narrow(dict(weights, **factors), cuts), torch.ones(len(KEPT)).double())
    before = {key: tensor.clone() for key, tensor in factors.items()}
    widen(factors, trained, cuts)
    for key in factors:
        torch.testing.assert_close(factors[key], wanted[key], rtol=1e-11, atol=1e-13)
        assert not torch.equal(factors[key], before[key])
    assert torch.equal(factors["up.B"][GONE], before["up.B"][GONE]) and torch.equal(factors["down.A"][:, GONE], before["down.A"][:, GONE])


def test_lora_of_a_convolution_and_of_heads():
    cuts = {"conv.weight": [(0, [1]), (1, [2, 3])], "stem.weight": [(2, [0])]}
    assert lora_cuts(cuts, {"conv.weight": ("a", "b"), "whole.weight": ("c", "d")}) == {"a": [(1, [2, 3])], "b": [(0, [1])]}
    down = narrow({"a": torch.arange(8.0).reshape(2, 4, 1, 1)}, {"a": [(1, [2, 3])]})["a"]
    assert down.shape == (2, 2, 1, 1) and down.flatten().tolist() == [2, 3, 6, 7]
    with pytest.raises(UserError, match="LoRA of 'stem.weight': cut along axis 2, and only its outputs and inputs have factors"):
        lora_cuts(cuts, {"stem.weight": ("a", "b")})


def test_narrow_copies_and_widen_writes_all_or_nothing():
    tensors = {"bias": torch.zeros(4), "other": torch.zeros(2)}
    parts = narrow(tensors, {"bias": [(0, [0, 1])]})
    parts["bias"].fill_(5)
    assert float(tensors["bias"].sum()) == 0
    with pytest.raises(UserError, match=r"trained tensor 'other' has shape \[3\] where the original's part has \[2\]"):
        widen(tensors, dict(parts, other=torch.ones(3)), {"bias": [(0, [0, 1])]})
    with pytest.raises(UserError, match=r"trained tensor 'bais' is none of the original's \(did you mean 'bias'\?\)"):
        widen(tensors, {"bias": parts["bias"], "bais": torch.ones(3)}, {"bias": [(0, [0, 1])]})
    assert float(tensors["bias"].sum()) == 0
    widen(tensors, parts, {"bias": [(0, [0, 1])]})
    assert tensors["bias"].tolist() == [5, 5, 0, 0] and tensors["other"].tolist() == [0, 0]
