"""Update rules and learning-rate schedules by name."""

import inspect
import math

import torch


def build_optimizer(parameters, settings):
    """A torch optimizer over `parameters` for the `optimizer` section of a configuration."""
    return OPTIMIZERS[settings.kind](list(parameters), settings)


def learning_rate(settings, step, total_steps):
    """Rate of the given step, counted from 0. cosine: lr/2 * (1 + cos(pi * step / total_steps))."""
    return SCHEDULES[settings.schedule](settings.lr, step, total_steps)


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
    "cosine": lambda lr, step, total: 0.5 * lr * (1 + math.cos(math.pi * step / max(1, total))),
    "constant": lambda lr, step, total: lr,
}
