"""Update rules and learning-rate schedules by name."""

import inspect
import math

import torch


def build_optimizer(parameters, settings):
    """A torch optimizer over `parameters` for the `optimizer` section of a configuration."""
    return OPTIMIZERS[settings.kind](list(parameters), settings)


def learning_rate(settings, progress):
    """Rate when the share `progress` (0..1) of the run is done. cosine: lr/2 * (1 + cos(pi * progress))."""
    return SCHEDULES[settings.schedule](settings.lr, progress)


def set_learning_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


def _adamw(parameters, settings):
    # The fused kernel updates all parameters in one call; torch 1.10 does not have it.
    can_fuse = "fused" in inspect.signature(torch.optim.AdamW).parameters
    return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay, **({"fused": True} if can_fuse else {}))


def _sgd(parameters, settings):
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}
SCHEDULES = {
    "cosine": lambda lr, progress: 0.5 * lr * (1 + math.cos(math.pi * progress)),
    "constant": lambda lr, progress: lr,
}
