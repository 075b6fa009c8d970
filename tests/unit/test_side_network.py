"""LST: the side network against its formula in plain torch, no gradient in the backbone, and the tuned network from its file."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from forge_examples import Tower, images, network_of
from test_head2toe import Tokens
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.optimizers import build_optimizer
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**changes):
    return SimpleNamespace(**dict({"kind": "lst", "blocks": "all", "r": 1}, **changes))


def tuned(module, **changes):
    """(original, Tuning with gates that are not at their start)."""
    torch.manual_seed(0)
    network = network_of(module())
    tuning = Tuning(network, settings(**changes))
    with torch.no_grad():
        for number, tensor in enumerate(tensor for key, tensor in tuning.state().items() if "alpha" in key):
            tensor.fill_(0.05 * (number + 1) * (-1) ** number)
    return network, tuning


def plain_side(network, t, x):
    """Logits by the paper's recursion, from the original's values and the side network's tensors `t`."""
    names = [block["output"] for block in network.description["blocks"]] + [network.description["tap"]]
    values = network.values(x, names)
    state = None
    for number, name in enumerate(names):
        h = values[name].detach()
        if h.dim() == 3:
            h = h[:, 0]
        is_map = h.dim() == 4
        down = (F.conv2d if is_map else F.linear)(h, t[f"side.down_{number}.weight"], t[f"side.down_{number}.bias"])
        if state is None:
            z = down
        else:
            mu = 1 / (1 + torch.exp(-t[f"side.alpha_{number}"] / 0.1))
            z = mu * down + (1 - mu) * (state if state.dim() == down.dim() else state.mean((2, 3)))
        block = {part: [t[f"side.block_{number}_{part}.{kind}"] for kind in ("weight", "bias")]
                 for part in (("norm", "depthwise", "pointwise") if is_map else ("norm", "wide", "narrow"))}
        if is_map:
            inner = F.conv2d(F.group_norm(z, 1, *block["norm"]), *block["depthwise"], padding=1, groups=z.shape[1])
            state = z + F.conv2d(F.relu(inner), *block["pointwise"])
        else:
            inner = F.gelu(F.linear(F.layer_norm(z, z.shape[1:], *block["norm"]), *block["wide"]))
            state = z + F.linear(inner, *block["narrow"])
    up = F.linear(F.layer_norm(state, state.shape[1:], t["side.norm.weight"], t["side.norm.bias"]), t["side.up.weight"], t["side.up.bias"])
    return F.linear(up, t["head.weight"], t["head.bias"])


@pytest.mark.parametrize("module", [Tower, Tokens])
def test_the_side_network_and_its_gradients_are_the_formulas(module):
    network, tuning = tuned(module)
    x, labels = images(5), torch.arange(5)
    values = tuning.frozen().features(x)
    t = {key: tensor.detach().clone().requires_grad_(True) for key, tensor in tuning.state().items()}
    expected = plain_side(network, t, x)
    logits = tuning(values)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    F.cross_entropy(expected, labels).backward()
    F.cross_entropy(logits, labels).backward()
    for key, parameter in tuning.network.named_parameters():
        if key in t:
            torch.testing.assert_close(parameter.grad, t[key].grad, rtol=0, atol=1e-9)
            assert "alpha" not in key or bool(parameter.grad != 0)


@pytest.mark.parametrize("module, shape", [(Tower, (8 * 64 * 3 + 24,)), (Tokens, (36,))])
def test_no_gradient_enters_the_backbone(module, shape):
    network, tuning = tuned(module)
    assert tuning.tap.startswith("side_ladder_") and tuning.tap_shape() == shape
    whole = tuning.network
    names = [block["output"] for block in network.description["blocks"]] + [tuning.tap]
    x = images(4)
    with torch.enable_grad():
        assert not any(value.requires_grad for value in whole.values(x, names).values())
        logits = whole(x)
    logits.sum().backward()
    trained = tuning.state()
    for key, parameter in whole.named_parameters():
        assert (parameter.grad is not None) == (key in trained) == parameter.requires_grad, key
    assert set(trained) == {key for key, _ in whole.named_parameters() if key.startswith(("side.", "head."))}
    assert tuning.count() == sum(tensor.numel() for tensor in trained.values())


def test_gates_start_half_open():
    torch.manual_seed(0)
    tuning = Tuning(network_of(Tower()), settings())
    assert [float(tensor) for key, tensor in tuning.state().items() if "alpha" in key] == [0.0] * 3
    sigmoid = torch.sigmoid(tuning.state()["side.alpha_1"] / 0.1)
    assert float(sigmoid) == 0.5


def test_the_tuned_network_comes_back_from_its_file(tmp_path):
    network, tuning = tuned(Tower)
    x = images(12)
    original = {key: tensor.clone() for key, tensor in network.state_dict().items() if not key.startswith("head.")}
    rule = build_optimizer(tuning.parameters(), SimpleNamespace(kind="adamw", weight_decay=0.0))
    losses = []
    for _ in range(30):
        rule.zero_grad()
        loss = F.cross_entropy(tuning(tuning.frozen().features(x)), torch.arange(12) % 4)
        loss.backward()
        rule.step(0.01)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    path = tmp_path / "tuned.safetensors"
    save_network(tuning.bridged(), path)
    loaded = load_network_file(path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), tuning(tuning.frozen().features(x)), rtol=0, atol=1e-12)
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in original.items())
    with pytest.raises(UserError, match="pet.kind=lst: network tower has a side network already; give the original it was made of"):
        Tuning(loaded, settings())


def test_the_width_is_that_of_the_last_block_over_r():
    _, tuning = tuned(Tokens)
    assert tuning.state()["side.down_0.weight"].shape == (12, 12) and tuning.head.in_features == 12
    assert tuned(Tokens, r=4)[1].state()["side.up.weight"].shape == (12, 8)  # eight at least


def test_rungs_are_the_blocks_that_are_chosen():
    network, tuning = tuned(Tower, blocks="last:1")
    assert tuning.tap_shape() == (8 * 64 + 24,)
    number = tuning.add_level(network.without_blocks(["blocks.2"]))
    assert tuning(tuning.frozen(number).features(images(2)), number).shape == (2, 5)
    with pytest.raises(UserError, match="pet.kind=lst: 0 blocks make no ladder; choose 1 to 63 with pet.blocks"):
        Tuning(capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), "flat", [3, 16, 16],
                       [0.5] * 3, [0.5] * 3), settings())
