"""Prune a network inside its blocks: a smaller network of the same kind, whose blocks have the same inputs and outputs."""

import copy

import torch
from torch import nn

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.core.network import GraphNetwork
from piebridge.core.slices import cut
from piebridge.forge.structure import axis_size, structure_of


def prune(network, kept, structure=None):
    """The network with only the named indices of each group, in the same mode.

    network: a GraphNetwork. kept: {group name: indices to keep, each once}; groups that are not named stay whole. structure: of
    this network, where it is at hand. A parameter of which nothing is cut is the same object in both networks; buffers are
    copies. Batch-norm statistics are sliced, not measured anew. UserError for an unknown group, or indices not of it.
    """
    structure = structure or structure_of(network)
    kept = _checked(structure, kept)
    counts = {name: len(indices) for name, indices in kept.items()}
    description = copy.deepcopy(network.description)
    for node in description["nodes"]:
        for name, value in structure.arguments.get(node["name"], {}).items():
            node["arguments"][name] = _argument(node["arguments"][name], name, value, counts)
    tensors = {key: buffer.detach().clone() for key, buffer in network.named_buffers()}
    tensors.update(network.named_parameters())
    for key, slices in _cuts(structure, kept).items():
        whole = tensors[key]
        part = cut(whole.detach(), slices).clone()
        tensors[key] = nn.Parameter(part, whole.requires_grad) if isinstance(whole, nn.Parameter) else part
    return GraphNetwork(description, tensors).train(network.training)


def tensor_cuts(structure, kept):
    """{state dict key: [(axis, positions)]}: which slices of the original's tensors `prune(network, kept)` keeps.

    kept: {group name: indices to keep, each once}. See core/slices.py; axes that are cut alike share one list. Tensors of which
    nothing is cut or moved are left out. UserError as `prune` has it.
    """
    return _cuts(structure, _checked(structure, kept))


def _cuts(structure, kept):
    cuts, lists = {}, {}
    for (key, number), axis in structure.tensors.items():
        if any(factor.group in kept for factor in axis):
            if axis not in lists:
                lists[axis] = _positions(axis, kept).tolist()
            cuts.setdefault(key, []).append((number, lists[axis]))
    return cuts


def _argument(given, name, value, counts):
    if name == "shape":  # -1 stands for the batch
        return [-1 if old == -1 else axis_size(axis, counts) for old, axis in zip(given, value)]
    return axis_size(value, counts)


def _positions(axis, kept):
    """Positions along an axis, a product of factors, of what is kept of each factor."""
    positions = torch.arange(axis_size(axis, {})).reshape([factor.size for factor in axis])
    for place, factor in enumerate(axis):
        if factor.group in kept:
            positions = positions.index_select(place, kept[factor.group])
    return positions.flatten()


def _checked(structure, kept):
    """{group: int64 tensor} of the groups of which something is cut or moved."""
    checked = {}
    for name, indices in kept.items():
        where = f"network {structure.description['name']}: group {name!r}"
        if name not in structure.groups:
            raise UserError(f"{where}: no such group{closest(name, list(structure.groups))}")
        size, indices = structure.groups[name].size, [int(index) for index in indices]
        if not indices:
            raise UserError(f"{where}: keep at least one of its {size}")
        wrong = [index for index in indices if not 0 <= index < size]
        if wrong or len(set(indices)) < len(indices):
            what = f"index {wrong[0]} is" if wrong else "an index twice is"
            raise UserError(f"{where}: {what} not possible; its indices are 0 to {size - 1}, each at most once")
        if indices != list(range(size)):
            checked[name] = torch.tensor(indices)
    return checked
