"""Small networks for the tests of alignment, in float64: an original, and proxies of it that lack something."""

import torch
from torch import nn
from torch.nn import functional as F

from piebridge.core.capture import capture
from piebridge.core.network import GraphNetwork, expected_shapes

SIZE = 16


class Block(nn.Module):
    """An inverted residual: expand, depthwise, project, with batch norms, around a shortcut."""

    def __init__(self, width, hidden):
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.project, self.norm3 = nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        inside = F.relu6(self.norm1(self.expand(x)))
        return x + self.norm3(self.project(F.relu6(self.norm2(self.depthwise(inside)))))


class Tower(nn.Module):
    """A stem, three blocks, and a layer that widens before the head."""

    def __init__(self, hidden=16):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(*[Block(8, hidden) for _ in range(3)])
        self.last, self.last_norm = nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        x = self.blocks(F.relu(self.stem_norm(self.stem(x))))
        return self.head(torch.flatten(self.pool(F.relu6(self.last_norm(self.last(x)))), 1))


def random_tensors(shapes, seed=0, dtype=torch.float64):
    """Weights that keep values at about their size from layer to layer, and batch-norm statistics that are not 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator, dtype=dtype)
        if key.endswith("running_var") or key.endswith("weight") and len(shape) == 1:
            tensor = tensor.abs() * 0.2 + 0.8
        else:
            tensor *= (tensor[0].numel() / 2) ** -0.5 if len(shape) > 1 else 0.1
        tensors[key] = torch.tensor(0) if key.endswith("num_batches_tracked") else tensor
    return tensors


def network_of(module, name="tower", size=SIZE, seed=0):
    """A module as a GraphNetwork with random weights, float64, eval mode."""
    network = capture(module, name, [3, size, size], [0.5] * 3, [0.5] * 3)
    return GraphNetwork(network.description, random_tensors(expected_shapes(network.description), seed)).eval()


def module_of(network, module):
    """The plain module with the network's tensors."""
    module.double().load_state_dict(network.state_dict())
    return module.eval()


def copy_of(network):
    """With tensors of its own."""
    return GraphNetwork(network.description, {key: tensor.clone() for key, tensor in network.state_dict().items()}).eval()


def noisy(network, amount=0.1, seed=5, without=("head",)):
    """A copy whose convolutions are off by noise: a proxy that lost something."""
    proxy, generator = copy_of(network), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in proxy.named_parameters():
            if parameter.dim() > 1 and not key.startswith(without):
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter += amount * parameter.std() * noise
    return proxy


def images(count, size=SIZE, seed=1):
    """Smooth random images, float64."""
    coarse = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.interpolate(coarse, size=size, mode="bilinear", align_corners=False)


def pairs(count, size=None, batch=8, seed=1):
    """Batches of (images at the original's size, images at the proxy's)."""
    large = images(count, SIZE, seed).split(batch)
    return [(each, each) for each in large] if size is None else list(zip(large, images(count, size, seed).split(batch)))
