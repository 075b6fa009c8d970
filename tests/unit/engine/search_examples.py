"""Problems and networks for the tests of the scheme search."""

import numpy as np
import torch
from torch import nn

from piebridge.engine.knapsack import Problem
from piebridge.engine.layer import TRUNK


def random_problem(seed, layers=30, options=5, resources=1):
    draw = np.random.default_rng(seed)
    shares = np.linspace(0, 1, options)
    values = np.sqrt(shares) * draw.random((layers, 1))
    costs = (shares * draw.integers(10 ** 4, 10 ** 7, (layers, 1)))[:, :, None].repeat(resources, 2)
    first = np.arange(layers, -1, -1)
    return Problem(values, costs, first, 0.02 * np.arange(layers + 1), 10.0 ** 5 * np.arange(layers + 1)[:, None].repeat(resources, 1))


class Narrow(nn.Module):
    """Three inverted residual blocks of 8 channels, for images of 16 px: 12 convolutions and linear layers."""

    def __init__(self, has_bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)) for _ in range(3))
        self.last = nn.Conv2d(8, 24, 1, bias=False)
        self.head = nn.Linear(24, 4, bias=has_bias)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


class Biasless(nn.Module):
    """A residual tower of linear layers, none with a bias, without a layer of its own at the end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def image_batches(count=2, size=4, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 3, 16, 16, generator=draw), torch.randint(4, (size,), generator=draw)) for _ in range(count)]


def kept_inputs(layers, parts):
    """Bytes of the inputs that the trained weights need, each as far as its channels are trained."""
    return sum(layer.input_bytes * (1.0 if parts[layer.weight].is_whole else len(parts[layer.weight].index) / layer.shape[layer.cut])
               for layer in layers if layer.kind in TRUNK and layer.weight in parts)


def way_down(layers, parts):
    """Bytes of what the way of the error needs: a bit for each value that enters a layer behind the earliest trained tensor."""
    first = next(place for place, layer in enumerate(layers) if layer.weight in parts or layer.bias in parts)
    return sum(layer.input_bytes / 32 for layer in layers[first:])
