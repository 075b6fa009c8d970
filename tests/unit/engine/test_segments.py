"""A step cut into its frozen prefix and its trained rest: together they are the whole, and nothing trained is in the prefix."""

import pytest
import torch
from torch import nn

from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.losses import cross_entropy
from piebridge.engine.segments import CROSSING, cut
from piebridge.engine.step_graph import BATCH, BUFFER, COUNT, DRAW, FROZEN, INDEX, OUTPUTS, RATE, STATE, TRAINED, WEIGHTS, Part
from piebridge.engine.update_rules import SGD, AdamW

SIZE, COUNTED, CLASSES = 12, 4, 5


class Residual(nn.Module):
    """1x1, depthwise 3x3 and 1x1 convolutions with batch norm around a skip."""

    def __init__(self, channels, inner):
        super().__init__()
        self.expand, self.expand_norm = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.depth, self.depth_norm = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner)
        self.project, self.project_norm = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.activation = nn.ReLU6()

    def forward(self, x):
        y = self.activation(self.expand_norm(self.expand(x)))
        y = self.activation(self.depth_norm(self.depth(y)))
        return x + self.project_norm(self.project(y))


class Network(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(6, 12) for _ in range(3)])
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((2, 3))))


def network(seed=0, **settings):
    torch.manual_seed(seed)
    made = Network(**settings).double().eval()
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 2)
    return made


def batch():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(COUNTED, 3, SIZE, SIZE, dtype=torch.float64, generator=generator),
            torch.randint(CLASSES, (COUNTED,), generator=generator))


def captured(module, keys, rule=None, settings=None):
    keys = keys if isinstance(keys, dict) else dict.fromkeys(keys)
    parts = {key: part if isinstance(part, Part) else Part() for key, part in keys.items()}
    return capture(module, cross_entropy, rule or SGD(0.9, 1e-2), parts, batch(), settings)


def tensors_of(step, module):
    """{(role, name): tensor} for every input of the step."""
    given = dict(zip(("inputs", "targets"), batch()))
    state = dict(module.state_dict())
    made = {}
    for value in step.inputs:
        if value.role in (TRAINED, FROZEN, BUFFER):
            tensor = state[value.name]
        elif value.role == INDEX:
            tensor = step.parts[value.name].index
        elif value.role == BATCH:
            tensor = given[value.name]
        elif value.role == DRAW:
            generator = torch.Generator().manual_seed(2)
            tensor = torch.bernoulli(torch.full(value.shape, value.facts["keep"], dtype=value.dtype), generator=generator)
        else:
            fill = {STATE: 0.25, WEIGHTS: 1 / COUNTED, RATE: 0.1, COUNT: 3.0}[value.role]
            tensor = torch.full(value.shape, fill, dtype=value.dtype)
        made[value.role, value.name] = tensor
    return made


def run(step, tensors):
    results = step(*[tensors[value.role, value.name] for value in step.inputs])
    return {(value.role, value.name): result for value, result in zip(step.outputs, results)}


def run_in_two(division, tensors):
    found = run(division.prefix, tensors)
    crossing = {(BATCH, name): tensor for (role, name), tensor in found.items() if role == OUTPUTS}
    assert {name for _, name in crossing} == {value.name for value in division.crossing}
    results, buffers = run(division.rest, {**tensors, **crossing}), {key: found[key] for key in found if key[0] == BUFFER}
    assert not set(results) & set(buffers)
    return {**results, **buffers}


