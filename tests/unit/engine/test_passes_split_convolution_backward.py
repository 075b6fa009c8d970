import pytest
import torch
from pass_examples import ATEN, calls, everything, network, run, same, step_of
from torch import nn

from piebridge.engine.passes import PASSES, dead_code, run_passes, split_convolution_backward
from piebridge.engine.propagate import propagate
from piebridge.engine.step_graph import Part

pytestmark = pytest.mark.usefixtures("one_thread")
OTHERS = [name for name in PASSES if name not in ("split_convolution_backward", "dead_code")]


class Two(nn.Module):
    """Two convolutions, so that the second has an input gradient."""

    def __init__(self, kind, *arguments, **options):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), kind(4, *arguments, **options)

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs))).mean((2, 3))


SHAPES = {"pointwise": (nn.Conv2d, (6, 1), {}), "strided": (nn.Conv2d, (6, 3, 2, 1), {}), "pointwise strided": (nn.Conv2d, (6, 1, 2), {}),
          "dilated": (nn.Conv2d, (6, 3, 1, 2, 2), {}), "grouped": (nn.Conv2d, (6, 3, 2, 1), {"groups": 2}),
          "even kernel": (nn.Conv2d, (6, 2, 3), {}), "depthwise": (nn.Conv2d, (8, 5, 2, 2), {"groups": 4}),
          "transposed": (nn.ConvTranspose2d, (6, 3, 2, 1, 1), {})}


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_three_gradients_in_three_nodes(shape, size):
    kind, arguments, options = SHAPES[shape]
    module = network(Two, kind, *arguments, **options)
    batch = torch.randn(2, 3, size, size, dtype=torch.float64), torch.tensor([0, 3])
    step, tensors = step_of(module, everything(module), batch)
    before = run(step, module, tensors, batch)
    assert [node.args[10] for node in calls(step, ATEN.convolution_backward.default)] == [[True, True, True], [False, True, True]]
    assert split_convolution_backward.run(step) == 5
    propagate(step).finish()
    assert [node.args[10] for node in calls(step, ATEN.convolution_backward.default)] == [[False, True, False]] * 2
    same(run(step, module, tensors, batch), before)


def test_a_bias_needs_no_activation():
    """Of a frozen weight the input is not read by the backward: convolution_backward would have kept it for its shape."""
    module, batch = network(Two, nn.Conv2d, 6, 3), (torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 3]))
    step, tensors = step_of(module, {"first.bias": Part(), "second.bias": Part()}, batch)
    before = run(step, module, tensors, batch)
    assert len(calls(step, ATEN.convolution_backward.default)) == 2
    run_passes(step, tensors, off=OTHERS)
    assert not calls(step, ATEN.convolution_backward.default)
    first, second = calls(step, ATEN.convolution.default)[:2]
    assert list(second.users) and step.placeholders[[value.role for value in step.inputs].index("batch")].users.keys() == {first}
    same(run(step, module, tensors, batch), before)


def test_the_inputs_gradient_keeps_the_strides_that_views_rely_on():
    """A convolution between linear layers over the channels, as ConvNeXt has it."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.middle, self.head = nn.Linear(3, 6), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Linear(6, 4)

        def forward(self, inputs):
            features = self.middle(torch.tanh(self.before(inputs.permute(0, 2, 3, 1))).permute(0, 3, 1, 2))
            return self.head(torch.tanh(features).permute(0, 2, 3, 1)).mean((1, 2))

    module = network(Between)
    batch = torch.randn(2, 3, 4, 4, dtype=torch.float64), torch.tensor([0, 3])
    step, tensors = step_of(module, everything(module), batch)
    before = run(step, module, tensors, batch)
    run_passes(step, tensors)
    same(run(step, module, tensors, batch), before)


def test_off_leaves_the_joint_node():
    module, batch = network(Two, nn.Conv2d, 6, 3), (torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 3]))
    step, tensors = step_of(module, everything(module), batch)
    run_passes(step, tensors, off=["split_convolution_backward"])
    assert [node.args[10] for node in calls(step, ATEN.convolution_backward.default)] == [[True, True, True], [False, True, True]]
    assert dead_code.run(step, tensors) == 0
