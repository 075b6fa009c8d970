"""Each memory pass: the same values in float64, a plan that still tells the measured peak, and what the pass is for."""

import itertools
import math

import pytest
import torch
from memory_examples import CLASSES, NETWORKS, captured, measured_peak, results_of, tensors_for
from torch import nn

from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.lifetime import Lifetimes, forward_nodes, peak_bytes
from piebridge.engine.losses import cross_entropy
from piebridge.engine.memory_plan import plan_memory
from piebridge.engine.passes import activation_masks, common_subexpressions, early_update, order, recompute, shape_only
from piebridge.engine.passes.packed_masks import pack, unpack
from piebridge.engine.propagate import propagate
from piebridge.engine.step_graph import Part, Value
from piebridge.engine.update_rules import SGD, AdamW

PASSES = {"shape_only": shape_only, "activation_masks": activation_masks, "early_update": early_update, "recompute": recompute,
          "order": order}
CASES = [(network, scheme, False) for network in NETWORKS for scheme in ("full", "bias")]
CASES += [("mobilenet", "sparse", False), ("mobilenet", "full", True), ("hard_swish", "full", True), ("encoder", "full", True)]


def finished(step):
    return propagate(step).finish()


def equal_values(step, tensors, expected, note):
    for key, value in results_of(step, tensors).items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-10, msg=f"{note}: {key}")


@pytest.mark.parametrize("network, scheme, is_training", CASES)
def test_passes_keep_every_value_and_lower_the_peak(network, scheme, is_training):
    _, step, tensors = captured(network, scheme, is_training, torch.float64)
    expected, first = results_of(step, tensors), peak_bytes(step)
    peak = first
    for name, each in PASSES.items():
        each.run(step)
        assert peak_bytes(step) == peak_bytes(finished(step)), f"{name}: values without propagation"
        equal_values(step, tensors, expected, name)
        if name in ("recompute", "order"):
            assert peak_bytes(step) <= peak, name
        peak = peak_bytes(step)
    assert peak <= first
    assert plan_memory(step).peak_bytes == measured_peak(step, tensors)[0]


@pytest.mark.parametrize("name", PASSES)
def test_a_second_run_finds_nothing(name):
    _, step, _ = captured("residual", "full")
    PASSES[name].run(step)
    assert PASSES[name].run(finished(step)) == 0


def step_of(module, shape, trained=None, is_training=False):
    """(StepGraph, its tensors, float64) of a module of one's own; images [4, 3, 6, 6] unless `shape` says otherwise."""
    module = module.double()
    inputs, targets = torch.randn(shape, dtype=torch.float64), torch.randint(CLASSES, shape[:1])
    keys = trained or [key for key, _ in module.named_parameters()]
    step = capture(module, cross_entropy, SGD(), {key: Part() for key in keys}, (inputs, targets), StepSettings(is_training=is_training))
    return step, tensors_for(module, step, inputs, targets)


def kept_of(step, dtype=None):
    return [value for value in plan_memory(step).kept if dtype in (None, value.dtype)]


