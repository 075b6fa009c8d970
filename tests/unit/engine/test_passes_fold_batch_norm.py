import pytest
import torch
from pass_examples import ATEN, ConvolutionNetwork, calls, everything, images, network, run, same, step_of
from torch import nn

from piebridge.engine.passes import PASSES, run_passes
from piebridge.engine.step_graph import FROZEN, Part

pytestmark = pytest.mark.usefixtures("one_thread")
NEEDED = ("split_convolution_backward", "fold_batch_norm", "fold_constants", "dead_code")
REST = [name for name in PASSES if name not in NEEDED]


def on_channels(step):
    """Multiplications of something as large as an activation with one number per channel."""
    found = []
    for node in calls(step, ATEN.mul.Tensor, ATEN.add.Tensor, ATEN.sub.Tensor):
        shapes = [tuple(each.meta["val"].shape) for each in node.all_input_nodes]
        found += [node for one in shapes if len(one) == 4 and one[0] > 1 and one[2] > 1
                  for other in shapes if max(other, default=1) > 1 and other in ((one[1], 1, 1), (1, one[1], 1, 1))]
    return found


@pytest.fixture(scope="module")
def head_and_late_bias():
    """All convolutions frozen, gradients go through the last two."""
    module, batch = network(ConvolutionNetwork), images()
    return (module, batch) + step_of(module, {"depthwise.0.weight": Part(), "head.weight": Part(), "head.bias": Part()}, batch)


def test_of_a_frozen_convolution_it_disappears_into_the_weight(head_and_late_bias):
    module, batch, step, tensors = head_and_late_bias
    step, tensors, before = step.copy(), dict(tensors), run(step, module, tensors, batch)
    assert len(on_channels(step)) == 4 * 4 + 2
    run_passes(step, tensors, off=REST)
    assert on_channels(step) == []
    same(run(step, module, tensors, batch), before)
    stem = calls(step, ATEN.convolution.default)[0]
    folded, norm = tensors[FROZEN, step.inputs[step.placeholders.index(stem.args[1])].name], module.stem[1]
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    assert torch.allclose(folded, module.stem[0].weight * scale[:, None, None, None])


def test_forward_and_backward_share_the_folded_weight_and_the_original_is_dropped(head_and_late_bias):
    _, _, step, tensors = head_and_late_bias
    step, tensors = step.copy(), dict(tensors)
    run_passes(step, tensors, off=REST)
    forward, backward = [node for node in calls(step, ATEN.convolution.default) if tuple(node.args[1].meta["val"].shape) == (6, 12, 1, 1)]
    assert not forward.args[6] and backward.args[6] and forward.args[1] is backward.args[1]
    assert not {key for key in tensors if key[1].startswith(("stem", "project", "expand"))}
    assert {(value.role, value.name) for _, value in step.inputs_of(FROZEN)} == set(tensors)


def test_of_a_trained_convolution_the_weight_is_scaled_in_each_step():
    module, batch = network(ConvolutionNetwork), images()
    parts = {key: Part() for key, _ in module.named_parameters() if key.endswith("0.weight") or "general" in key or "head" in key}
    step, tensors = step_of(module, parts, batch)
    before = run(step, module, tensors, batch)
    run_passes(step, tensors, off=REST)
    assert on_channels(step) == []
    same(run(step, module, tensors, batch), before)


def test_a_trained_norm_keeps_what_its_gradient_needs():
    module, batch = network(ConvolutionNetwork), images()
    step, tensors = step_of(module, everything(module), batch)
    before = run(step, module, tensors, batch)
    run_passes(step, tensors, off=REST)
    same(run(step, module, tensors, batch), before)
    assert on_channels(step)


def test_off_leaves_the_arithmetic(head_and_late_bias):
    step, tensors = head_and_late_bias[2].copy(), dict(head_and_late_bias[3])
    assert "fold_batch_norm" not in run_passes(step, tensors, off=["fold_batch_norm"])
    assert len(on_channels(step)) == 4 * 4 + 2


class Read(nn.Module):
    """The convolution's output is read beside its batch norm, which therefore has to stay; or divides, or takes away from a number."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.convolution, self.norm = kind, nn.Conv2d(3, 4, 3, bias=kind == "divided"), nn.BatchNorm2d(4)

    def forward(self, inputs):
        features = self.convolution(inputs)
        if self.kind == "twice":
            return (torch.tanh(features) + self.norm(features)).mean((2, 3))
        if self.kind == "divided":
            return torch.tanh(features / self.norm.running_var[:, None, None]).mean((2, 3))
        return torch.tanh(self.norm.running_var[:, None, None] - features).mean((2, 3))


@pytest.mark.parametrize("kind, folded", [("twice", 0), ("divided", 1), ("taken away", 0)])
def test_other_arithmetic_behind_a_convolution(kind, folded):
    module, batch = network(Read, kind), images()
    step, tensors = step_of(module, {"convolution.weight": Part()}, batch)
    before = run(step, module, tensors, batch)
    changes = run_passes(step, tensors, off=REST)
    assert (changes["fold_batch_norm"] > 0) == bool(folded)
    same(run(step, module, tensors, batch), before)
