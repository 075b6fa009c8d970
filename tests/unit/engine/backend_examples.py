"""A small network with a frozen beginning, and its step: for the tests of what runs a step."""

import torch
from torch import nn

from piebridge.engine.step_graph import Part


def small(dtype=torch.float32, dropout=0.0):
    """Frozen convolution and batch norm, trained 1x1 and 3x3 convolutions and head; images of 10 pixels."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 6, 1), nn.ReLU(),
              nn.Conv2d(6, 6, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(6, 5)]
    module = nn.Sequential(*layers).to(dtype).eval()
    module[1].running_var.uniform_(0.5, 2.0)
    return module


PARTS = {"3.weight": Part(1, torch.tensor([1, 4, 6])), "5.weight": Part(), "9.weight": Part(), "9.bias": Part()}


def example(dtype=torch.float32, count=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 10, 10, generator=generator, dtype=dtype), torch.randint(5, (count,), generator=generator)