class Activated(nn.Module):
    """Convolutions around an activation. Only their biases need be trained for the activation's derivative to be needed."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.activation, self.second = nn.Conv2d(3, 8, 1), activation, nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        return self.second(self.activation(self.first(x))).sum((2, 3))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardsigmoid()])
def test_activation_that_nothing_else_needs_is_kept_at_one_bit(activation):
    torch.manual_seed(0)
    step, tensors = step_of(Activated(activation), (4, 3, 5, 5), ["first.bias", "second.bias"])
    expected = results_of(step, tensors)
    shape_only.run(step)
    elements = 4 * 8 * 5 * 5
    assert max(value.bytes for value in kept_of(step)) == 8 * elements
    assert activation_masks.run(step) == 1
    equal_values(finished(step), tensors, expected, activation)
    assert [value.bytes for value in kept_of(step, "uint8")] == [elements // 8]
    assert max((value.bytes for value in kept_of(step, "float64")), default=0) < elements


def test_output_that_the_next_layer_keeps_is_compared_and_the_input_goes():
    step, tensors = step_of(Activated(nn.ReLU6()), (4, 3, 5, 5))
    expected, elements = results_of(step, tensors), 4 * 8 * 5 * 5
    assert sum(value.bytes == 8 * elements for value in kept_of(step)) == 2
    assert activation_masks.run(step) == 1
    equal_values(finished(step), tensors, expected, "output compared")
    assert sum(value.bytes == 8 * elements for value in kept_of(step)) == 1 and not kept_of(step, "uint8")


@pytest.mark.parametrize("bias", [0.0, 6.0, math.nan])
def test_comparisons_agree_at_the_bounds_and_for_nan(bias):
    """All pre-activations are exactly a bound, where the derivative is 0, or no number."""
    for trained in (["first.bias", "second.bias"], None):
        module = Activated(nn.ReLU6())
        nn.init.zeros_(module.first.weight)
        nn.init.constant_(module.first.bias, bias)
        step, tensors = step_of(module, (4, 3, 5, 5), trained)
        expected = results_of(step, tensors)
        assert activation_masks.run(step)
        for key, value in results_of(finished(step), tensors).items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0, equal_nan=True)


def test_hard_swish_keeps_its_input_and_its_output_is_made_again():
    module = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Conv2d(3, 3, 1), nn.Hardswish())], Activated(nn.Hardswish()))
    step, tensors = step_of(module, (4, 3, 16, 16))
    expected, whole = results_of(step, tensors), 8 * 4 * 3 * 16 * 16
    assert activation_masks.run(step) == 0
    assert sum(value.bytes == whole for value in kept_of(step)) == 8
    assert recompute.run(step) > 0
    assert sum(value.bytes == whole for value in kept_of(finished(step))) == 4
    equal_values(step, tensors, expected, "hard-swish")


@pytest.mark.parametrize("is_training", [False, True])
def test_of_a_trained_batch_norm_only_the_input_is_kept(is_training):
    """As captured, its input less the mean and the activation behind it are kept: both come from the input, which is then dead."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU6())]
    step, tensors = step_of(nn.Sequential(*layers, Activated(nn.ReLU6())), (4, 3, 16, 16), is_training=is_training)
    expected, whole = results_of(step, tensors), 8 * 4 * 3 * 16 * 16
    activation_masks.run(step)
    common_subexpressions.run(step)
    early_update.run(step)
    assert sum(value.bytes == whole for value in kept_of(finished(step))) == 8
    assert recompute.run(step) > 0
    assert sum(value.bytes == whole for value in kept_of(finished(step))) <= 5  # the first that is computed again may keep both
    equal_values(step, tensors, expected, "batch norm")


def test_dropout_is_kept_at_one_bit():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 25, CLASSES))
    step, tensors = step_of(module, (4, 3, 5, 5), ["0.bias", "3.bias"], is_training=True)
    expected = results_of(step, tensors)
    assert activation_masks.run(step) == 1
    equal_values(finished(step), tensors, expected, "dropout")
    assert [value.bytes for value in kept_of(step) if value.bytes > 64] == [4 * 8 * 25 // 8]


@pytest.mark.parametrize("pool, size", [((2, 2, 0), 6), ((3, 2, 1), 7), ((3, 1, 1), 5), ((2, None, 0), 5), (((3, 2), (2, 1), (1, 0)), 6)])
def test_indices_of_max_pooling_are_kept_as_bytes(pool, size):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.MaxPool2d(*pool), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    step, tensors = step_of(module, (4, 3, size, size))
    expected = results_of(step, tensors)
    wide, = kept_of(step, "int64")
    assert activation_masks.run(step) == 1
    equal_values(finished(step), tensors, expected, "pooling")
    small, = kept_of(step, "int8")
    assert 8 * small.bytes == wide.bytes


def test_what_is_read_for_its_shape_is_not_kept():
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AvgPool2d(2), nn.Conv2d(8, 8, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, CLASSES))
    step, tensors = step_of(module, (4, 3, 4, 4), [f"{layer}.bias" for layer in (0, 2, 5)])
    expected = results_of(step, tensors)
    assert shape_only.run(step) >= 3
    equal_values(finished(step), tensors, expected, "shapes")
    assert {value.dtype for value in kept_of(step) if value.bytes > 4 * 8 * CLASSES} == {"int64"}  # the indices of max pooling


