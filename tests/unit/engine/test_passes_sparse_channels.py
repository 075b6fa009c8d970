import pytest
import torch
from pass_examples import ATEN, ConvolutionNetwork, Encoder, calls, images, network, run, same, step_of
from torch import nn

from piebridge.engine.passes import PASSES, run_passes
from piebridge.engine.step_graph import BATCH, INDEX, Part
from piebridge.engine.update_rules import AdamW

pytestmark = pytest.mark.usefixtures("one_thread")
CHOSEN = torch.tensor([0, 3, 5])
REST = [name for name in PASSES if name not in ("split_convolution_backward", "sparse_channels", "dead_code")]
TOKENS = torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor([1, 2])


def selected(step, key):
    """What is selected by the chosen channels of `key`."""
    return [node.args[0] for node in step.node_of(INDEX, key).users if node.target is ATEN.index_select.default]


def check(module, parts, batch, off=REST, rule=None):
    step, tensors = step_of(module, parts, batch, rule)
    before = run(step, module, tensors, batch)
    changes = run_passes(step, tensors, off=off)
    same(run(step, module, tensors, batch), before)
    return step, changes["sparse_channels"]


def in_backward(step, node):
    """Is it computed from the loss?"""
    seen, todo = set(), [node]
    while todo:
        each = todo.pop()
        if each not in seen:
            seen.add(each)
            todo += each.all_input_nodes
    return step.results[0] in seen or any(each.target in (ATEN._log_softmax.default,) for each in seen)


@pytest.mark.parametrize("key, whole, part", [("expand.0", (2, 6, 4, 4), (12, 3, 1, 1)), ("project.0", (2, 12, 4, 4), (6, 3, 1, 1)),
                                              ("general", (2, 6, 4, 4), (8, 3, 3, 3))])
def test_input_channels_of_a_convolution_select_its_activation_in_the_forward(key, whole, part):
    step, changed = check(network(ConvolutionNetwork), {f"{key}.weight": Part(1, CHOSEN)}, images())
    assert changed == 1
    (activation,) = [node for node in selected(step, f"{key}.weight") if node.op != "placeholder"]
    assert tuple(activation.meta["val"].shape) == whole and not in_backward(step, activation)
    (product,) = calls(step, ATEN.convolution_backward.default)
    assert product.args[1].target is ATEN.index_select.default and tuple(product.meta["val"][1].shape) == part
    order = list(step.graph.nodes)
    assert order.index(product.args[1]) < order.index(next(node for node in order if node.target is ATEN._log_softmax.default))


def test_the_whole_activation_is_not_read_by_the_backward():
    """Of a convolution behind a hard-swish, whose own backward reads what comes before it: only the part is kept of its output."""
    step, _ = check(network(ConvolutionNetwork), {"project.0.weight": Part(1, CHOSEN)}, images())
    (activation,) = [node for node in selected(step, "project.0.weight") if node.op != "placeholder"]
    assert activation.target is ATEN.relu.default
    assert not [user for user in activation.users if in_backward(step, user)]


@pytest.mark.parametrize("key", ["expand.0", "project.0", "general"])
def test_output_channels_of_a_convolution_select_the_gradient(key):
    step, changed = check(network(ConvolutionNetwork), {f"{key}.weight": Part(0, CHOSEN)}, images())
    assert changed == 1
    (gradient,) = [node for node in selected(step, f"{key}.weight") if node.op != "placeholder"]
    assert in_backward(step, gradient) and len(gradient.meta["val"].shape) == 4
    (product,) = calls(step, ATEN.convolution_backward.default)
    assert product.meta["val"][1].shape[0] == 3


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_channels_select_both(stride):
    step, changed = check(network(ConvolutionNetwork, stride), {"depthwise.0.weight": Part(0, CHOSEN)}, images())
    assert changed == 1
    assert len([node for node in selected(step, "depthwise.0.weight") if node.op != "placeholder"]) == 2
    (product,) = calls(step, ATEN.convolution_backward.default)
    assert product.args[9] == 3 and tuple(product.meta["val"][1].shape) == (3, 1, 3, 3)


