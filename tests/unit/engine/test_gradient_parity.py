"""The captured step against plain autograd and torch.optim in float64, for every family of networks and every kind of scheme; batch norm
in eval and train mode in turns, and all of the table in tests/slow/test_every_gradient.py."""

import pytest
import torch
from engine_networks import FAMILIES, SCHEMES, WITH_BATCH_NORM, batch_of, family, loss_of, parts_of
from engine_reference import ADAMW, LEARNING_RATE, Reference, advance, assert_close, check_steps, optimizer_of, tensors_of

from piebridge.engine.capture import StepSettings, capture

CASES = [(name, scheme, name in WITH_BATCH_NORM and (row + column) % 2 == 0)
         for row, name in enumerate(FAMILIES) for column, scheme in enumerate(SCHEMES)]


@pytest.mark.parametrize("name, scheme, is_training", CASES)
def test_steps_equal_autograd_and_torch_optim(one_thread, name, scheme, is_training):
    check_steps(name, scheme, is_training)


@pytest.mark.parametrize("name, is_training", [("lite0", True), ("encoder", False)])
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
