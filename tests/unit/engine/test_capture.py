import pytest
import torch
from engine_networks import Encoder, batch_of, family, parts_of
from engine_reference import LEARNING_RATE, Reference, advance, assert_close, assert_same_tensors, optimizer_of, tensors_of
from torch import nn
from torchvision.ops import StochasticDepth

from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.losses import cross_entropy, token_cross_entropy
from piebridge.engine.step_graph import BUFFER, DRAW, FROZEN, STATE, TRAINED, Part
from piebridge.engine.update_rules import SGD, AdamW


@pytest.mark.parametrize("clip", [0.05, 1e3])
def test_clipping_equals_clip_grad_norm(one_thread, clip):
    module = family("lite0")
    parts, weights, batch = parts_of(module, "channels"), torch.full([4], 0.25, dtype=torch.float64), batch_of("lite0")
    reference = Reference(module, cross_entropy, parts, optimizer_of(SGD(0.9)))
    step = capture(module, cross_entropy, SGD(0.9), parts, batch, StepSettings(clip=clip))
    tensors = tensors_of(step, module)
    for number in (1, 2):
        advance(step, tensors, batch, weights, LEARNING_RATE, number)
        reference.backward(batch, weights)
        reference.update(clip)
    assert_same_tensors(tensors, reference)


def test_micro_batches_equal_one_batch(one_thread):
    module, rule, settings = family("lite0"), AdamW(0.1), StepSettings(accumulation=3, clip=0.5)
    parts, weights = parts_of(module, "channels"), torch.full([4], 1 / 12, dtype=torch.float64)
    reference = Reference(module, cross_entropy, parts, optimizer_of(rule))
    adding, updating = (capture(module, cross_entropy, rule, parts, batch_of("lite0"), settings, is_accumulating)
                        for is_accumulating in (True, False))
    tensors = tensors_of(updating, module)
    assert not [value for value in adding.outputs if value.role == TRAINED]
    for number in (1, 2):
        batches = [batch_of("lite0", seed=10 * number + position) for position in range(3)]
        for step, batch in zip((adding, adding, updating), batches):
            advance(step, tensors, batch, weights, LEARNING_RATE, number)
        whole = tuple(torch.cat(values) for values in zip(*batches))
        reference.backward(whole, torch.full([12], 1 / 12, dtype=torch.float64))
        reference.update(0.5)
        assert_same_tensors(tensors, reference)
        assert not any(tensor.any() for (role, name), tensor in tensors.items() if role == STATE and name.endswith("/gradient"))


def test_dropout_with_draws_passed_in_equals_eager_with_these(one_thread, monkeypatch):
    torch.manual_seed(0)
    module, batch, weights = Encoder(dropout=0.3).double().train(), batch_of("encoder"), torch.full([4], 0.25, dtype=torch.float64)
    parts = parts_of(module, "full")
    step = capture(module, cross_entropy, SGD(), parts, batch, StepSettings(is_training=True))
    values = [value for _, value in step.inputs_of(DRAW)]
    assert len(values) == 7 and all(value.facts == {"kind": "bernoulli", "keep": 0.7} for value in values)
    draws = [torch.bernoulli(torch.full(value.shape, 0.7, dtype=value.dtype)) for value in values]
    tensors, left = tensors_of(step, module), iter(draws)
    found = advance(step, tensors, batch, weights, LEARNING_RATE, 1, draws)

    def dropout(x, p=0.5, training=True, inplace=False):
        return x * next(left) / (1 - p)

    def attention(query, key, value, attn_mask, dropout_p, is_causal):
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        return dropout(scores.masked_fill(~attn_mask, -torch.inf).softmax(-1), dropout_p) @ value

    monkeypatch.setattr(nn.functional, "dropout", dropout)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    reference = Reference(module, cross_entropy, parts, optimizer_of(SGD()))
    assert_close(found, reference.backward(batch, weights))
    reference.update()
    assert_same_tensors(tensors, reference)


def test_stochastic_depth_draws_one_number_per_sample(one_thread):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.depth = nn.Linear(5, 5), StochasticDepth(0.25, "row")

        def forward(self, x):
            return x + self.depth(self.body(x))

    module, x = Residual().double(), torch.randn(4, 5, dtype=torch.float64)
    step = capture(module, cross_entropy, SGD(), {"body.bias": Part()}, (x, torch.arange(4)), StepSettings(is_training=True))
    (_, value), = step.inputs_of(DRAW)
    assert value.shape == (4, 1) and value.facts["keep"] == 0.75
    drawn = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64)
    weights = torch.full([4], 0.25, dtype=torch.float64)
    _, outputs = advance(step, tensors_of(step, module), (x, torch.arange(4)), weights, LEARNING_RATE, 1, [drawn])
    assert_close(outputs, x + module.body(x).detach() * drawn / 0.75)


def test_tied_weights_are_trained_and_updated_once(one_thread):
    module = family("decoder")
    step = capture(module, token_cross_entropy, AdamW(), {"embedding.weight": Part()}, batch_of("decoder"))
    assert [value.name for value in step.outputs if value.role == TRAINED] == ["embedding.weight"]
    assert not [value for value in step.inputs if value.name.startswith("head.weight")]
    assert [value.name for _, value in step.inputs_of(STATE)] == ["embedding.weight/mean", "embedding.weight/square"]


@pytest.mark.parametrize("key, expected", [
    (None, 6 * [[True, True, False]] + [[False, True, False]]),  # all of it; the images need no gradient
    ("8.bias", []), ("4.body.6.weight", [[False, True, False]]),
    ("4.body.0.weight", [[True, False, False], [True, False, False], [False, True, False]])])
