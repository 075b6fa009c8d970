import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_examples import NETWORKS, SCHEMES, captured, measured_peak, results_of

from piebridge.core.errors import UserError
from piebridge.engine import memory_picture
from piebridge.engine.arena import plan_arena
from piebridge.engine.byte_counter import ByteCounter
from piebridge.engine.lifetime import Lifetimes, frees
from piebridge.engine.memory_plan import plan_memory
from piebridge.engine.propagate import propagate
from piebridge.engine.step_graph import BATCH, LOSSES, OUTPUTS, TRAINED, StepGraph, Value
from piebridge.engine.update_rules import AdamW


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("network", NETWORKS)
def test_planned_peak_is_the_measured_one(network, scheme):
    _, step, tensors = captured(network, scheme)
    planned = plan_memory(step)
    expected = results_of(step, tensors)
    measured, results = measured_peak(step, tensors)
    assert planned.peak_bytes == measured
    assert torch.equal(results[LOSSES, "losses"], expected[LOSSES, "losses"])


@pytest.mark.parametrize("network", ["mobilenet", "residual", "hard_swish", "encoder"])
def test_planned_peak_is_the_measured_one_in_train_mode(network):
    _, step, tensors = captured(network, is_training=True, rule=AdamW())
    assert plan_memory(step).peak_bytes == measured_peak(step, tensors)[0]


def test_values_written_in_place_are_those_of_the_whole_graph():
    _, step, tensors = captured("residual", "sparse")
    expected = results_of(step, tensors)
    _, results = measured_peak(step, tensors)
    for (role, name), new in expected.items():
        written = results[role, name]
        assert torch.equal(step.parts[name].of(written) if role == TRAINED else written, new), name


def test_plan_says_where_memory_goes():
    module, step, _ = captured("mobilenet", "full", rule=AdamW())
    plan = plan_memory(step)
    parameters = sum(4 * parameter.numel() for parameter in module.parameters())
    assert plan.weights_bytes["trained"] == parameters and plan.weights_bytes["frozen"] == 0
    assert plan.state_bytes == 2 * parameters
    assert plan.batch_bytes == 4 * 4 * 3 * 16 * 16 + 4 * 8 + 4 * 4  # images, targets, weights
    assert plan.timeline[plan.peak_position] == (plan.peak_node, plan.peak_bytes)
    assert plan.total_bytes == plan.peak_bytes + sum(plan.weights_bytes.values()) + plan.state_bytes + plan.batch_bytes
    assert sum(plan.kept_by_layer().values()) == plan.kept_bytes
    assert plan.kept_bytes < plan.peak_bytes
    assert plan.arena.bound <= plan.arena_bytes


def test_kept_values_bear_the_layers_that_read_them():
    module, step, _ = captured("residual", "full")
    layers = {key.rpartition(".")[0] for key, _ in module.named_parameters()}
    kept = plan_memory(step).kept
    assert {value.layer for value in kept if value.bytes > 64} <= layers
    convolution_input = 4 * 4 * 8 * 8 * 8  # float32 of 4 samples, 8 channels, 8 x 8 pixels
    assert plan_memory(step).kept_by_layer()["blocks.0.0"] >= convolution_input


def test_frozen_prefix_keeps_nothing():
    _, step, _ = captured("mobilenet", "sparse")
    kept = plan_memory(step).kept
    depths = [int(value.layer.split(".")[1]) for value in kept if value.layer.startswith("features") and value.bytes > 64]
    trained = [int(key.split(".")[1]) for key in step.parts if key.startswith("features")]
    assert min(depths) >= min(trained) - 1  # the layer before gives the activation that the first trained one reads
    assert sum(value.bytes for value in kept) < plan_memory(captured("mobilenet", "full")[1]).kept_bytes


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_arena_never_overlaps_what_lives_together(values):
    sizes, spans = [size for size, _, _ in values], [(first, first + length) for _, first, length in values]
    arena = plan_arena(sizes, spans)
    assert arena.bytes >= arena.bound
    for one in range(len(values)):
        assert arena.offsets[one] % 64 == 0 and arena.offsets[one] + sizes[one] <= arena.bytes
        for other in range(one):
            together = spans[one][0] <= spans[other][1] and spans[other][0] <= spans[one][1]
            apart = arena.offsets[one] >= arena.offsets[other] + sizes[other] or arena.offsets[other] >= arena.offsets[one] + sizes[one]
            assert apart or not together


def test_arena_of_values_one_after_the_other_holds_the_larger():
    arena = plan_arena([64, 128, 64], [(0, 1), (2, 3), (4, 4)])
    assert (arena.offsets, arena.bytes, arena.bound) == ((0, 0, 0), 128, 128)
    assert plan_arena([], []).bytes == 0


