"""A step cut into its frozen prefix and its trained rest: together they are the whole, and nothing trained is in the prefix."""

import pytest
import torch
from engine_networks import batch_of, family, loss_of, parts_of, with_lora
from engine_reference import tensors_of
from torch import nn

from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.losses import cross_entropy
from piebridge.engine.segments import CROSSING, cut
from piebridge.engine.step_graph import BATCH, BUFFER, COUNT, DRAW, FROZEN, INDEX, OUTPUTS, RATE, STATE, WEIGHTS, Part
from piebridge.engine.update_rules import SGD, AdamW

SIZE, COUNTED, CLASSES = 12, 4, 5
SCHEMES = {
    "head": {"head.weight": Part(), "head.bias": Part()},
    "first convolution": {"expand.weight": Part(), "head.weight": Part()},
    "some channels": {"expand.weight": Part(1, torch.tensor([0, 2, 3])), "head.bias": Part()},
    "bias": {"expand_norm.bias": Part(), "head.bias": Part()},
}


class Network(nn.Module):
    """A stem, and a block around a skip: 1x1, depthwise and 1x1 convolution."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.expand, self.expand_norm = nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depth, self.depth_norm = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(12)
        self.project, self.project_norm = nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.activation, self.dropout, self.head = nn.ReLU6(), nn.Dropout(dropout), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.activation(self.stem_norm(self.stem(x)))
        y = self.activation(self.expand_norm(self.expand(x)))
        y = self.activation(self.depth_norm(self.depth(y)))
        x = x + self.project_norm(self.project(y))
        return self.head(self.dropout(x.mean((2, 3))))


def network(**settings):
    torch.manual_seed(0)
    return Network(**settings).double().eval()


def example():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(COUNTED, 3, SIZE, SIZE, dtype=torch.float64, generator=generator),
            torch.randint(CLASSES, (COUNTED,), generator=generator))


def captured(module, scheme, rule=None, is_training=False):
    return capture(module, cross_entropy, rule or SGD(0.9, 1e-2), SCHEMES[scheme], example(), StepSettings(is_training=is_training))


def values_of(step, module, batch):
    """{(role, name): tensor} for every input of a step."""
    flat = [tensor for value in batch for tensor in (value if isinstance(value, tuple) else (value,))]
    values = tensors_of(step, module)
    values.update({(BATCH, value.name): tensor for (_, value), tensor in zip(step.inputs_of(BATCH), flat)})
    generator = torch.Generator().manual_seed(2)
    for _, value in step.inputs_of(DRAW):
        values[DRAW, value.name] = torch.empty(value.shape, dtype=value.dtype).bernoulli_(value.facts["keep"], generator=generator)
    for role, number in ((STATE, 0.25), (WEIGHTS, 0.2), (RATE, 0.1), (COUNT, 3.0)):
        values.update({(role, value.name): torch.full(value.shape, number, dtype=value.dtype) for _, value in step.inputs_of(role)})
    return values


def run(step, values):
    results = step(*[values[value.role, value.name] for value in step.inputs])
    return {(value.role, value.name): result for value, result in zip(step.outputs, results)}


def run_in_two(division, values):
    if division.prefix is None:
        return run(division.rest, values)
    found = run(division.prefix, values)
    crossing = {(BATCH, name): tensor for (role, name), tensor in found.items() if role == OUTPUTS}
    assert {name for _, name in crossing} == {value.name for value in division.crossing}
    results, buffers = run(division.rest, {**values, **crossing}), {key: found[key] for key in found if key[0] == BUFFER}
    assert not set(results) & set(buffers)
    return {**results, **buffers}


def assert_whole(step, division, values):
    expected, found = run(step, values), run_in_two(division, values)
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-12, atol=1e-12, msg=str(key))


@pytest.mark.parametrize("name, scheme", [
    ("lite0", "layers"), ("mobilenet_v3", "channels"), ("resnet", "layers"), ("vit", "layers"), ("encoder", "layers"), ("decoder", "lora")])
def test_prefix_and_rest_are_the_whole(name, scheme):
    module = family(name)
    module = with_lora(module) if scheme == "lora" else module
    batch = batch_of(name)
    step = capture(module, loss_of(name), AdamW(), parts_of(module, scheme), batch)
    division = cut(step)
    assert_whole(step, division, values_of(step, module, batch))
    assert division.prefix is not None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_norm_in_train_mode_moves_its_statistics_on_its_own_side(scheme):
    module = network().train()
    step = captured(module, scheme, is_training=True)
    division = cut(step)
    assert_whole(step, division, values_of(step, module, example()))
    moved = {value.name for value in division.prefix.outputs if value.role == BUFFER}
    assert "stem_norm.running_var" in moved
    assert ("depth_norm.running_var" in moved) == (scheme == "head")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_trained_is_in_the_prefix(scheme):
    division = cut(captured(network(), scheme, AdamW()))
    assert {value.role for value in division.prefix.inputs} <= {BATCH, FROZEN, BUFFER, INDEX}
    assert [value.name for value in division.prefix.inputs if value.role == BATCH] == ["inputs"]
    below, above = [{value.name for value in part.inputs if value.role == FROZEN} for part in (division.prefix, division.rest)]
    assert "stem.weight" in below and "stem.weight" not in above
    assert not set(SCHEMES[scheme]) & below


def bytes_of(*shape):
    return 8 * COUNTED * torch.Size(shape).numel()


@pytest.mark.parametrize("scheme, expected", [
    ("head", bytes_of(6)),  # the mean over the image, as the head reads it
    ("first convolution", bytes_of(6, SIZE, SIZE)),  # the block's input, for the convolution and the skip
    ("some channels", bytes_of(6, SIZE, SIZE)),  # the chosen channels are taken from it in the rest
    ("bias", bytes_of(6, SIZE, SIZE) + bytes_of(12, SIZE, SIZE)),  # the skip, and what the bias is added to: no copy, no mask beside it
])
def test_few_bytes_cross(scheme, expected):
    division = cut(captured(network(), scheme))
    assert division.crossing_bytes == expected == sum(value.bytes for value in division.crossing)
    names = [value.name for value in division.rest.inputs if value.role == BATCH]
    assert names == [f"{CROSSING}/{place}" for place in range(len(division.crossing))] + ["targets"]


def test_a_full_step_has_no_prefix():
    module = network()
    step = capture(module, cross_entropy, SGD(), {key: Part() for key, _ in module.named_parameters()}, example())
    division = cut(step)
    assert division.prefix is None and not division.crossing and division.crossing_bytes == 0
    assert_whole(step, division, values_of(step, module, example()))


def test_the_step_itself_stays_as_it_is():
    step = captured(network(), "head")
    before = step.graph_module.code
    cut(step)
    assert step.graph_module.code == before and [value.role for value in step.inputs].count(BATCH) == 2


def test_draws_of_the_trained_part_stay_there():
    module = network(dropout=0.5)
    module.dropout.train()
    step = captured(module, "head", is_training=True)
    division = cut(step)
    assert len(division.rest.inputs_of(DRAW)) == 1 and not division.prefix.inputs_of(DRAW)
    assert_whole(step, division, values_of(step, module, example()))
