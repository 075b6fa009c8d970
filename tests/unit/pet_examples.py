"""Networks and settings for the tests of PET kinds."""

from types import SimpleNamespace

import torch
from forge_examples import SIZE, Tower, images, network_of, random_tensors
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.descriptions import read_description
from piebridge.core.gate import OpenGate
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.step import EagerStep
from piebridge.core.tuning import Tuning

KINDS = ("head", "last_k", "norm", "bias", "adapter", "lora", "all")
FAMILIES = {"tower": 16, "efficientnet_lite0": 64, "mobilenet_v3_large": 64, "resnet50": 64, "vit": 32, "deit": 32}  # pixels
SMALL = ("tower", "vit", "deit")
CLASSES = ("ant", "bee", "cat", "dog")


def settings(kind, **changes):
    """The section `pet` of a configuration."""
    given = {"kind": kind, "last_k": 2, "r": 2, "alpha": 6.0, "dropout": 0.0, "target": (), "blocks": "all"}
    return SimpleNamespace(**dict(given, **changes))


def sparse_parts(network):
    """Of a family, for pet.kind=sparse: whole tensors, and parts of a 1x1 and a depthwise convolution or of linear layers."""
    keys = [key for key, _ in network.named_parameters()]
    if "blocks.2.expand.weight" in keys:
        return {"blocks.2.norm1.bias": None, "blocks.2.expand.weight": (1, [0, 2, 5]), "blocks.2.depthwise.weight": (0, [1, 3, 8, 15]),
                "blocks.2.project.weight": None, "last.weight": (1, [7]), "last_norm.weight": None}
    last = max(key for key in keys if key.endswith("in_proj_weight"))
    first, second = [key for key in keys if key.startswith(last.partition("self_attention")[0]) and ".mlp." in key and "weight" in key]
    return {last: (0, [0, 1, 2, 20, 21]), first: (1, [3, 5, 11]), second: None, second.replace("weight", "bias"): None}


def family(name, seed=0, dtype=torch.float64, is_narrow=True):
    """A network of a family with random weights and statistics and a fresh head, in eval mode; narrower, or with fewer blocks."""
    if name in SMALL:
        description = captured(name).description
    else:
        description = _narrow(read_description(name)) if is_narrow else read_description(name)
    torch.manual_seed(seed)
    network = GraphNetwork(description, random_tensors(expected_shapes(description), seed, dtype)).eval()
    network.replace_head(CLASSES)
    return network


def _narrow(description):
    """An eighth of the channels everywhere: a sixty-fourth of the time."""
    for node in description["nodes"]:
        for key in ("in_channels", "out_channels", "groups", "num_features", "in_features", "out_features"):
            if node["arguments"].get(key, 0) >= 8:
                node["arguments"][key] //= 8
    return description


def captured(name):
    """A small network by itself, as captured."""
    if name == "tower":
        return network_of(Tower(), "tower")
    if name == "vit":
        module = vision_transformer(5)
    else:
        import timm
        module = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2,
                                   num_classes=5)
    return capture(module.eval(), name, [3, 32, 32], [0.5] * 3, [0.5] * 3)


def vision_transformer(classes):
    from torchvision.models import VisionTransformer
    return VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=classes)


def examples(name, count=4, seed=1, dtype=torch.float64, size=None):
    """(images, labels) for a family."""
    generator = torch.Generator().manual_seed(seed)
    size = size or FAMILIES[name]
    images = torch.randn(count, 3, size, size, generator=generator, dtype=dtype)
    return images, torch.randint(0, len(CLASSES), (count,), generator=generator)


def step_of(tuning, lr=1e-2):
    return EagerStep(tuning, SimpleNamespace(kind="adamw", lr=lr, momentum=0.9, weight_decay=0.0, schedule="constant", label_smoothing=0.0))


def tuned(network, given, name, steps=3):
    """A Tuning of the network after some steps."""
    tuning = Tuning(network, given)
    step = step_of(tuning)
    for number in range(steps):
        images, labels = examples(name, seed=10 + number)
        step(tuning.frozen().features(images).detach(), labels, OpenGate(), 0.0)
    return tuning.eval()


class Glance(nn.Module):
    """A policy: one layer on the image's mean colours."""

    def __init__(self, levels):
        super().__init__()
        self.pool, self.out = nn.AdaptiveAvgPool2d(1), nn.Linear(3, levels)

    def forward(self, x):
        return self.out(torch.flatten(self.pool(x), 1))


def batch(number):
    """(images, labels) of a small tower."""
    return images(6, SIZE, seed=number), torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(number))


def run(step, first, last, epoch=3):
    """Batches first..last, an epoch every `epoch` of them."""
    for number in range(first, last):
        step(*batch(number), OpenGate(), number / 12)
        if (number + 1) % epoch == 0:
            step.end_epoch((number + 1) / 12)