@pytest.mark.parametrize("network", ["mobilenet", "vit"])
def test_arena_is_close_to_its_lower_bound(network):
    plan = plan_memory(captured(network, "full")[1])
    assert plan.arena_bytes <= 1.1 * plan.arena.bound


def test_views_cost_nothing_and_a_value_lives_until_its_last_reader():
    _, step, _ = captured("vit", "full")
    lifetimes = Lifetimes(step)
    spans = lifetimes.spans()
    for storage, (first, last) in zip(lifetimes.storages, spans):
        for holder in storage.holders:
            for user in holder.users:
                if user in lifetimes.number:
                    assert first <= lifetimes.number[user] <= last
    assert any(len(storage.holders) > 1 for storage in lifetimes.storages)


def test_counter_counts_what_is_created_until_it_is_freed():
    before = torch.ones(100)
    with ByteCounter() as counter:
        doubled = before * 2
        view = doubled.view(10, 10)
        assert counter.live == 400
        del doubled
        assert counter.live == 400  # the view holds it
        tripled = before * 3
        assert counter.live == 800
        del view
        before.add_(1)
        assert counter.live == 400
        del tripled
    assert (counter.live, counter.peak) == (0, 800)


def test_counter_sees_what_autograd_keeps():
    weight = torch.ones(10, 10, requires_grad=True)
    with ByteCounter() as counter:
        loss = (torch.ones(10, 10) @ weight).exp().sum()
        held = counter.live
        loss.backward()
    assert held == 400 + 400 + 4  # the left operand, the result of exp, the sum


def test_elementwise_results_take_the_memory_of_arguments_that_die():
    module, step, tensors = captured("residual", "full")
    planned = frees(step)
    old = {node: value for node, value in zip(step.placeholders, step.inputs)}
    assert any(old[each].role == TRAINED for each in planned.into.values() if each in old)
    assert any(each not in old for each in planned.into.values())
    last = {each: node for node, nodes in planned.after.items() for each in nodes}
    for node, overwritten in planned.into.items():
        assert overwritten in old or last[overwritten] is node
        assert overwritten.meta["val"].shape == node.meta["val"].shape
    expected = results_of(step, tensors)
    for key, value in measured_peak(step, tensors)[1].items():
        assert torch.equal(value, expected[key]), key


def test_nothing_is_overwritten_that_is_read_otherwise_or_later():
    """y = x * x.t() reads elements of x after others of y are written; z = x * 2 is read again; an expanded value has no memory."""
    graph = torch.fx.Graph()
    aten = torch.ops.aten
    inputs = graph.placeholder("x")
    own = graph.call_function(aten.mul.Tensor, (inputs, 2))
    turned = graph.call_function(aten.t.default, (own,))
    product = graph.call_function(aten.mul.Tensor, (own, turned))
    again = graph.call_function(aten.add.Tensor, (product, 1))
    both = graph.call_function(aten.mul.Tensor, (product, again))
    row = graph.call_function(aten.sum.dim_IntList, (both, [0], True))
    wide = graph.call_function(aten.expand.default, (row, [4, 4]))
    final = graph.call_function(aten.add.Tensor, (wide, 1))
    graph.output((final,))
    values = [Value(BATCH, "inputs", (4, 4), torch.float32)], [Value(OUTPUTS, "outputs", (4, 4), torch.float32)]
    step = propagate(StepGraph(torch.fx.GraphModule(torch.nn.Module(), graph), *values, {}))
    assert frees(step).into == {both: product}
    assert plan_memory(step).peak_bytes == 2 * 64  # own and product; product, again; both and final need no more


def test_picture_and_table_say_what_the_plan_says(tmp_path):
    plan = plan_memory(captured("mobilenet", "full")[1])
    text = memory_picture.table(plan, rows=3)
    assert f"{plan.peak_bytes / 2 ** 20:.2f} MiB  at {plan.peak_node}" in text
    assert f"{len(plan.kept_by_layer()) - 3} more" in text
    assert set(plan.kept_by_layer()) <= set(memory_picture.table(plan, rows=100).split())
    bars = memory_picture.bars(plan, columns=40, rows=6).splitlines()
    assert len(bars) == 8 and max(map(len, bars[:6])) <= 50 and "#" in bars[0] and "^" in bars[6]
    pytest.importorskip("matplotlib", reason="the PNG needs matplotlib")
    memory_picture.write_png(plan, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_picture_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib; the table and the bars do without"):
        memory_picture.write_png(None, tmp_path / "memory.png")