def test_groups_that_cannot_be_taken_apart_are_selected_afterwards():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.wide = nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(6, 6, 3, groups=2)

        def forward(self, inputs):
            return self.wide(torch.tanh(self.layer(inputs))).mean((2, 3))

    parts = {"layer.weight": Part(0, torch.tensor([1, 4])), "wide.weight": Part(1, torch.tensor([0, 2]))}
    step, changed = check(network(Grouped), parts, images())
    assert changed == 0 and len(calls(step, ATEN.convolution_backward.default)) == 2


@pytest.mark.parametrize("key", ["linear1", "linear2"])
def test_input_features_of_a_linear_select_its_activation(key):
    step, changed = check(network(Encoder), {f"layer.{key}.weight": Part(1, CHOSEN)}, TOKENS)
    assert changed == 1
    (activation,) = [node for node in selected(step, f"layer.{key}.weight") if node.op != "placeholder"]
    assert not in_backward(step, activation)


def test_output_features_of_a_linear_select_the_gradients_columns():
    """Heads of attention: rows of the packed weight of queries, keys and values."""
    rows = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23])  # the second of two heads
    parts = {"layer.self_attn.in_proj_weight": Part(0, rows), "layer.self_attn.in_proj_bias": Part(0, rows)}
    step, changed = check(network(Encoder), parts, TOKENS)
    assert changed == 1
    products = [node for node in calls(step, ATEN.mm.default) if tuple(node.meta["val"].shape) == (12, 8)]
    assert len(products) == 1


def test_a_linear_on_the_batch_itself_selects_the_inputs():
    module = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).double()
    step, changed = check(module, {"1.weight": Part(1, CHOSEN)}, images(4))
    assert changed == 1
    node = step.node_of(BATCH, "inputs")
    assert all(not in_backward(step, user) for user in node.users)


def test_both_readers_of_a_tied_weight_are_selected():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8) / 3)

        def forward(self, inputs):
            return torch.tanh(inputs @ self.weight.t()).mean(1) @ self.weight

    step, changed = check(network(Tied), {"weight": Part(1, CHOSEN)}, TOKENS)
    assert changed == 1
    assert len([node for node in calls(step, ATEN.mm.default) if 3 in node.meta["val"].shape]) == 2


def test_with_a_folded_norm_and_moments():
    parts = {"project.0.weight": Part(1, CHOSEN), "depthwise.0.weight": Part(0, CHOSEN), "expand.0.weight": Part(0, CHOSEN)}
    step, changed = check(network(ConvolutionNetwork), parts, images(), off=(), rule=AdamW())
    assert changed == 3
    assert all(3 in node.meta["val"][1].shape[:2] for node in calls(step, ATEN.convolution_backward.default))


def test_a_part_that_lies_in_memory_in_another_order_is_copied_before_it_is_viewed():
    """A linear layer over the channels of a convolution's output, whose gradient is permuted, as ConvNeXt has it."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.linear = nn.Conv2d(3, 6, 1), nn.Linear(6, 8)
            self.after = nn.Conv2d(8, 8, 3, padding=1, groups=8)

        def forward(self, inputs):
            features = torch.tanh(self.before(inputs)).permute(0, 2, 3, 1)
            return torch.tanh(self.after(self.linear(features).permute(0, 3, 1, 2))).mean((2, 3))

    for dim in (0, 1):
        step, changed = check(network(Between), {"linear.weight": Part(dim, CHOSEN)}, images(), off=())
        assert changed == 1


def test_off_computes_the_whole_gradient():
    module, batch = network(ConvolutionNetwork), images()
    step, tensors = step_of(module, {"project.0.weight": Part(1, CHOSEN)}, batch)
    run_passes(step, tensors, off=["sparse_channels"])
    (product,) = calls(step, ATEN.convolution_backward.default)
    assert tuple(product.meta["val"][1].shape) == (6, 12, 1, 1)
