"""Losses by name: (outputs, targets) -> float [B], one per sample."""

import functools

import torch.nn.functional as F

from piebridge.core.errors import UserError
from piebridge.core.names import closest


def cross_entropy(outputs, targets, label_smoothing=0.0):
    """outputs [B, C], targets int [B]."""
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=label_smoothing)


def token_cross_entropy(outputs, targets):
    """outputs [B, T, V], targets int [B, T], -100 where there is none: the mean over each sample's targets."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100).view(targets.shape)
    counts = (targets != -100).sum(1).clamp(min=1)
    return losses.sum(1) / counts


def smoothed(label_smoothing):
    """Cross entropy against targets of which the share `label_smoothing` (0..1) is spread over all classes."""
    return functools.partial(cross_entropy, label_smoothing=label_smoothing)


LOSSES = {"cross_entropy": cross_entropy, "token_cross_entropy": token_cross_entropy}


def loss_of(name):
    """The loss of this name; UserError where there is none."""
    if name not in LOSSES:
        raise UserError(f"loss {name!r}: unknown{closest(name, LOSSES)}; known: {', '.join(LOSSES)}")
    return LOSSES[name]
