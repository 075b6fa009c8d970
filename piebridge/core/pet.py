"""What is trainable, and how it gets back into the original."""

import torch
from torch import nn


def build_trainable(network, kind):
    """The trainable module for a PET kind; `network` has a fresh head already.

    `head`: the final linear layer, fed with features [N, D] at its tap. `all`: the whole network, fed with images (FTAll).
    """
    return PET_KINDS[kind](network)


def bridge(network, trainable, kind):
    """Put the trainable part into the original, in place: float tensors are copied, nothing else of the original changes."""
    if trainable is network:
        return network
    with torch.no_grad():
        target = network.head.state_dict()
        for name, tensor in trainable.state_dict().items():
            target[name].copy_(tensor)
    return network


def count_trainable(module):
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _head(network):
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    network.eval()  # frozen batch norm uses its running statistics
    head = nn.Linear(network.head.in_features, network.head.out_features)
    head.load_state_dict(network.head.state_dict())
    return head


def _all(network):
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    return network.train()


PET_KINDS = {"head": _head, "all": _all}
