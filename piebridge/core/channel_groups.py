"""The channels of a whole network that can go: what belongs to one channel goes together, over residual connections too.

`forge/structure.py` keeps the inputs and outputs of blocks; here all may go that nothing outside the network sees: the logits
stay, and what a norm over channels or a softmax binds together does.
"""

from dataclasses import dataclass

import torch

from piebridge.core import graph
from piebridge.core.costs import eval_mode
from piebridge.core.cutting import argument_factors, factors_of
from piebridge.core.dimension_rules import analyse
from piebridge.core.dimensions import fix, leaves, product, size_of


@dataclass(frozen=True)
class Slices:
    """A weight seen as [before, size, after]: along the middle, a slice for each channel of the group."""

    key: str
    shape: tuple


@dataclass(frozen=True)
class ChannelGroups:
    """groups: {name: tuple of Slices}, of the weights that write or read the channels; a plan of cuts (see core/cutting.py).

    Depthwise weights go with their channels, but have no Slices: they do not say whether a channel is needed.
    """

    groups: dict
    tensors: dict
    arguments: dict


def channel_groups(network):
    """The ChannelGroups of a GraphNetwork, which runs once on an image of zeros and is left as it was."""
    analysis = analyse(network.description, _shapes(network))
    fix(*analysis.values[network.description["output"]])
    names = _names(analysis)
    tensors = {place: factors_of(axis, names) for place, axis in analysis.tensors.items()}
    arguments = {node: {name: argument_factors(name, value, names) for name, value in each.items()}
                 for node, each in analysis.arguments.items()}
    shapes = {key: tuple(parameter.shape) for key, parameter in network.named_parameters()}
    weights = [key for key, number in analysis.reading if size_of(analysis.tensors[key, number]) > 1]  # depthwise ones read one
    groups = {name: [] for name in names.values()}
    for (key, number), axis in tensors.items():
        for place, factor in enumerate(axis):
            if factor.group is not None and key in weights:
                groups[factor.group].append(Slices(key, _view(shapes[key], number, axis, place)))
    return ChannelGroups({name: tuple(slices) for name, slices in groups.items()}, tensors, arguments)


def counts_of(plan, shapes):
    """{group: how many channels it has} in a network whose tensors have these shapes {key: shape}."""
    counts = {}
    for (key, number), axis in plan.tensors.items():
        names = [factor.group for factor in axis if factor.group is not None]
        if len(names) == 1:
            counts[names[0]] = shapes[key][number] // product(factor.size for factor in axis if factor.group is None)
    return counts


def _shapes(network):
    first = next(network.parameters())
    image = torch.zeros([1] + list(network.description["input_size"]), device=first.device, dtype=first.dtype)
    shapes = {graph.INPUT: tuple(image.shape)}
    with torch.no_grad(), eval_mode(network):
        network.observe(image, lambda name, value: shapes.update({name: tuple(value.shape)}))
    return shapes


def _names(analysis):
    """{dimension: group name} of those that are free and are read: a weight multiplies what they hold."""
    is_read = {leaf for place in analysis.reading for leaf in leaves(analysis.tensors[place])}
    names = {}
    for (key, _), axis in analysis.tensors.items():
        for leaf in leaves(axis):
            if leaf in is_read and not leaf.is_fixed and leaf not in names:
                name = key[:-len(".weight")] if key.endswith(".weight") else key
                while name in names.values():
                    name += "+"
                names[leaf] = name
    return names


def _view(shape, number, axis, place):
    sizes = [factor.size for factor in axis]
    before = product(shape[:number]) * product(sizes[:place])
    return before, sizes[place], product(sizes[place + 1:]) * product(shape[number + 1:])
