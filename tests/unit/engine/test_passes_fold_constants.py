import pytest
import torch
from pass_examples import ATEN, ConvolutionNetwork, calls, images, network, run, same, step_of
from torch import nn

from piebridge.engine.capture import StepSettings
from piebridge.engine.passes import PASSES, fold_constants, run_passes
from piebridge.engine.step_graph import BUFFER, FROZEN, Part

pytestmark = pytest.mark.usefixtures("one_thread")
REST = [name for name in PASSES if name not in ("fold_constants", "dead_code")]


class Constants(nn.Module):
    """A masked product with a frozen matrix that is normalised first; the mask is made of numbers."""

    def __init__(self):
        super().__init__()
        self.matrix, self.trained = nn.Parameter(torch.randn(4, 4)), nn.Linear(3 * 4 * 4, 4)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, inputs):
        length = inputs.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        matrix = self.matrix / self.matrix.norm()
        features = torch.where(mask, inputs @ matrix.t() + inputs @ matrix, self.shift.exp())
        return self.trained(torch.tanh(features).flatten(1))


@pytest.fixture(scope="module")
def constants():
    module, batch = network(Constants), images(4)
    return (module, batch) + step_of(module, {"trained.weight": Part()}, batch)


def test_what_frozen_tensors_alone_decide_is_computed_once(constants):
    module, batch, step, tensors = constants
    step, tensors, before = step.copy(), dict(tensors), run(step, module, tensors, batch)
    assert calls(step, ATEN.exp.default) and calls(step, ATEN.div.Tensor)
    changes = run_passes(step, tensors, off=REST)
    assert changes["fold_constants"] == 3  # the matrix, the shift and the mask
    same(run(step, module, tensors, batch), before)
    folded = {name: tensor for (role, name), tensor in tensors.items() if name.startswith("folded/")}
    assert sorted(folded) == ["folded/0", "folded/1", "folded/2"]
    assert any(torch.equal(tensor, torch.ones(4, 4).tril().bool()) for tensor in folded.values())
    (matrix,) = [tensor for tensor in folded.values() if tensor.shape == (4, 4) and tensor.is_floating_point()]
    assert torch.allclose(matrix, module.matrix / module.matrix.norm())
    assert any(torch.equal(tensor, module.shift.exp()) for tensor in folded.values())


def test_inputs_that_nothing_reads_any_more_leave_step_and_tensors(constants):
    step, tensors = constants[2].copy(), dict(constants[3])
    run_passes(step, tensors, off=REST)
    assert (FROZEN, "matrix") not in tensors and (BUFFER, "shift") not in tensors and (FROZEN, "trained.bias") in tensors
    assert {(value.role, value.name) for _, value in step.inputs_of(FROZEN, BUFFER)} == set(tensors)
    assert (FROZEN, "matrix") in constants[3]
    assert [value.role for value in step.inputs if value.role not in (FROZEN, BUFFER)] == [
        value.role for value in constants[2].inputs if value.role not in (FROZEN, BUFFER)]


def test_views_stay_views_so_that_a_weight_is_held_once():
    """A frozen linear is read as it is and transposed."""
    module, batch = nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Tanh(), nn.Linear(5, 4)).double(), images(4)
    step, tensors = step_of(module, {"1.bias": Part()}, batch)
    before = run(step, module, tensors, batch)
    assert run_passes(step, tensors, off=REST)["fold_constants"] == 0
    assert tensors[FROZEN, "3.weight"].data_ptr() == module[3].weight.data_ptr()
    same(run(step, module, tensors, batch), before)


def test_a_buffer_that_changes_is_no_constant():
    module, batch = network(ConvolutionNetwork), images()
    step, tensors = step_of(module, {"head.weight": Part()}, batch, settings=StepSettings(is_training=True))
    before = run(step, module, tensors, batch)
    run_passes(step, tensors, off=REST)
    assert (BUFFER, "stem.1.running_mean") in tensors
    same(run(step, module, tensors, batch), before)


def test_equal_values_are_one_input():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.trained = nn.Parameter(torch.rand(1, 3, 4, 4)), nn.Linear(48, 4)

        def forward(self, inputs):
            return self.trained((inputs * self.frozen.sqrt()).flatten(1)) + self.trained((inputs + self.frozen.sqrt()).flatten(1))

    module, batch = network(Twice), images(4)
    step, tensors = step_of(module, {"trained.weight": Part()}, batch)
    before = run(step, module, tensors, batch)
    assert run_passes(step, tensors, off=REST)["fold_constants"] == 2
    assert [name for _, name in tensors if name.startswith("folded")] == ["folded/0"]
    same(run(step, module, tensors, batch), before)


def test_what_would_grow_too_large_is_computed_in_each_step(monkeypatch):
    class Grown(nn.Module):
        def __init__(self):
            super().__init__()
            self.row, self.trained = nn.Parameter(torch.rand(16)), nn.Linear(16, 4)

        def forward(self, inputs):
            table = self.row[:, None] * self.row.exp()
            return self.trained(inputs[:, 0, 0, :1] @ table[:1]) + self.trained(table.sum(0))

    monkeypatch.setattr(fold_constants, "LARGEST_GROWTH", 128)
    module, batch = network(Grown), images(4)
    step, tensors = step_of(module, {"trained.weight": Part()}, batch)
    before = run(step, module, tensors, batch)
    assert run_passes(step, tensors, off=REST)["fold_constants"] == 1  # the exponentials
    same(run(step, module, tensors, batch), before)


def test_without_tensors_nothing_is_constant(constants):
    step = constants[2].copy()
    assert fold_constants.run(step, {}) == 1  # but for the mask, which is made of numbers


def test_off(constants):
    step, tensors = constants[2].copy(), dict(constants[3])
    assert "fold_constants" not in run_passes(step, tensors, off=["fold_constants"])
    assert calls(step, ATEN.exp.default) and not [name for _, name in tensors if name.startswith("folded")]