SCHEMES = {
    "head": ["head.weight", "head.bias"],
    "first convolution of the last block": ["blocks.2.expand.weight", "head.weight", "head.bias"],
    "some of its channels": {"blocks.2.expand.weight": Part(1, torch.tensor([0, 2, 3])), "head.bias": None},
    "a depthwise convolution": {"blocks.2.depth.weight": Part(0, torch.tensor([1, 5])), "blocks.2.depth_norm.bias": None},
    "biases of the last block": ["blocks.2.expand_norm.bias", "blocks.2.depth_norm.bias", "blocks.2.project_norm.bias", "head.bias"],
    "the last convolution": ["blocks.2.project.weight"],
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_training", [False, True])
def test_prefix_and_rest_are_the_whole(scheme, is_training):
    module = network().train(is_training)
    step = captured(module, SCHEMES[scheme], settings=StepSettings(is_training=is_training))
    tensors, division = tensors_of(step, module), cut(step)
    expected, found = run(step, tensors), run_in_two(division, tensors)
    assert list(found) and set(found) == set(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-12, atol=1e-12, msg=str(key))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_trained_is_in_the_prefix(scheme):
    division = cut(captured(network(), SCHEMES[scheme], AdamW()))
    assert {value.role for value in division.prefix.inputs} <= {BATCH, FROZEN, BUFFER, INDEX}
    assert not any(value.name == "targets" for value in division.prefix.inputs)
    below = {value.name for value in division.prefix.inputs}
    assert {"stem.weight", "blocks.0.expand.weight", "blocks.1.project.weight"} <= below
    above = {value.name for value in division.rest.inputs if value.role == FROZEN}
    assert not any(name.startswith(("stem", "blocks.0", "blocks.1")) for name in above)  # their weights have gone with them


def bytes_of(*shape):
    return 8 * COUNTED * torch.Size(shape).numel()


@pytest.mark.parametrize("scheme, expected", [
    ("head", [bytes_of(6)]),  # the mean over the image, as the head reads it
    ("first convolution of the last block", [bytes_of(6, SIZE, SIZE)]),  # the block's input, for the convolution and the skip
    ("some of its channels", [bytes_of(6, SIZE, SIZE)]),  # the chosen channels are taken from it in the rest
])
def test_few_bytes_cross(scheme, expected):
    division = cut(captured(network(), SCHEMES[scheme]))
    assert [value.bytes for value in division.crossing] == expected
    assert division.crossing_bytes == sum(expected)
    assert [value.name for value in division.rest.inputs if value.role == BATCH] == [f"{CROSSING}/0", "targets"]


def test_a_mask_is_computed_behind_the_cut_where_its_value_crosses_anyhow():
    """relu6(x) and its mask would be 9 bytes a number, x alone is 8 in float64."""
    division = cut(captured(network(), ["blocks.2.expand_norm.bias"]))
    assert all(value.dtype == torch.float64 for value in division.crossing)


def test_a_full_step_has_no_prefix():
    module = network()
    step = captured(module, [key for key, _ in module.named_parameters()])
    division = cut(step)
    assert division.prefix is None and not division.crossing and division.crossing_bytes == 0
    tensors = tensors_of(step, module)
    for key, tensor in run(step, tensors).items():
        assert torch.equal(run(division.rest, tensors)[key], tensor)


def test_the_step_itself_stays_as_it_is():
    step = captured(network(), SCHEMES["head"])
    before = step.graph_module.code
    cut(step)
    assert step.graph_module.code == before and [value.role for value in step.inputs].count(BATCH) == 2


def test_draws_of_the_trained_part_stay_there():
    module = network(dropout=0.5).train()
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.eval()
    step = captured(module, SCHEMES["head"], settings=StepSettings(is_training=True))
    division = cut(step)
    assert [value.role for value in division.rest.inputs].count(DRAW) == 1
    assert not any(value.role == DRAW for value in division.prefix.inputs)
    tensors = tensors_of(step, module)
    for key, tensor in run(step, tensors).items():
        torch.testing.assert_close(run_in_two(division, tensors)[key], tensor)


def test_statistics_move_on_the_side_where_their_batch_norm_is():
    module = network().train()
    division = cut(captured(module, SCHEMES["first convolution of the last block"], settings=StepSettings(is_training=True)))
    moved = {value.name for value in division.prefix.outputs if value.role == BUFFER}
    assert "blocks.1.project_norm.running_var" in moved and "blocks.2.project_norm.running_var" not in moved
    assert "blocks.2.expand_norm.running_mean" in {value.name for value in division.rest.outputs if value.role == BUFFER}
