"""Small networks of every family, batches for them, and what is trained of them: for the tests of the engine."""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import MobileNetV2, VisionTransformer
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3
from torchvision.models.resnet import BasicBlock, Bottleneck

from piebridge.core.pet_lora import LoraLayer
from piebridge.engine.losses import cross_entropy, token_cross_entropy
from piebridge.engine.step_graph import Part

CLASSES, VOCABULARY, TOKENS = 5, 11, 6
WITH_BATCH_NORM = ("lite0", "mobilenet_v2", "mobilenet_v3", "resnet")
FAMILIES = WITH_BATCH_NORM + ("vit", "encoder", "decoder")
SCHEMES = ("full", "bias", "layers", "channels", "lora")


class LiteBlock(nn.Module):
    """EfficientNet-Lite0's block: an inverted residual with ReLU6 and without squeeze-excite."""

    def __init__(self, inputs, outputs, kernel, stride):
        super().__init__()
        inner = 2 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(inplace=True),
            nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(inplace=True),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.body(x) if self.is_residual else self.body(x)


def lite0():
    stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)
    return nn.Sequential(*stem, LiteBlock(8, 8, 3, 1), LiteBlock(8, 12, 5, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0),
                         nn.Linear(12, CLASSES))


def mobilenet_v2():
    module = MobileNetV2(CLASSES, 0.25, [[1, 8, 1, 1], [2, 8, 2, 2]], round_nearest=4, dropout=0.0)
    module.features[-1][0], module.features[-1][1] = nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16)
    module.classifier[1] = nn.Linear(16, CLASSES)
    return module


def mobilenet_v3():
    """Squeeze-excite, and ReLU in one block and hard-swish in the other."""
    blocks = [InvertedResidualConfig(8, 3, 16, 8, True, "RE", 2, 1, 1.0), InvertedResidualConfig(8, 5, 16, 8, True, "HS", 1, 1, 1.0)]
    return MobileNetV3(blocks, 16, CLASSES, dropout=0.0)


def resnet():
    def shortcut(inputs, outputs, stride):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    return nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
                         BasicBlock(8, 8), Bottleneck(8, 4, 2, shortcut(8, 16, 2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(16, CLASSES))


def vit():
    return VisionTransformer(image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=CLASSES)


class Attention(nn.Module):
    """Multi-head attention of two heads; mask: bool, broadcast to [B, heads, T, T], or None; or causal."""

    def __init__(self, width, dropout=0.0, is_causal=False):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout, self.is_causal = dropout, is_causal

    def forward(self, x, mask=None):
        query, key, value = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        share = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=share, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """BERT in small: two blocks with layer norm behind them, attention over the tokens that the mask names, a pooled classifier."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.tokens, self.positions, self.norm = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width), nn.LayerNorm(width)
        self.attentions = nn.ModuleList([Attention(width, dropout) for _ in range(2)])
        self.perceptrons = nn.ModuleList([nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(4)])
        self.dropout, self.pooler, self.classifier = nn.Dropout(dropout), nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, tokens, mask):
        x = self.norm(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        x = self.dropout(x)
        for number, (attention, perceptron) in enumerate(zip(self.attentions, self.perceptrons)):
            x = self.norms[2 * number](x + self.dropout(attention(x, mask[:, None, None, :])))
            x = self.norms[2 * number + 1](x + self.dropout(perceptron(x)))
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class Decoder(nn.Module):
    """A causal language model in small: root-mean-square norms, gated perceptrons, the head tied to the embedding."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.attentions = nn.ModuleList([Attention(width, is_causal=True) for _ in range(2)])
        self.gates, self.ups, self.downs = (nn.ModuleList([nn.Linear(*shape, bias=bias) for _ in range(2)])
                                            for shape, bias in (((width, 12), False), ((width, 12), True), ((12, width), False)))
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-6) for _ in range(5)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number in range(2):
            x = x + self.attentions[number](self.norms[2 * number](x))
            y = self.norms[2 * number + 1](x)
            x = x + self.downs[number](F.silu(self.gates[number](y)) * self.ups[number](y))
        return self.head(self.norms[4](x))


BUILDERS = {"lite0": lite0, "mobilenet_v2": mobilenet_v2, "mobilenet_v3": mobilenet_v3, "resnet": resnet, "vit": vit, "encoder": Encoder,
            "decoder": Decoder}
LOSS_OF = {"decoder": token_cross_entropy}


def family(name, dtype=torch.float64, seed=0):
    """A small network of a family, random weights and statistics, in eval mode."""
    torch.manual_seed(seed)
    module = BUILDERS[name]().to(dtype).eval()
    with torch.no_grad():
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if key.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
    return module


def loss_of(name):
    return LOSS_OF.get(name, cross_entropy)


def batch_of(name, count=4, seed=1, dtype=torch.float64):
    """(inputs, targets) for a family, as capture takes them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    if name in ("encoder", "decoder"):
        tokens = torch.randint(0, VOCABULARY, (count, TOKENS), generator=generator)
        lengths = torch.randint(2, TOKENS + 1, (count, 1), generator=generator)
        is_there = torch.arange(TOKENS) < lengths
        if name == "encoder":
            return (tokens, is_there), labels
        return tokens, tokens.roll(-1, 1).masked_fill(~is_there, -100)
    return torch.randn(count, 3, 16, 16, generator=generator, dtype=dtype), labels


def with_lora(module, rank=2):
    """LoRA at every linear layer and 1x1 convolution that a module calls; returns the module."""
    torch.manual_seed(3)
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            is_pointwise = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1
            if isinstance(parent, nn.MultiheadAttention) or not (is_pointwise or isinstance(layer, nn.Linear)):
                continue
            outputs, inputs, *rest = layer.weight.shape
            shapes = [rank, inputs] + rest, [outputs, rank] + rest
            down, up = (nn.Parameter(0.3 * torch.randn(shape, dtype=layer.weight.dtype)) for shape in shapes)
            setattr(parent, name, LoraLayer(layer, down, up, 0.5, 0.0).train(module.training))
    return module


def parts_of(module, scheme):
    """{key: Part} of a scheme: the later half of the network but for `full`, `bias` and `lora`."""
    keys = [key for key, _ in module.named_parameters()]
    later = keys[len(keys) // 2:]
    if scheme == "channels":
        return {key: _every_other(module, key) for key in later}
    chosen = {"full": keys, "bias": [key for key in keys if key.endswith("bias")], "layers": later,
              "lora": [key for key in keys if "lora_" in key]}[scheme]
    return {key: Part() for key in chosen}


def _every_other(module, key):
    """Input channels of a weight, output channels of a depthwise one."""
    shape = module.get_parameter(key).shape
    if len(shape) < 2:
        return Part()
    dim = 0 if shape[1] == 1 or key.endswith("in_proj_weight") else 1
    return Part(dim, torch.arange(1, shape[dim], 2))
