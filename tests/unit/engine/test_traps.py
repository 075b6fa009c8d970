"""Mistakes that tracing a training step makes in silence, each with its cure switched off and on."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from engine_networks import batch_of, family, parts_of
from engine_reference import Reference, advance, tensors_of
from torch import nn

from piebridge.engine import capture as capture_module
from piebridge.engine import compat
from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.losses import cross_entropy
from piebridge.engine.step_graph import BUFFER, DRAW, OUTPUTS, TRAINED, Part
from piebridge.engine.update_rules import SGD

WEIGHTS = torch.full([4], 0.25, dtype=torch.float64)


def largest_error(step, module, batch):
    """Of the trained tensors after one step at rate 1, against autograd's, relative to the largest gradient."""
    reference = Reference(module, cross_entropy, step.parts, lambda leaves: torch.optim.SGD(leaves, 1.0))
    reference.backward(batch, WEIGHTS)
    largest = max(leaf.grad.abs().max() for leaf in reference.leaves.values())
    reference.update()
    tensors = tensors_of(step, module)
    advance(step, tensors, batch, WEIGHTS, 1.0, 1)
    return max((tensors[TRAINED, key] - whole).abs().max() / largest for key, whole in reference.tensors().items()).item()


def test_attention_traced_through_the_flash_kernel_has_wrong_gradients(one_thread, monkeypatch):
    """The lowering that is registered for it; the plain form is right."""
    module, batch = family("encoder"), batch_of("encoder")
    parts = parts_of(module, "full")
    assert largest_error(capture(module, cross_entropy, SGD(), parts, batch), module, batch) < 1e-12
    monkeypatch.setattr(compat, "exact_attention", contextlib.nullcontext)
    assert largest_error(capture(module, cross_entropy, SGD(), parts, batch), module, batch) > 1e-3


def test_the_count_of_batches_is_a_whole_number(one_thread):
    """torch.func.grad refuses it among the tensors of a step; here it counts on."""
    module, batch = family("lite0").train(), batch_of("lite0")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def objective(tensors):
        return cross_entropy(torch.func.functional_call(module, tensors, (batch[0],)), batch[1]).mean()

    with pytest.raises(RuntimeError):
        torch.func.grad(objective)(tensors)
    step = capture(module, cross_entropy, SGD(), {"8.bias": Part()}, batch, StepSettings(is_training=True))
    live = tensors_of(step, module)
    for number in (1, 2):
        advance(step, live, batch, WEIGHTS, 0.1, number)
    assert live[BUFFER, "1.num_batches_tracked"] == 2 and live[BUFFER, "1.num_batches_tracked"].dtype == torch.int64


class Activated(nn.Module):
    """Two convolutions with a ReLU6 between them: a module's, or a function's, which the engine cannot reach."""

    def __init__(self, is_function):
        super().__init__()
        self.first, self.last, self.is_function = nn.Conv2d(3, 6, 1, bias=False), nn.Conv2d(6, 5, 1), is_function
        self.activation = nn.ReLU6(inplace=True)

    def forward(self, x):
        x = self.first(x)
        return self.last(F.relu6(x, inplace=True) if self.is_function else self.activation(x)).mean((2, 3))


def full_size_values(step, shape):
    """Of the forward: tensors of this shape with a memory of their own, as the calls would allocate them."""
    nodes = list(step.graph.nodes)
    outputs = step.results[[value.role for value in step.outputs].index(OUTPUTS)]
    while outputs.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        outputs = outputs.args[0]
    storages = [compat.storage_key(node.meta["val"]) for node in nodes[:nodes.index(outputs)]
                if node.op == "call_function" and tuple(node.meta["val"].shape) == shape]
    return len(set(storages))


@pytest.mark.parametrize("is_function", [False, True])
def test_an_in_place_relu6_is_stored_twice(one_thread, monkeypatch, is_function):
    """Autograd clones what an in-place activation overwrites, and the result is copied over it: twice what the step holds, which is what
    goes in and what comes out."""
    module, batch = Activated(is_function).double(), batch_of("lite0")
    parts = parts_of(module, "full")
    step = capture(module, cross_entropy, SGD(), parts, batch)
    assert full_size_values(step, (4, 6, 16, 16)) == 2
    assert largest_error(step, module, batch) < 1e-12
    monkeypatch.setattr(capture_module, "_without_other_names", lambda step: None)
    monkeypatch.setattr(capture_module, "_in_mode", lambda module, settings: module)
    assert full_size_values(capture(module, cross_entropy, SGD(), parts, batch), (4, 6, 16, 16)) == 4


def test_single_precision_in_train_mode_is_checked_in_double(one_thread):
    """Batch norm over few values multiplies rounding from layer to layer: what agrees to 1e-9 in float64 does not to 1e-6 in float32."""
    module = family("mobilenet_v2").train()
    parts, settings = parts_of(module, "full"), StepSettings(is_training=True)
    step = capture(module, cross_entropy, SGD(), parts, batch_of("mobilenet_v2"), settings)
    assert largest_error(step, module, batch_of("mobilenet_v2")) < 1e-9


def test_a_step_does_not_draw_by_itself(one_thread):
    """Its random numbers are inputs: twice the same draws give twice the same, and ones leave dropout's scale alone."""
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3, bias=False)).double()
    batch = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    step = capture(module, cross_entropy, SGD(), {"1.weight": Part()}, batch, StepSettings(is_training=True))
    (_, value), = step.inputs_of(DRAW)
    assert not [node for node in step.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    outputs = [advance(step, tensors_of(step, module), batch, WEIGHTS, 0.1, 1, [torch.ones(value.shape, dtype=value.dtype)])[1]
               for _ in range(2)]
    assert torch.equal(*outputs)
    torch.testing.assert_close(outputs[0], 2 * module[1](batch[0]).detach())
