from types import SimpleNamespace

import pytest
import torch

from piebridge.core.errors import UserError
from piebridge.core.optimizers import UPDATE_RULES
from piebridge.engine.losses import cross_entropy, loss_of, smoothed, token_cross_entropy
from piebridge.engine.step_function import clipped
from piebridge.engine.update_rules import SGD, AdamW, rule_of

RATE = 0.03
CASES = {
    "sgd": (SGD(), lambda leaves: torch.optim.SGD(leaves, RATE)),
    "decay": (SGD(0.0, 0.1), lambda leaves: torch.optim.SGD(leaves, RATE, weight_decay=0.1)),
    "momentum": (SGD(0.9, 0.1), lambda leaves: torch.optim.SGD(leaves, RATE, 0.9, weight_decay=0.1)),
    "adamw": (AdamW(0.1), lambda leaves: torch.optim.AdamW(leaves, RATE, weight_decay=0.1)),
    "betas": (AdamW(0.0, 0.8, 0.95, 1e-6), lambda leaves: torch.optim.AdamW(leaves, RATE, (0.8, 0.95), 1e-6, 0.0)),
}


def run(rule, start, gradients):
    """Values after each update."""
    value, states, values = start, {slot: torch.zeros_like(start) for slot in rule.slots}, []
    rate = torch.tensor(RATE, dtype=start.dtype)
    for number, gradient in enumerate(gradients, 1):
        value, states = rule.new_values(value, gradient, states, rate, torch.tensor(float(number), dtype=start.dtype))
        values.append(value)
    return torch.stack(values)


@pytest.fixture
def curve():
    """(start, gradients of 30 updates)"""
    torch.manual_seed(0)
    return torch.randn(5, dtype=torch.float64), torch.randn(30, 5, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_equals_torch_optim(curve, name):
    rule, make = CASES[name]
    start, gradients = curve
    leaf, expected = start.clone().requires_grad_(True), []
    optimizer = make([leaf])
    for gradient in gradients:
        leaf.grad = gradient.clone()
        optimizer.step()
        expected.append(leaf.detach().clone())
    torch.testing.assert_close(run(rule, start, gradients), torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", UPDATE_RULES)
def test_equals_the_rules_of_the_loop(curve, kind):
    start, gradients = curve
    settings = SimpleNamespace(kind=kind, momentum=0.9, weight_decay=0.1)
    value, expected = start.clone(), []
    rule = UPDATE_RULES[kind]([value], settings)
    for gradient in gradients:
        value.grad = gradient.clone()
        rule.step(RATE)
        expected.append(value.clone())
    torch.testing.assert_close(run(rule_of(settings), start, gradients), torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_the_first_adam_update_is_exact_in_single_precision(curve):
    """1 - 0.999 is off by 1e-5 of itself where 0.999 is rounded first."""
    start, gradients = curve
    single, double = (run(AdamW(0.0), 0 * start.to(dtype), gradients[:1].to(dtype)) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(single.double(), double, rtol=3e-7, atol=0.0)


def test_clipping_of_no_gradient_at_all():
    zeros = clipped({"a": torch.zeros(3), "b": torch.zeros(2)}, 1.0)
    assert not zeros["a"].any() and not zeros["b"].any()


def test_losses_are_per_sample():
    torch.manual_seed(0)
    outputs, targets = torch.randn(3, 4, 7, dtype=torch.float64), torch.tensor([[1, 2, 3, -100], [0, -100, -100, -100], 4 * [-100]])
    logs = outputs.log_softmax(-1)
    expected = [-(logs[0, 0, 1] + logs[0, 1, 2] + logs[0, 2, 3]) / 3, -logs[1, 0, 0], torch.zeros((), dtype=torch.float64)]
    torch.testing.assert_close(token_cross_entropy(outputs, targets), torch.stack(expected))
    log = outputs[:, 0].log_softmax(-1)
    chosen = log[torch.arange(3), targets[:, 0].clamp(min=0)]
    torch.testing.assert_close(smoothed(0.1)(outputs[:, 0], targets[:, 0].clamp(min=0)), -(0.9 * chosen + 0.1 * log.mean(1)))


def test_unknown_names():
    with pytest.raises(UserError, match=r"^optimizer.kind=adam: unknown \(did you mean 'adamw'\?\); known: sgd, adamw$"):
        rule_of(SimpleNamespace(kind="adam"))
    with pytest.raises(UserError, match=r"^loss 'cros_entropy': unknown \(did you mean 'cross_entropy'\?\); known: cross_entropy, "):
        loss_of("cros_entropy")
    assert loss_of("cross_entropy") is cross_entropy
