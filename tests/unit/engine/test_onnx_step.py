"""The ONNX step in ONNX Runtime against the step's graph, network by network."""

import pytest
import torch
from engine_networks import FAMILIES, Encoder, family
from engine_reference import tensors_of
from onnx_examples import COUNT, compared, step_of

from piebridge.core.errors import UserError
from piebridge.engine.onnx_step import OnnxStep
from piebridge.engine.passes import activation_masks, run_passes
from piebridge.engine.propagate import propagate
from piebridge.engine.step_graph import DRAW, TRAINED
from piebridge.engine.update_rules import AdamW

pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_full_steps(one_thread, name):
    error, _ = compared(OnnxStep, *step_of(name, "full"))
    assert error < TOLERANCE


@pytest.mark.parametrize("name, scheme", [("mobilenet_v2", "bias"), ("mobilenet_v2", "lora"), ("lite0", "channels"), ("encoder", "layers"),
                                          ("encoder", "channels")])
def test_sparse_steps(one_thread, name, scheme):
    error, _ = compared(OnnxStep, *step_of(name, scheme))
    assert error < TOLERANCE


@pytest.mark.parametrize("name", ["mobilenet_v3", "resnet"])
def test_batch_norm_in_train_mode(one_thread, name):
    error, _ = compared(OnnxStep, *step_of(name, "full", is_training=True))
    assert error < TOLERANCE


def test_adaptive_steps(one_thread):
    """A larger epsilon: of gradients that are zero but for rounding, AdamW's own would make whole steps."""
    error, _ = compared(OnnxStep, *step_of("decoder", "full", AdamW(epsilon=1e-2)))
    assert error < TOLERANCE


def test_the_general_form_can_be_chosen(one_thread):
    step, module, batch = step_of("resnet", "full")
    for general in ("columns", "swapped"):
        error, _ = compared(lambda *given, general=general: OnnxStep(*given, general=general), step, module, batch)
        assert error < TOLERANCE


def test_dropout_takes_its_draws(one_thread):
    torch.manual_seed(0)
    step, module, batch = step_of("encoder", "full", is_training=True, module=Encoder(dropout=0.3))
    assert step.inputs_of(DRAW)
    error, _ = compared(OnnxStep, step, module, batch)
    assert error < TOLERANCE


@pytest.mark.parametrize("name", ["lite0", "decoder"])
def test_loss_curves_of_twenty_steps(one_thread, name):
    _, curve = compared(OnnxStep, *step_of(name, "full"), steps=20)
    assert curve[-1][0] < curve[0][0]
    for found, expected in curve:
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name, scheme", [("lite0", "channels"), ("mobilenet_v3", "full"), ("resnet", "full"), ("encoder", "channels"),
                                          ("decoder", "full")])
def test_steps_after_the_passes(one_thread, name, scheme):
    """Those of every program, and masks of one bit and int8 indices, which the file then computes with larger numbers."""
    step, module, batch = step_of(name, scheme)
    step, tensors = step.copy(), tensors_of(step, module)
    run_passes(step, tensors)
    activation_masks.run(step)
    error, _ = compared(OnnxStep, propagate(step).finish(), module, batch, tensors=tensors)
    assert error < TOLERANCE


def test_the_live_tensors_stay_the_same_objects(one_thread):
    step, _, batch = step_of("lite0", "layers")
    module = family("lite0", torch.float32)
    tensors = tensors_of(step, module)
    tensors.update({key: module.get_parameter(key[1]) for key in tensors if key[0] == TRAINED})
    executor = OnnxStep(step, tensors)
    before = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    losses, outputs = executor.run(list(batch), torch.full([COUNT], 0.25), 0.1, 1)
    kept = losses.clone(), outputs.clone()
    executor.run(list(batch), torch.full([COUNT], 0.25), 0.1, 2)
    assert torch.equal(losses, kept[0]) and torch.equal(outputs, kept[1])
    changed = [key for key in tensors if not torch.equal(before[key], tensors[key].detach())]
    assert {key for key in tensors if key[0] == TRAINED} <= set(changed)
    assert all(module.get_parameter(key[1]) is tensors[key] for key in tensors if key[0] == TRAINED)
    with torch.no_grad():  # what others write into them counts
        tensors[TRAINED, "8.weight"].zero_()
        tensors[TRAINED, "8.bias"].zero_()
    assert not executor.run(list(batch), torch.full([COUNT], 0.25), 0.1, 3)[1].any()


def test_arguments_that_do_not_fit(one_thread):
    step, module, batch = step_of("lite0", "bias")
    executor, weights = OnnxStep(step, tensors_of(step, module)), torch.full([COUNT], 0.25)
    with pytest.raises(UserError, match=r"takes 5 values at each run \(inputs, targets, weights, rate, count\), 4 given"):
        executor.run(list(batch)[:1], weights, 0.1, 1)
    with pytest.raises(UserError, match=r"inputs must be of shape \[4, 3, 16, 16\], not \[2, 3, 16, 16\]; compile the step for it"):
        executor.run([batch[0][:2], batch[1]], weights, 0.1, 1)


def test_frozen_tensors_are_read_once(one_thread):
    step, module, batch = step_of("lite0", "bias")
    tensors = tensors_of(step, module)
    executor, weights = OnnxStep(step, tensors), torch.full([COUNT], 0.25)
    tensors["frozen", "8.weight"].zero_()
    assert executor.run(list(batch), weights, 0.1, 1)[1].std() > 0.01
