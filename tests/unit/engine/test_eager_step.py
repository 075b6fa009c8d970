"""PyTorch's own step as an executor: the same as plain autograd and torch.optim, in float64."""

import pytest
import torch
from engine_networks import batch_of, family, loss_of, parts_of
from engine_reference import LEARNING_RATE, Reference, assert_close, optimizer_of

from piebridge.engine.capture import StepSettings
from piebridge.engine.eager_step import EagerStep
from piebridge.engine.losses import cross_entropy
from piebridge.engine.step_graph import BUFFER, TRAINED, Part
from piebridge.engine.update_rules import SGD, AdamW


@pytest.mark.parametrize("options", [{}, {"is_channels_last": True}, {"is_foreach": True, "is_channels_last": True}])
@pytest.mark.parametrize("rule", [SGD(), SGD(0.9, 1e-2), AdamW()])
@pytest.mark.parametrize("name", ["lite0", "encoder"])
def test_the_eager_step_is_torch_optim(name, rule, options):
    module, batch = family(name), batch_of(name)
    parts = parts_of(module, "channels")
    flat = [tensor for value in batch for tensor in (value if isinstance(value, tuple) else (value,))]
    step, reference = EagerStep(module, loss_of(name), rule, parts, input_count=len(flat) - 1, **options), Reference(
        module, loss_of(name), parts, optimizer_of(rule))
    weights = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    for count in (1, 2, 3):
        losses, outputs = step.run(flat, weights, LEARNING_RATE, count)
        expected = reference.backward(batch, weights)
        reference.update()
        assert_close(losses, expected[0])
        assert_close(outputs, expected[1])
    for key, whole in reference.tensors().items():
        assert_close(step.tensors[TRAINED, key], whole.detach())
    assert torch.equal(next(module.parameters()), next(family(name).parameters()))  # the module itself is left alone


def test_the_eager_step_clips_and_accumulates():
    module, batch = family("lite0"), batch_of("lite0")
    parts, settings = parts_of(module, "layers"), StepSettings(clip=0.05, accumulation=2)
    update = EagerStep(module, cross_entropy, SGD(0.9), parts, settings)
    accumulate = EagerStep(module, cross_entropy, SGD(0.9), parts, settings, update.tensors, is_accumulating=True)
    reference = Reference(module, cross_entropy, parts, optimizer_of(SGD(0.9)))
    for count in (1, 2):
        for executor, seed in ((accumulate, 3), (update, 4)):
            batch = batch_of("lite0", seed=seed)
            weights = torch.full((4,), 0.125, dtype=torch.float64)
            executor.run(list(batch), weights, LEARNING_RATE, count)
            reference.backward(batch, weights)
        reference.update(0.05)
    for key, whole in reference.tensors().items():
        assert_close(update.tensors[TRAINED, key], whole.detach())


def test_the_eager_step_moves_statistics_in_train_mode():
    module, batch = family("lite0").train(), batch_of("lite0")
    parts = parts_of(module, "layers")
    step, reference = EagerStep(module, cross_entropy, SGD(), parts, StepSettings(is_training=True)), Reference(
        module, cross_entropy, parts, optimizer_of(SGD()))
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    step.run(list(batch), weights, LEARNING_RATE, 1)
    reference.backward(batch, weights)
    for key, buffer in reference.module.named_buffers():
        assert_close(step.tensors[BUFFER, key], buffer)


def test_the_eager_step_keeps_tied_parameters_tied():
    module, batch = family("decoder"), batch_of("decoder")
    step = EagerStep(module, loss_of("decoder"), SGD(), {"embedding.weight": Part()})
    reference = Reference(module, loss_of("decoder"), {"embedding.weight": Part()}, optimizer_of(SGD()))
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    step.run(list(batch), weights, LEARNING_RATE, 1)
    reference.backward(batch, weights)
    reference.update()
    assert_close(step.tensors[TRAINED, "embedding.weight"], reference.tensors()["embedding.weight"].detach())


def test_bf16_is_near_and_its_updates_are_float():
    module, batch = family("lite0", torch.float32), batch_of("lite0", dtype=torch.float32)
    parts = parts_of(module, "layers")
    exact, rounded = [EagerStep(module, cross_entropy, SGD(), parts, is_channels_last=True, is_bf16=is_bf16) for is_bf16 in (False, True)]
    weights = torch.full((4,), 0.25)
    losses = [step.run(list(batch), weights, LEARNING_RATE, 1)[0] for step in (exact, rounded)]
    assert losses[1].dtype == torch.float32 and 0 < float((losses[0] - losses[1]).norm() / losses[0].norm()) < 0.05
    assert all(tensor.dtype == torch.float32 for (role, _), tensor in rounded.tensors.items() if role == TRAINED)
