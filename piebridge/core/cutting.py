"""Cut channels out of a network: a smaller network of the same kind, a plain `GraphNetwork`.

What is cut together, and where, is told by a *plan of cuts*: any object with `tensors` {(state dict key, axis number): axis} and
`arguments` {node: {argument: axis, or, of "shape", a tuple of axes}}; `core/channel_groups.py` and `forge/structure.py` make such.
"""

import copy
from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn

from piebridge.core.dimensions import leaves, product
from piebridge.core.network import GraphNetwork
from piebridge.core.slices import cut


@dataclass(frozen=True)
class Factor:
    """One factor of an axis; axes are tuples of these, outer first. `group`: that cuts it, or None."""

    size: int
    group: Optional[str]


def factors_of(axis, names):
    """The Factors of an axis of Dimensions; names: {Dimension: group}."""
    return tuple(Factor(leaf.size, names.get(leaf)) for leaf in leaves(axis))


def argument_factors(name, value, names):
    """The same for an argument of a node: one axis, or, of "shape", several."""
    return tuple(factors_of(axis, names) for axis in value) if name == "shape" else factors_of(value, names)


def axis_size(axis, counts):
    """Size of an axis when {group: how many are kept}; groups that are not named are whole."""
    return product(counts.get(factor.group, factor.size) for factor in axis)


def cut_network(network, plan, kept):
    """The network with only the kept indices of each group, in the same mode.

    kept: {group: int64 tensor of the indices to keep, each once}; groups that are not named stay whole. A parameter of which
    nothing is cut is the same object in both networks; buffers are copies. Batch-norm statistics are sliced, not measured anew.
    """
    description = resized(network.description, plan, {name: len(indices) for name, indices in kept.items()})
    tensors = {key: buffer.detach().clone() for key, buffer in network.named_buffers()}
    tensors.update(network.named_parameters())
    for key, slices in tensor_slices(plan, kept).items():
        whole = tensors[key]
        part = cut(whole.detach(), slices).clone()
        tensors[key] = nn.Parameter(part, whole.requires_grad) if isinstance(whole, nn.Parameter) else part
    return GraphNetwork(description, tensors).train(network.training)


def resized(description, plan, counts):
    """A copy of the description when {group: how many are kept}."""
    description = copy.deepcopy(description)
    for node in description["nodes"]:
        for name, value in plan.arguments.get(node["name"], {}).items():
            node["arguments"][name] = _argument(node["arguments"][name], name, value, counts)
    return description


def tensor_slices(plan, kept):
    """{state dict key: [(axis, positions)]} (see core/slices.py) of what is kept; axes that are cut alike share one list."""
    cuts, lists = {}, {}
    for (key, number), axis in plan.tensors.items():
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
