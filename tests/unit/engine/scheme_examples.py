"""Small networks for the tests of layers and schemes."""

import torch
from torch import nn

from piebridge.engine.scheme import Scheme


class InvertedResidual(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.expand, self.norm_expand = nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.depthwise, self.norm_depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False), nn.BatchNorm2d(hidden)
        self.project, self.norm_project = nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        y = self.norm_expand(self.expand(x)).relu()
        return x + self.norm_project(self.project(self.norm_depthwise(self.depthwise(y)).relu()))


class Tower(nn.Module):
    """A stem, three blocks, and a head: 10 convolutions and a linear layer."""

    def __init__(self, width=8, hidden=16, blocks=3):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*[InvertedResidual(width, hidden) for _ in range(blocks)])
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem_norm(self.stem(x)).relu()).mean((2, 3)))


class EncoderLayer(nn.Module):
    """Pre-norm, with one projection for query, key and value."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_mlp, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        query, key, value = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.proj(mixed)
        return x + self.down(self.up(self.norm_mlp(x)).relu())


class Decoder(nn.Module):
    """Token embedding, two layers, and an output layer that shares the embedding's weight."""

    def __init__(self, width=16):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(11, width), nn.ModuleList([EncoderLayer(width) for _ in range(2)])
        self.position = nn.Parameter(torch.zeros(1, 6, width))
        self.output = nn.Linear(width, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


IMAGES, TOKENS = torch.zeros(2, 3, 16, 16), torch.zeros(2, 6, dtype=torch.int64)


def resolved(text, module=None, example=IMAGES, **options):
    """{key: Part} of a scheme's text, file or name on a Tower or another module."""
    return Scheme.read(text).resolve(module or Tower(), example, **options)
