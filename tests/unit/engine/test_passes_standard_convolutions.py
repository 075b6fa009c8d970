import pytest
import torch
from pass_examples import ATEN, ConvolutionNetwork, calls, everything, images, network, run, same, step_of
from torch import nn

from piebridge.core.errors import UserError
from piebridge.engine.passes import run_passes, standard_convolutions
from piebridge.engine.step_graph import Part

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = {"pointwise": (nn.Conv2d, (6, 1), {}), "pointwise strided": (nn.Conv2d, (6, 1, 2), {}),
          "pointwise padded": (nn.Conv2d, (6, 1, 1, 1), {}), "general": (nn.Conv2d, (6, 3, 1, 1), {}),
          "strided": (nn.Conv2d, (6, 3, 2, 1), {}), "dilated": (nn.Conv2d, (6, 3, 1, 2, 2), {}),
          "even kernel": (nn.Conv2d, (6, 2, 3), {}), "uneven": (nn.Conv2d, (6, (3, 1), (1, 2), (0, 1)), {}),
          "depthwise": (nn.Conv2d, (4, 3, 1, 1), {"groups": 4}), "depthwise strided": (nn.Conv2d, (4, 5, 2, 2), {"groups": 4}),
          "depthwise dilated": (nn.Conv2d, (4, 3, 1, 2, 2), {"groups": 4}), "depthwise wide": (nn.Conv2d, (8, 3, 1, 1), {"groups": 4}),
          "grouped": (nn.Conv2d, (6, 3, 2, 1), {"groups": 2}), "grouped pointwise": (nn.Conv2d, (6, 1), {"groups": 2}),
          "transposed": (nn.ConvTranspose2d, (6, 3, 2, 1, 1), {}),
          "transposed depthwise": (nn.ConvTranspose2d, (4, 3, 2, 1), {"groups": 4})}


class Middle(nn.Module):
    """A convolution that has all three gradients."""

    def __init__(self, kind, arguments, options):
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, 4, 1), kind(4, *arguments, **options)

    def forward(self, inputs):
        return torch.tanh(self.middle(torch.tanh(self.first(inputs)))).mean((2, 3))


@pytest.mark.parametrize("general", standard_convolutions.GENERAL_FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_in_every_form(shape, general):
    module, batch = network(Middle, *SHAPES[shape]), images(7)
    step, tensors = step_of(module, everything(module), batch)
    before = run(step, module, tensors, batch)
    assert standard_convolutions.run(step, general) > 0
    assert not calls(step, ATEN.convolution_backward.default)
    same(run(step, module, tensors, batch), before)


def weight_gradient_operators(shape, general):
    module, batch = network(Middle, *SHAPES[shape]), images(7)
    step, _ = step_of(module, {"middle.weight": Part()}, batch)
    standard_convolutions.run(step, general)
    return {name: len(calls(step, operator)) for name, operator in
            (("convolution", ATEN.convolution.default), ("bmm", ATEN.bmm.default), ("cat", ATEN.cat.default))}


def test_the_forms_are_what_they_are_called():
    assert weight_gradient_operators("pointwise", "swapped") == {"convolution": 2, "bmm": 1, "cat": 0}
    assert weight_gradient_operators("general", "swapped") == {"convolution": 3, "bmm": 0, "cat": 0}
    assert weight_gradient_operators("general", "columns") == {"convolution": 2, "bmm": 1, "cat": 1}
    assert weight_gradient_operators("general", "shifts") == {"convolution": 2, "bmm": 9, "cat": 1}
    assert weight_gradient_operators("depthwise", "swapped") == {"convolution": 2, "bmm": 0, "cat": 1}
    assert weight_gradient_operators("grouped", "swapped") == {"convolution": 2, "bmm": 1, "cat": 1}


@pytest.mark.parametrize("shape, flipped", [("depthwise", 1), ("depthwise dilated", 1), ("depthwise strided", 0), ("general", 0)])
def test_the_inputs_gradient_of_a_depthwise_convolution_is_a_convolution(shape, flipped):
    module, batch = network(Middle, *SHAPES[shape]), images(7)
    for flips in (True, False):
        step, _ = step_of(module, {"first.weight": Part()}, batch)
        standard_convolutions.run(step, flips_depthwise=flips)
        transposed = [node for node in calls(step, ATEN.convolution.default) if node.args[6]]
        assert len(transposed) == 1 - (flipped and flips)


def test_after_the_passes_of_a_sparse_step():
    chosen, module, batch = torch.tensor([0, 3, 5]), network(ConvolutionNetwork, 2), images(12)
    parts = {"expand.0.weight": Part(1, chosen), "depthwise.0.weight": Part(0, chosen), "general.weight": Part(1, chosen),
             "general.bias": Part()}
    step, tensors = step_of(module, parts, batch)
    before = run(step, module, tensors, batch)
    run_passes(step, tensors)
    standard_convolutions.run(step)
    same(run(step, module, tensors, batch), before)


def test_one_dimension():
    module = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 3, 2, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten()).double()
    batch = torch.randn(2, 3, 9, dtype=torch.float64), torch.tensor([0, 1])
    step, tensors = step_of(module, everything(module), batch)
    before = run(step, module, tensors, batch)
    standard_convolutions.run(step)
    same(run(step, module, tensors, batch), before)


def test_a_step_without_convolutions_is_left():
    step, _ = step_of(nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).double(), {"1.weight": Part()}, images(4))
    assert standard_convolutions.run(step) == 0


def test_an_unknown_form_is_named_with_the_known_ones():
    with pytest.raises(UserError, match="no form 'column' .* gradient; there are swapped, columns, shifts .did you mean 'columns'"):
        standard_convolutions.run(None, "column")
