"""Simplification, common subexpressions, dead code, and what attention's traces have too much."""

import pytest
import torch
from pass_examples import ATEN, ConvolutionNetwork, Encoder, calls, images, network, run, same, step_of
from torch import nn

from piebridge.engine.passes import PASSES, run_passes
from piebridge.engine.step_graph import BATCH, FROZEN, TRAINED, Part

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor([1, 2])


def only(*names):
    return [name for name in PASSES if name not in names]


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 4)

    def forward(self, inputs):
        features = (inputs.clone() * 1 + 0).div(1.0).view(-1, 3, 16).view(-1, 48).unsqueeze(0).squeeze(0)
        features = features.permute(1, 0).permute(1, 0)
        return self.layer(features.expand(features.shape)) + torch.zeros_like(self.layer(features))


def test_what_does_nothing_is_gone():
    module, batch = network(Idle), images(4)
    step, tensors = step_of(module, {"layer.weight": Part(), "layer.bias": Part()}, batch)
    before, nodes = run(step, module, tensors, batch), len(step.graph.nodes)
    assert run_passes(step, tensors, off=only("simplify"))["simplify"] > 8
    same(run(step, module, tensors, batch), before)
    assert len(step.graph.nodes) < nodes - 8
    assert not calls(step, ATEN.clone.default, ATEN.full_like.default)
    assert not [node for node in calls(step, ATEN.unsqueeze.default) if 48 in node.meta["val"].shape]
    (view,) = step.node_of(BATCH, "inputs").users
    assert view.target is ATEN.view.default and list(view.args[1]) == [2, 48]


def test_a_copy_into_another_layout_or_type_stays():
    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(48, 4)

        def forward(self, inputs):
            return self.layer(inputs.permute(0, 2, 3, 1).contiguous().view(-1, 48).float().double())

    module, batch = network(Copies), images(4)
    step, tensors = step_of(module, {"layer.weight": Part()}, batch)
    before = run(step, module, tensors, batch)
    run_passes(step, tensors, off=only("simplify"))
    assert len(calls(step, ATEN._to_copy.default)) == 2 and len(calls(step, ATEN.clone.default)) == 1
    same(run(step, module, tensors, batch), before)


def test_simplify_off():
    module, batch = network(Idle), images(4)
    step, tensors = step_of(module, {"layer.weight": Part()}, batch)
    assert "simplify" not in run_passes(step, tensors, off=["simplify"])
    assert [node for node in calls(step, ATEN.mul.Tensor) if node.args[1:] == (1,)]


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 4)

    def forward(self, inputs):
        once, again = [self.layer(torch.tanh(inputs).flatten(1)) for _ in range(2)]
        return once * again + torch.clamp(once, 0, 1) * torch.clamp(again, 0.0, 1.0)


def test_the_same_is_computed_once():
    module, batch = network(Repeated), images(4)
    step, tensors = step_of(module, {"layer.weight": Part()}, batch)
    before, forward = run(step, module, tensors, batch), len(calls(step, ATEN.addmm.default))
    assert len(calls(step, ATEN.tanh.default)) == 2 and forward == 2
    run_passes(step, tensors, off=only("common_subexpressions"))
    assert len(calls(step, ATEN.tanh.default)) == 1 and len(calls(step, ATEN.addmm.default)) == 1
    assert len(calls(step, ATEN.clamp.default)) == 2  # 0 and 0.0 may differ in type
    same(run(step, module, tensors, batch), before)


def test_the_repeated_is_left_when_off():
    step, tensors = step_of(network(Repeated), {"layer.weight": Part()}, images(4))
    run_passes(step, tensors, off=["common_subexpressions"])
    assert len(calls(step, ATEN.tanh.default)) == 2


def test_no_copy_of_a_trained_weight_is_kept_from_forward_to_backward():
    module, batch = network(ConvolutionNetwork), images()
    step, tensors = step_of(module, {"project.0.weight": Part(), "expand.0.weight": Part()}, batch)
    run_passes(step, tensors)
    scaled = [node for node in step.node_of(TRAINED, "project.0.weight").users if node.target is ATEN.mul.Tensor
              and tuple(node.meta["val"].shape) == (6, 12, 1, 1) and any(user.target is ATEN.convolution.default for user in node.users)]
    assert len(scaled) == 2 and all(len(node.users) == 1 for node in scaled)


