import pytest
import torch
from pass_examples import ATEN, ConvolutionNetwork, calls, everything, images, network, run, same, step_of
from torch import nn

from piebridge.engine.passes import PASSES, run_passes
from piebridge.engine.step_graph import FROZEN, Part

pytestmark = pytest.mark.usefixtures("one_thread")
NEEDED = ("split_convolution_backward", "batch_norm_gradients", "fold_batch_norm", "fold_constants", "dead_code")
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


def centred(step):
    """A convolution's output less its mean: of each norm once in the forward, and in the backward where the output is kept for that."""
    return [node for node in calls(step, ATEN.sub.Tensor) if getattr(node.args[0], "target", None) is ATEN.convolution.default]


def test_a_trained_norm_behind_a_trained_convolution_does_not_keep_its_output():
    """In float64 to 1e-10: the factor's gradient comes from the weight's."""
    module, batch = network(ConvolutionNetwork), images()
    step, tensors = step_of(module, everything(module), batch)
    before = run(step, module, tensors, batch)
    assert len(centred(step)) == 8
    changes = run_passes(step, tensors, off=REST)
    assert changes["batch_norm_gradients"] > 8 and on_channels(step) == [] and centred(step) == []
    same(run(step, module, tensors, batch), before)


def test_a_convolutions_bias_before_a_trained_norm():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(3, 4, 3, groups=1), nn.BatchNorm2d(4)

        def forward(self, inputs):
            return torch.tanh(self.norm(self.convolution(inputs))).mean((2, 3))

    module, batch = network(Biased), images()
    step, tensors = step_of(module, everything(module), batch)
    before = run(step, module, tensors, batch)
    run_passes(step, tensors, off=REST)
    assert centred(step) == []
    same(run(step, module, tensors, batch), before)


@pytest.mark.parametrize("parts", ["norms alone", "some channels"])
def test_a_trained_norm_keeps_the_output_where_the_weights_gradient_is_not_whole(parts):
    module, batch = network(ConvolutionNetwork), images()
    chosen = {key: Part() for key, _ in module.named_parameters() if ".1." in key}
    if parts == "some channels":
        chosen["expand.0.weight"] = Part(1, torch.tensor([0, 3, 5]))
    step, tensors = step_of(module, chosen, batch)
    before = run(step, module, tensors, batch)
    run_passes(step, tensors, off=REST)
    assert len(centred(step)) == 4
    same(run(step, module, tensors, batch), before)


def test_weights_larger_than_the_activations_are_not_scaled_in_each_step():
    """One pixel per image: subtract, multiply, multiply, add become multiply, add."""
    module, batch = network(ConvolutionNetwork), images(2)
    parts = {key: Part() for key, _ in module.named_parameters() if key.endswith("0.weight")}
    step, tensors = step_of(module, parts, batch)
    before = run(step, module, tensors, batch)
    forward = [node for node in calls(step, ATEN.convolution.default)]
    run_passes(step, tensors, off=REST)
    assert len(forward) == 5 and centred(step) == []
    assert not [node for node in calls(step, ATEN.mul.Tensor) if tuple(node.meta["val"].shape) in ((6, 3, 3, 3), (12, 1, 3, 3))
                and any(user.target is ATEN.convolution.default for user in node.users)]
    same(run(step, module, tensors, batch), before)


def test_off_leaves_the_arithmetic(head_and_late_bias):
    step, tensors = head_and_late_bias[2].copy(), dict(head_and_late_bias[3])
    off = ["fold_batch_norm", "batch_norm_gradients"]
    assert not set(off) & set(run_passes(step, tensors, off=off))
    assert len(on_channels(step)) == 4 * 4 + 2
    step, tensors = head_and_late_bias[2].copy(), dict(head_and_late_bias[3])
    run_passes(step, tensors, off=["batch_norm_gradients"])
    assert len(on_channels(step)) == 2


class Read(nn.Module):
    """The convolution's output is read beside its batch norm, which then becomes multiply, add; is divided; or taken away."""

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


@pytest.mark.parametrize("kind, folded", [("twice", 4), ("divided", 1), ("taken away", 0)])
def test_other_arithmetic_behind_a_convolution(kind, folded):
    module, batch = network(Read, kind), images()
    step, tensors = step_of(module, {"convolution.weight": Part()}, batch)
    before = run(step, module, tensors, batch)
    changes = run_passes(step, tensors, off=REST)
    assert changes["fold_batch_norm"] == folded
    assert (calls(step, ATEN.convolution.default)[0].args[1].op == "placeholder") == (kind != "divided")
    same(run(step, module, tensors, batch), before)
