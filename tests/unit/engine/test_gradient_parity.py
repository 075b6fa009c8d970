"""The captured step against plain autograd and torch.optim in float64, for every family of networks and every kind of scheme."""

import pytest
import torch
from engine_networks import FAMILIES, SCHEMES, WITH_BATCH_NORM, batch_of, family, loss_of, parts_of, with_lora
from engine_reference import LEARNING_RATE, Reference, advance, assert_close, assert_same_tensors, optimizer_of, tensors_of

from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.update_rules import SGD, AdamW

ADAMW = AdamW(0.1, epsilon=1e-4)  # its usual 1e-8 makes steps of full size from gradients that are rounding alone
RULES = {"full": SGD(0.9, 1e-3), "bias": ADAMW, "layers": SGD(), "channels": ADAMW, "lora": SGD(0.9)}
CASES = [(name, False) for name in FAMILIES] + [(name, True) for name in WITH_BATCH_NORM]


@pytest.mark.parametrize("name, is_training", CASES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_steps_equal_autograd_and_torch_optim(one_thread, name, is_training, scheme):
    module = family(name).train(is_training)
    if scheme == "lora":
        module = with_lora(module)
    parts, rule, weights = parts_of(module, scheme), RULES[scheme], torch.tensor([0.4, 0.0, 0.3, 0.3], dtype=torch.float64)
    reference = Reference(module, loss_of(name), parts, optimizer_of(rule))
    step = capture(module, loss_of(name), rule, parts, batch_of(name), StepSettings(is_training=is_training))
    tensors = tensors_of(step, module)
    for number in range(1, 4):
        batch = batch_of(name, seed=number)
        losses, outputs = advance(step, tensors, batch, weights, LEARNING_RATE, number)
        expected = reference.backward(batch, weights)
        reference.update()
        assert_close(losses, expected[0])
        assert_close(outputs, expected[1])
        assert_same_tensors(tensors, reference)


@pytest.mark.parametrize("name, is_training", [("lite0", True), ("resnet", False), ("encoder", False), ("decoder", False)])
def test_loss_curve_of_twenty_steps_equals_eagers(one_thread, name, is_training):
    module, rule = family(name).train(is_training), ADAMW
    parts, weights, batch = parts_of(module, "full"), torch.full([4], 0.25, dtype=torch.float64), batch_of(name)
    reference = Reference(module, loss_of(name), parts, optimizer_of(rule))
    step = capture(module, loss_of(name), rule, parts, batch, StepSettings(is_training=is_training))
    tensors, found, expected = tensors_of(step, module), [], []
    for number in range(1, 21):
        found.append(advance(step, tensors, batch, weights, LEARNING_RATE, number)[0].mean())
        expected.append(reference.backward(batch, weights)[0].mean())
        reference.update()
    assert_close(torch.stack(found), torch.stack(expected))
    assert found[-1] < 0.9 * found[0]
