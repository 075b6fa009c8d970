"""Prune a network inside its blocks: a smaller network of the same kind, whose blocks have the same inputs and outputs."""

import torch

from piebridge.core.cutting import cut_network, tensor_slices
from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.forge.structure import structure_of


def prune(network, kept, structure=None):
    """The network with only the named indices of each group, in the same mode.

    network: a GraphNetwork. kept: {group name: indices to keep, each once}; groups that are not named stay whole. structure: of
    this network, where it is at hand. A parameter of which nothing is cut is the same object in both networks; buffers are
    copies. Batch-norm statistics are sliced, not measured anew. UserError for an unknown group, or indices not of it.
    """
    structure = structure or structure_of(network)
    return cut_network(network, structure, _checked(structure, kept))


def tensor_cuts(structure, kept):
    """{state dict key: [(axis, positions)]}: which slices of the original's tensors `prune(network, kept)` keeps.

    kept: {group name: indices to keep, each once}. See core/slices.py; axes that are cut alike share one list. Tensors of which
    nothing is cut or moved are left out. UserError as `prune` has it.
    """
    return tensor_slices(structure, _checked(structure, kept))


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