def test_convolutions_backward_compute_only_what_trained_tensors_need(one_thread, key, expected):
    """Masks: gradient of input, weight, bias; none for frozen weights, and no call below the earliest trained layer."""
    module = family("lite0")
    parts = parts_of(module, "full") if key is None else {key: Part()}
    step = capture(module, cross_entropy, SGD(), parts, batch_of("lite0"))
    backward = torch.ops.aten.convolution_backward.default
    assert [list(node.args[-1]) for node in step.graph.nodes if node.target is backward] == expected


def test_the_module_is_left_as_it_is(one_thread):
    module = family("lite0").train()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    step = capture(module, cross_entropy, SGD(0.9), parts_of(module, "full"), batch_of("lite0"), StepSettings(is_training=True))
    assert all(torch.equal(before[key], tensor) for key, tensor in module.state_dict().items())
    assert module.training and module[2].inplace and not any(parameter.grad is not None for parameter in module.parameters())
    assert not [node for node in step.graph.nodes if node.meta.get("val") is None and node.op != "output"]


@pytest.mark.parametrize("switch", ["decomposes", "functionalises"])
@pytest.mark.parametrize("is_training", [False, True])
def test_lowering_may_be_switched_off(one_thread, switch, is_training):
    module, batch, weights = family("mobilenet_v3").train(is_training), batch_of("mobilenet_v3"), torch.full([4], 0.25, dtype=torch.float64)
    parts = parts_of(module, "full")
    reference = Reference(module, cross_entropy, parts, optimizer_of(SGD()))
    step = capture(module, cross_entropy, SGD(), parts, batch, StepSettings(is_training=is_training, **{switch: False}))
    tensors = tensors_of(step, module)
    for number in (1, 2):
        advance(step, tensors, batch, weights, LEARNING_RATE, number)
        reference.backward(batch, weights)
        reference.update()
    assert_same_tensors(tensors, reference)


def test_only_changed_buffers_are_put_out(one_thread):
    batch, parts = batch_of("lite0"), {"8.bias": Part()}
    changed = {}
    for is_training in (False, True):
        step = capture(family("lite0").train(is_training), cross_entropy, SGD(), parts, batch, StepSettings(is_training=is_training))
        changed[is_training] = [value.name for value in step.outputs if value.role == BUFFER]
    assert changed[False] == []
    assert changed[True] == [key for key, _ in family("lite0").named_buffers()]


def test_batch_norm_may_stay_in_eval_mode_in_a_training_step(one_thread):
    module = family("lite0").train()
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.eval()
    step = capture(module, cross_entropy, SGD(), {"8.bias": Part()}, batch_of("lite0"), StepSettings(is_training=True))
    assert not [value for value in step.outputs if value.role == BUFFER]


def test_what_is_put_out_has_a_node_of_its_own(one_thread):
    """A module that puts out its input, and a rule that puts the gradient out as it is."""
    module, x = nn.Sequential(nn.Identity(), nn.Linear(3, 3)), torch.randn(2, 3)
    step = capture(module, cross_entropy, SGD(0.9), {"1.bias": Part()}, (x, torch.tensor([0, 1])))
    assert len(set(step.results)) == len(step.results)
    assert all(node.op == "call_function" for node in step.results)


def test_constants_of_a_module_become_constants_of_the_graph(one_thread):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 3), torch.tensor([1.0, 2.0, 3.0])

        def forward(self, x):
            return self.linear(x) * self.scale + torch.tensor(0.5)

    module, batch = Scaled(), (torch.randn(2, 3), torch.tensor([0, 1]))
    step = capture(module, cross_entropy, SGD(), {"linear.weight": Part()}, batch).copy()
    _, outputs = advance(step, tensors_of(step, module), batch, torch.ones(2), LEARNING_RATE, 1)
    torch.testing.assert_close(outputs, module(batch[0]))


def test_what_a_module_does_in_place_stays_in_the_step(one_thread):
    class Rude(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return nn.functional.hardswish(self.linear(x.mul_(2.0)), inplace=True)

    module, batch = Rude().double(), (torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
    step = capture(module, cross_entropy, SGD(), parts_of(module, "full"), batch)
    assert not [node for node in step.graph.nodes if hasattr(node.target, "_schema") and node.target._schema.is_mutable]
    assert not [node for node in step.graph.nodes if "hardswish" in str(node.target)]  # lowered behind its in-place form too
    before = batch[0].clone()
    _, outputs = advance(step, tensors_of(step, module), batch, torch.ones(4, dtype=torch.float64), LEARNING_RATE, 1)
    assert torch.equal(batch[0], before)
    assert_close(outputs, nn.functional.hardswish(module.linear(2 * before)).detach())


def test_frozen_encoder_layers_are_plain_operators(one_thread):
    """In eval mode PyTorch would run them as one call for inference."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(32, 5)).eval()
    step = capture(module, cross_entropy, SGD(), {"2.bias": Part()}, (torch.randn(2, 4, 8), torch.tensor([0, 1])))
    assert not [node for node in step.graph.nodes if "transformer" in str(node.target) or "multi_head" in str(node.target)]
    assert torch.backends.mha.get_fastpath_enabled()


def test_shares_of_inputs_by_role(one_thread):
    module = family("lite0")
    step = capture(module, cross_entropy, AdamW(), parts_of(module, "channels"), batch_of("lite0"))
    keys = [key for key, _ in module.named_parameters()]
    assert sorted(value.name for _, value in step.inputs_of(TRAINED, FROZEN)) == sorted(keys)
    assert all(step.node_of(STATE, f"{key}/mean").meta["val"].shape == part.of(module.get_parameter(key)).shape
               for key, part in step.parts.items())
