"""Small networks and schemes for the tests of memory, and what a run of their steps allocates."""

import functools

import torch
from torch import nn
from torchvision.models import MobileNetV2, VisionTransformer

from piebridge.engine.byte_counter import ByteCounter
from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.interpreter import LIVE, Interpreter
from piebridge.engine.losses import cross_entropy
from piebridge.engine.step_graph import BATCH, COUNT, DRAW, INDEX, LOSSES, OUTPUTS, RATE, STATE, WEIGHTS, Part
from piebridge.engine.update_rules import SGD

CLASSES = 5


class Residual(nn.Module):
    """Two residual blocks behind a stem with max pooling."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                                  nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class HardSwish(nn.Module):
    """A block as in MobileNetV3: hard-swish, squeeze and excitation with hard-sigmoid, dropout before the head."""

    def __init__(self, width=8):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, width, 1), nn.BatchNorm2d(width), nn.Hardswish(inplace=True))
        self.depthwise = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width), nn.Hardswish())
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, width, 1), nn.Hardsigmoid())
        self.project = nn.Conv2d(width, width, 1)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(width, CLASSES))

    def forward(self, x):
        x = self.depthwise(self.expand(x))
        x = torch.nn.functional.hardtanh(self.project(x * self.scale(x)))
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """Two transformer layers over tokens, with dropout."""

    def __init__(self, width=16, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)).mean(1))


def mobilenet(width=0.25):
    settings = [[1, 16, 1, 1], [6, 24, 1, 2], [6, 24, 2, 1]]
    return MobileNetV2(num_classes=CLASSES, width_mult=width, inverted_residual_setting=settings, dropout=0.0)


def vit():
    return VisionTransformer(image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES)


NETWORKS = {"mobilenet": mobilenet, "residual": Residual, "hard_swish": HardSwish, "vit": vit, "encoder": Encoder}


def full(module):
    return {key: Part() for key, _ in module.named_parameters()}


def bias_only(module):
    return {key: Part() for key, _ in module.named_parameters() if key.endswith("bias")}


def sparse(module):
    """The last third of the parameters; of its matrices and kernels, half of the input channels."""
    parameters = list(module.named_parameters())
    parts = {}
    for key, tensor in parameters[-max(4, len(parameters) // 3):]:
        wide = tensor.dim() > 1 and tensor.shape[1] >= 4
        parts[key] = Part(1, torch.arange(tensor.shape[1] // 2) * 2) if wide else Part()
    return parts


SCHEMES = {"full": full, "bias": bias_only, "sparse": sparse}


def captured(network, scheme="full", is_training=False, dtype=torch.float32, batch=4, rule=None, size=16):
    """(module, a StepGraph of one's own, {(role, name): tensor} of what it takes); all random numbers from a fixed seed."""
    module, step, inputs, targets = _captured(network, scheme, is_training, dtype, batch, rule or SGD(0.9), size)
    return module, step.copy(), tensors_for(module, step, inputs, targets)


@functools.lru_cache(maxsize=None)
def _captured(network, scheme, is_training, dtype, batch, rule, size):
    torch.manual_seed(0)
    module = NETWORKS[network]().to(dtype)
    for buffer in module.buffers():  # statistics of a network that has seen something
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    inputs = torch.randint(11, (batch, size)) if network == "encoder" else torch.randn(batch, 3, size, size, dtype=dtype)
    targets = torch.randint(CLASSES, (batch,))
    parts, settings = SCHEMES[scheme](module), StepSettings(is_training=is_training)
    step = capture(module, cross_entropy, rule, parts, (inputs, targets), settings)
    return module, step, inputs, targets


def tensors_for(module, step, inputs, targets):
    owned = dict(module.named_parameters())
    owned.update(module.named_buffers())
    batch = [tensor.clone() for tensor in (inputs, targets)]
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for value in step.inputs:
        if value.role == INDEX:
            tensor = step.parts[value.name].index
        elif value.role == STATE:
            tensor = torch.rand(value.shape, dtype=value.dtype, generator=generator)
        elif value.role == BATCH:
            tensor = batch[0 if value.name.startswith("inputs") else 1]
        elif value.role == DRAW:
            tensor = (torch.rand(value.shape, generator=generator) < value.facts["keep"]).to(value.dtype)
        elif value.role in (WEIGHTS, RATE, COUNT):
            tensor = torch.full(value.shape, {WEIGHTS: 1 / value.shape[0] if value.shape else 1, RATE: 0.1, COUNT: 1.0}[value.role],
                                dtype=value.dtype)
        else:
            tensor = owned[value.name].detach().clone()
        tensors[value.role, value.name] = tensor
    return tensors


def results_of(step, tensors):
    """[(role, name), tensor] of a plain run of the whole graph."""
    with torch.no_grad():
        values = step(*[tensors[value.role, value.name] for value in step.inputs])
    return {(value.role, value.name): tensor for value, tensor in zip(step.outputs, values)}


def measured_peak(step, tensors):
    """(peak bytes of a run by the reference executor, {(role, name): what was put out or written})."""
    live = {(value.role, value.name): tensors[value.role, value.name] for value in step.inputs if value.role in LIVE}
    interpreter = Interpreter(step, live)
    batch = [tensors[value.role, value.name] for _, value in step.inputs_of(BATCH)]
    draws = [tensors[value.role, value.name].clone for _, value in step.inputs_of(DRAW)]
    weights, rate, count = (tensors[role, role] for role in (WEIGHTS, RATE, COUNT))
    with ByteCounter() as counter:
        losses, outputs = interpreter.run(batch, weights, rate, count, draws)
    results = {(value.role, value.name): live.get((value.role, value.name)) for value in step.outputs}
    results.update({(LOSSES, "losses"): losses, (OUTPUTS, "outputs"): outputs})
    return counter.peak, results
