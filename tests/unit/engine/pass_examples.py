"""What the tests of the passes share: small networks in float64, their steps, and a run of a step on given tensors."""

import torch
from torch import nn

from piebridge.engine.capture import capture
from piebridge.engine.losses import cross_entropy
from piebridge.engine.step_graph import BATCH, BUFFER, COUNT, FROZEN, INDEX, RATE, STATE, TRAINED, WEIGHTS, Part
from piebridge.engine.update_rules import SGD

ATEN = torch.ops.aten


class ConvolutionNetwork(nn.Module):
    """An inverted residual block between a stem and a head: strided, pointwise, depthwise and general convolutions."""

    def __init__(self, stride=1):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6())
        self.expand = nn.Sequential(nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12), nn.Hardswish())
        self.depthwise = nn.Sequential(nn.Conv2d(12, 12, 3, stride, 1, groups=12, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.project = nn.Sequential(nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6))
        self.general = nn.Conv2d(6, 8, 3, 1, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        features = self.stem(inputs)
        projected = self.project(self.depthwise(self.expand(features)))
        features = features + projected if projected.shape == features.shape else projected
        return self.head(torch.relu(self.general(features)).mean((2, 3)))


class Encoder(nn.Module):
    """One layer of attention and one MLP, as torchvision and BERT have them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.layer(inputs).mean(1))


def images(size=8, count=2):
    return torch.randn(count, 3, size, size, dtype=torch.float64), torch.arange(count) % 3


def network(kind, *arguments, **options):
    """In float64, with batch norm statistics that are not the initial ones."""
    torch.manual_seed(0)
    module = kind(*arguments, **options).double()
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            for tensor in (each.weight.data, each.bias.data, each.running_mean, each.running_var):
                tensor.uniform_(0.5, 1.5)
    return module


def step_of(module, parts, batch, rule=None, **options):
    """(step, its frozen and buffer tensors)"""
    step = capture(module, cross_entropy, rule or SGD(), parts, batch, **options)
    given = {FROZEN: dict(module.named_parameters()), BUFFER: dict(module.named_buffers())}
    tensors = {(value.role, value.name): given[value.role][value.name].detach() for _, value in step.inputs_of(FROZEN, BUFFER)}
    return step, tensors


def run(step, module, tensors, batch):
    """The step's outputs {(role, name): tensor}, for module's trained values, all states 0.3, rate 0.1."""
    named, position, arguments = dict(module.named_parameters()), 0, []
    for value in step.inputs:
        if value.role in (FROZEN, BUFFER):
            arguments.append(tensors[value.role, value.name])
        elif value.role == TRAINED:
            arguments.append(named[value.name].detach())
        elif value.role == INDEX:
            arguments.append(step.parts[value.name].index)
        elif value.role == BATCH:
            arguments.append(batch[position])
            position += 1
        elif value.role == STATE:
            arguments.append(torch.full(value.shape, 0.3, dtype=value.dtype))
        else:
            numbers = {WEIGHTS: torch.linspace(0.5, 1.5, batch[0].shape[0]), RATE: torch.tensor(0.1), COUNT: torch.tensor(3.0)}
            arguments.append(numbers[value.role].to(value.dtype))
    return {(value.role, value.name): tensor for value, tensor in zip(step.outputs, step(*arguments))}


def same(one, other, tolerance=1e-10):
    assert one.keys() == other.keys()
    for key in one:
        assert torch.allclose(one[key], other[key], rtol=tolerance, atol=tolerance), (key, (one[key] - other[key]).abs().max())


def calls(step, *targets):
    return [node for node in step.graph.nodes if node.target in targets]


def everything(module):
    return {key: Part() for key, _ in module.named_parameters()}
