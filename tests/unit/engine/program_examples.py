"""A small network, its step programs, and the same training in plain PyTorch, for the tests of the executor and of program files."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.losses import cross_entropy
from piebridge.engine.program import StepProgram
from piebridge.engine.step_graph import BUFFER, FROZEN, INDEX, STATE, TRAINED, Part
from piebridge.engine.update_rules import SGD, AdamW

BATCH_SIZE, CLASSES = 4, 5


def network(dropout=0.0):
    """Convolutions, plain and depthwise, batch norm, a flatten of more than one pixel, a head; float64, in eval mode."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True),
              nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Hardswish(), nn.Conv2d(8, 6, 1), nn.AvgPool2d(4), nn.Flatten(),
              nn.Dropout(dropout), nn.Linear(24, CLASSES)]
    module = nn.Sequential(*layers).double().eval()
    module[1].running_mean.uniform_(-0.5, 0.5)
    module[1].running_var.uniform_(0.5, 2.0)
    return module


def batches(number, size=BATCH_SIZE, seed=1):
    """[(images [size, 3, 16, 16], labels [size])]."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64), torch.randint(CLASSES, (size,), generator=generator))
            for _ in range(number)]


def everything(module):
    return {key: Part() for key, _ in module.named_parameters()}


def some_channels():
    """Input channels of a 1x1, output channels of a depthwise convolution and of the head, and a whole bias."""
    return {"5.weight": Part(1, torch.tensor([1, 4, 6])), "3.weight": Part(0, torch.tensor([0, 7])),
            "9.weight": Part(0, torch.tensor([2, 3])), "9.bias": Part()}


def tensors_of(step, module):
    own = dict(module.named_parameters(), **dict(module.named_buffers()))
    tensors = {(value.role, value.name): own[value.name].detach().clone() for _, value in step.inputs_of(TRAINED, FROZEN, BUFFER)}
    tensors.update({(INDEX, value.name): step.parts[value.name].index for _, value in step.inputs_of(INDEX)})
    tensors.update({(STATE, value.name): torch.zeros(value.shape, dtype=value.dtype) for _, value in step.inputs_of(STATE)})
    return tensors


def steps_of(module, rule=None, parts=None, **settings):
    settings = StepSettings(**settings)
    names = ("update", "accumulate") if settings.accumulation > 1 else ("update",)
    parts = everything(module) if parts is None else parts
    module = copy.deepcopy(module).train(settings.is_training)
    return {name: capture(module, cross_entropy, rule or SGD(), parts, batches(1)[0], settings, name == "accumulate") for name in names}


def program_of(module, rule=None, parts=None, seed=0, is_channels_last=False, **settings):
    """A StepProgram without passes."""
    steps = steps_of(module, rule, parts, **settings)
    tensors = {}
    for step in steps.values():
        tensors.update(tensors_of(step, module))
    kept = {"seed": seed, "accumulation": settings.get("accumulation", 1), "is_channels_last": is_channels_last}
    is_mixing = settings.get("is_training", False)
    return StepProgram(steps, tensors, {"settings": kept, "mixes_samples": "batch norm '1'" if is_mixing else None})


def optimizer_of(rule, parameters, rate):
    if isinstance(rule, AdamW):
        return torch.optim.AdamW(parameters, rate, (rule.beta_mean, rule.beta_square), rule.epsilon, rule.weight_decay)
    return torch.optim.SGD(parameters, rate, rule.momentum, weight_decay=rule.weight_decay)


class Plain:
    """The same training by autograd and torch.optim, on a copy of the module."""

    def __init__(self, module, rule, parts, rate, is_training=False, accumulation=1, clip=None):
        self.module, self.parts = copy.deepcopy(module).train(is_training), parts
        own = dict(self.module.named_parameters())
        self.trained = {key: own[key] for key in parts}
        for key, parameter in own.items():
            parameter.requires_grad_(key in parts)
        self._others = {key: self._frozen_part(key) for key, part in parts.items() if not part.is_whole}
        self.optimizer = optimizer_of(rule, list(self.trained.values()), rate)
        self._accumulation, self._clip, self._calls = accumulation, clip, 0

    def _frozen_part(self, key):
        part, tensor = self.parts[key], self.trained[key]
        index = torch.tensor([channel for channel in range(tensor.shape[part.dim]) if channel not in part.index.tolist()])
        return part.dim, index, tensor.detach().index_select(part.dim, index)

    def __call__(self, images, labels, weights=None):
        losses = F.cross_entropy(self.module(images), labels, reduction="none")
        (losses.mean() / self._accumulation if weights is None else (losses * weights).sum()).backward()
        self._calls += 1
        if self._calls % self._accumulation == 0:
            for key, (dim, index, _) in self._others.items():
                self.trained[key].grad.index_fill_(dim, index, 0.0)
            if self._clip is not None:
                nn.utils.clip_grad_norm_(list(self.trained.values()), self._clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():  # weight decay reaches what is not trained
                for key, (dim, index, before) in self._others.items():
                    self.trained[key].index_copy_(dim, index, before)
        return losses.detach()
