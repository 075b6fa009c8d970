"""Sparse updates (PockEngine, MICRO'23): some tensors are trained whole, of others some channels, all else is frozen."""

from collections import namedtuple

import torch
from torch import nn

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.core.pet_structure import Structure, head_keys

SUFFIX = "_part"  # of a part's key, behind that of the tensor it is a part of
# whole: key of the tensor; dim, index (int64 [n]): which of its channels the part is
TensorPart = namedtuple("TensorPart", "whole dim index")


def sparse(network, parts):
    """Structure of `parts`, {key: (dimension, list of channels), or None for the whole tensor}, and the head.

    A part is a trained tensor of its own, so that the optimizer's state is as small and weight decay leaves the rest alone.
    """
    parameters = dict(network.named_parameters())
    for key in parts:
        if key not in parameters:
            raise UserError(f"pet.kind=sparse: network {network.description['name']} has no parameter {key!r}{closest(key, parameters)}")
    parts = dict(parts, **dict.fromkeys(head_keys(network)))
    trained, added, known = [], {}, {}
    for key in (key for key in parameters if key in parts):
        if parts[key] is None:
            trained.append(key)
            continue
        dim, channels = parts[key]
        index = torch.tensor(channels, dtype=torch.int64, device=parameters[key].device)
        known[key + SUFFIX] = TensorPart(key, dim, index)
        added[key + SUFFIX] = nn.Parameter(parameters[key].detach().index_select(dim, index))
        trained.append(key + SUFFIX)
    return Structure(trained, added=added, parts=known)


def with_part(whole, part, values):
    """A copy of the tensor `whole` with `values` in the place of the part; gradients go through."""
    return whole.index_copy(part.dim, part.index.to(whole.device), values)


def put_back(tensors, parts):
    """{key: tensor} with each part in its whole. parts: {key: TensorPart}."""
    tensors = dict(tensors)
    for key, part in parts.items():
        tensors[part.whole] = with_part(tensors[part.whole], part, tensors.pop(key))
    return tensors