@pytest.mark.parametrize("shape", [(16,), (3, 5), (1,), (2, 4, 8)])
def test_packed_masks_come_back(shape):
    _, step, _ = captured("residual", "bias")
    step = step.copy()
    mask = torch.rand(shape) > 0.5
    first = next(node for node in step.graph.nodes if node.op == "call_function")
    like = first.meta["val"].new_empty(shape, dtype=torch.bool)
    node = step.add_input(Value("batch", "mask", shape, torch.bool), like)
    with step.graph.inserting_before(first):
        bits = pack(step, node)
        again = unpack(step, bits, shape)
    assert bits.meta["val"].numel() == math.ceil(mask.numel() / 8)
    values = {node: mask}
    for each in step.graph.nodes:
        if each.op == "get_attr":
            values[each] = getattr(step.graph_module, each.target)
        elif each.op == "call_function" and set(each.all_input_nodes) <= set(values):
            arguments, keywords = torch.fx.map_arg((each.args, each.kwargs), values.__getitem__)
            values[each] = each.target(*arguments, **keywords)
    assert torch.equal(values[again], mask)


def readers_after_new_values(step):
    lifetimes = Lifetimes(step)
    return [node.name for node, readers in lifetimes.writes.items() if max(readers, default=-1) > lifetimes.number[node]]


@pytest.mark.parametrize("network", ["mobilenet", "encoder"])
def test_updates_come_early_and_after_every_reader_of_the_old_value(network):
    _, step, _ = captured(network, "full", rule=AdamW())
    forward = forward_nodes(step)
    late = [number for node, number in Lifetimes(step).number.items() if node in forward][-1]
    before = peak_bytes(step)
    early_update.run(step)
    lifetimes = Lifetimes(step)
    assert not readers_after_new_values(step)
    results = [lifetimes.number[node] for node, value in zip(step.results, step.outputs) if value.role == "trained"]
    assert min(results) - late < (max(results) - late) / 4  # they are spread over the backward pass
    assert peak_bytes(step) <= before


def test_updates_stay_behind_the_norm_of_all_gradients():
    torch.manual_seed(0)
    module, inputs, targets = Activated(nn.ReLU()), torch.randn(4, 3, 5, 5), torch.randint(CLASSES, (4,))
    parts = {key: Part() for key, _ in module.named_parameters()}
    step = capture(module, cross_entropy, SGD(0.9), parts, (inputs, targets), StepSettings(clip=0.01))
    tensors = tensors_for(module, step, inputs, targets)
    expected = results_of(step, tensors)
    early_update.run(step)
    order.run(step)
    equal_values(finished(step), tensors, expected, "clipped")


def test_order_repairs_a_schedule_that_reads_old_values_too_late():
    _, step, tensors = captured("encoder", "full")
    nodes = Lifetimes(step).nodes
    expected = results_of(step, tensors)
    early_update.run(step)
    first = next(node for node, value in zip(step.results, step.outputs) if value.role == "trained")
    key = next(value.name for node, value in zip(step.results, step.outputs) if node is first)
    with step.graph.inserting_before(next(iter(reversed(step.graph.nodes)))):
        late = step.graph.call_function(torch.ops.aten.clone.default, (step.node_of("trained", key),))
    late.meta["val"] = step.node_of("trained", key).meta["val"].clone()
    assert readers_after_new_values(step) and len(Lifetimes(step).nodes) == len(nodes) + 1
    order.run(step)
    assert not readers_after_new_values(step)
    equal_values(finished(step), tensors, expected, "repaired")


def test_order_finds_the_best_of_all_orders_of_a_small_graph():
    torch.manual_seed(0)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, CLASSES, bias=False)

        def forward(self, x):
            wide, wider = x.repeat(1, 8), x.repeat(1, 16)
            return self.head(wide.view(4, -1, 4).sum(1) + wider.view(4, -1, 4).sum(1))

    step, tensors = step_of(Branches(), (4, 4))
    lifetimes = Lifetimes(step)
    head = [number for number, node in enumerate(lifetimes.nodes) if node in forward_nodes(step)][:7]
    rest = [number for number in range(len(lifetimes.nodes)) if number not in head]
    needs = order.Schedule(step, lifetimes).needs
    peaks = []
    for choice in itertools.permutations(head):
        place = {number: position for position, number in enumerate(choice)}
        if all(place[need] < place[number] for number in head for need in needs[number] & set(head)):
            peaks.append(lifetimes.peak(list(choice) + rest)[0])
    order.run(step)
    assert peak_bytes(step) <= min(peaks)


def test_reorder_refuses_what_is_no_order():
    _, step, _ = captured("residual", "bias")
    nodes = Lifetimes(step).nodes
    with pytest.raises(ValueError, match="each node once"):
        order.reorder(step, nodes[1:])