def test_dead_code_takes_nodes_and_frozen_inputs():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(48, 4), nn.Linear(48, 4)

        def forward(self, inputs):
            self.other(inputs.flatten(1))
            return self.layer(inputs.flatten(1))

    module, batch = network(Unused), images(4)
    step, tensors = step_of(module, {"layer.weight": Part()}, batch)
    before = run(step, module, tensors, batch)
    with step.graph.inserting_before(step.results[0]):
        step.graph.call_function(ATEN.mm.default, (step.node_of(TRAINED), step.node_of(TRAINED)))
    count = run_passes(step.finish(), tensors, off=only("dead_code"))["dead_code"]
    assert count >= 3 and set(tensors) == {(FROZEN, "layer.bias")}
    assert [value.role for value in step.inputs] == [TRAINED, FROZEN, BATCH, BATCH, "weights", "rate", "count"]
    same(run(step, module, tensors, batch), before)


def test_dead_code_off_keeps_unread_inputs():
    step, tensors = step_of(network(ConvolutionNetwork), {"head.weight": Part()}, images())
    run_passes(step, tensors, off=["dead_code"])
    assert ("buffer", "stem.1.num_batches_tracked") in tensors


def test_attention_without_a_mask_needs_no_guard():
    module = network(Encoder)
    step, tensors = step_of(module, {"layer.linear1.weight": Part(), "layer.self_attn.in_proj_weight": Part()}, TOKENS)
    before = run(step, module, tensors, TOKENS)
    assert calls(step, ATEN.any.dim)
    assert run_passes(step, tensors, off=only("plain_softmax"))["plain_softmax"] == 1
    assert not calls(step, ATEN.any.dim, ATEN.logical_not.default)
    assert all(node.args[1] != -torch.inf for node in calls(step, ATEN.eq.Scalar))
    same(run(step, module, tensors, TOKENS), before)


class Masked(nn.Module):
    """Attention of the inputs to themselves; a mask that leaves something in each row, or nothing in the first."""

    def __init__(self, leaves):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril(0 if leaves else -1))

    def forward(self, inputs):
        queries = self.layer(inputs)[:, None]
        return self.head(nn.functional.scaled_dot_product_attention(queries, queries, queries, attn_mask=self.mask)[:, 0].mean(1))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_constant_mask_is_looked_at(leaves):
    module = network(Masked, leaves)
    step, tensors = step_of(module, {"layer.weight": Part()}, TOKENS)
    before = run(step, module, tensors, TOKENS)
    assert calls(step, ATEN.any.dim)
    changes = run_passes(step, tensors)
    assert bool(changes["plain_softmax"]) == leaves
    same(run(step, module, tensors, TOKENS), before)


def test_the_guard_stays_when_off():
    step, tensors = step_of(network(Encoder), {"layer.linear1.weight": Part()}, TOKENS)
    run_passes(step, tensors, off=["plain_softmax"])
    assert calls(step, ATEN.any.dim)


def test_gradients_of_queries_keys_and_values_are_joined():
    module = network(Encoder)
    step, tensors = step_of(module, {"layer.self_attn.in_proj_weight": Part()}, TOKENS)
    before = run(step, module, tensors, TOKENS)
    wide = [node for node in calls(step, ATEN.where.self) if tuple(node.meta["val"].shape) == (3, 5, 2, 8)]
    assert len(wide) == 3
    assert run_passes(step, tensors, off=only("simplify", "join_selected"))["join_selected"] == 1
    assert not [node for node in calls(step, ATEN.where.self) if tuple(node.meta["val"].shape) == (3, 5, 2, 8)]
    (joined,) = calls(step, ATEN.cat.default)
    assert [tuple(part.meta["val"].shape) for part in joined.args[0]] == [(1, 5, 2, 8)] * 3
    same(run(step, module, tensors, TOKENS), before)


class Selected(nn.Module):
    """Two of three parts are used, or one of them twice."""

    def __init__(self, first, second):
        super().__init__()
        self.places, self.layer, self.head = (first, second), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, inputs):
        parts = self.layer(inputs).unflatten(-1, (3, 8))
        return self.head(torch.tanh(sum(parts[..., place, :] * (place + 2) for place in self.places)).mean(1))


@pytest.mark.parametrize("places", [(0, 2), (1, 1)])
def test_what_does_not_cover_the_tensor_is_left(places):
    module = network(Selected, *places)
    step, tensors = step_of(module, {"layer.weight": Part()}, TOKENS)
    before = run(step, module, tensors, TOKENS)
    assert run_passes(step, tensors)["join_selected"] == 0
    same(run(step, module, tensors, TOKENS), before)


def test_join_selected_off():
    step, tensors = step_of(network(Encoder), {"layer.self_attn.in_proj_weight": Part()}, TOKENS)
    run_passes(step, tensors, off=["join_selected"])
    assert not calls(step, ATEN.cat.default)
