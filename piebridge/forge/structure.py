"""The structure of a network: its frozen blocks, and the groups of channels that can be cut inside them.

Pruning with independent dimensions, as PieBridge does it: only what lies *inside* a block is cut, so each block's input and
output keep their shapes, and a block of any proxy can stand for that of any other.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from piebridge.core import graph, operations
from piebridge.core.capture import capture
from piebridge.core.costs import network_costs
from piebridge.core.cutting import argument_factors, axis_size, factors_of
from piebridge.core.descriptions import read_description
from piebridge.core.dimension_rules import analyse
from piebridge.core.dimensions import fix, leaves
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.networks import ARCHITECTURES, load_network
from piebridge.core.packages import one_line
from piebridge.forge.blocks import find_blocks, kind_of


@dataclass(frozen=True)
class Group:
    """What is cut together: index i of the group is one slice of each of its tensors.

    size: how many there are. width: channels of the smallest slice, 64 for an attention head of 64. kind: "channels", "heads",
    or "groups" (of a grouped convolution or norm). slices: (state dict key, axis, place): the group is factor `place` of that
    axis (see `Structure.tensors`). reading: those slices whose tensor multiplies the group's values; without them the values
    have no effect.
    """

    name: str
    block: str
    kind: str
    size: int
    width: int
    slices: tuple
    reading: tuple


@dataclass(frozen=True)
class Block:
    """A frozen block. Shapes are of one image, without the batch; tap: the node of its output, where features are compared."""

    name: str
    kind: str
    input_shape: tuple
    output_shape: tuple
    tap: str
    groups: tuple
    macs: int
    parameters: int


@dataclass(frozen=True)
class Structure:
    """Blocks (tuple) and groups ({name: Group}) of a description at an input size; and how sizes follow from what is kept.

    tensors: {(state dict key, axis): axis}. arguments: {node: {argument: axis, or, of "shape", a tuple of axes}}. products:
    {node: [(constant, axis)]}: the node's multiply-accumulates are the sum of constant * size.
    macs, parameters: of the whole network.
    """

    description: dict
    input_size: tuple
    blocks: tuple
    groups: dict
    tensors: dict
    arguments: dict
    products: dict
    macs: int
    parameters: int

    def macs_with(self, counts):
        """Multiply-accumulates of one image when {group: how many are kept}; groups that are not named are whole."""
        return sum(product_size(product, counts) for products in self.products.values() for product in products)


def product_size(product, counts):
    constant, axis = product
    return constant * axis_size(axis, counts)


def structure_of(original, input_size=None):
    """The Structure of a network.

    original: a name, a network file, a GraphNetwork, a description, or a classifier of torchvision, timm or your own that can
    be captured (see core/capture.py). Of a name, no weights are needed. input_size: pixels of the square input; None: the
    network's own (224 for a module). UserError where it cannot be captured, does not run at this size, or has no blocks.
    """
    description = _description_of(original, input_size)
    size = tuple(description["input_size"]) if input_size is None else (3, input_size, input_size)
    empty = {key: torch.empty(shape, device="meta") for key, shape in expected_shapes(description).items()}
    network = GraphNetwork(description, empty).eval()  # computes shapes, and nothing else
    shapes = _shapes(network, size)
    blocks = find_blocks(description, shapes)
    if not blocks:
        raise UserError(f"network {description['name']}: no frozen blocks: nowhere does one value alone carry everything on")
    costs = network_costs(GraphNetwork(dict(description, blocks=blocks), empty), list(size))
    analysis = analyse(description, shapes)
    groups = _groups(description, blocks, analysis)
    names = {leaf: name for name, (_, leaf, _) in groups.items()}
    tensors = {place: factors_of(axis, names) for place, axis in analysis.tensors.items()}
    groups = {name: _group(name, block, kind, leaf.size, tensors, analysis) for name, (block, leaf, kind) in groups.items()}
    return Structure(
        description, size, tuple(_block(network, block, shapes, groups, costs) for block in blocks), groups, tensors,
        {node: {name: argument_factors(name, value, names) for name, value in each.items()}
         for node, each in analysis.arguments.items()},
        {node: [(constant, factors_of(axis, names)) for constant, axis in each] for node, each in analysis.products.items()},
        costs["macs"], costs["parameters"])


def _description_of(original, input_size):
    if isinstance(original, dict):
        return original
    if isinstance(original, GraphNetwork):
        return original.description
    if isinstance(original, nn.Module):
        size = 224 if input_size is None else input_size
        return capture(original, type(original).__name__, [3, size, size], [0.5] * 3, [0.5] * 3).description
    if not isinstance(original, (str, Path)):
        raise UserError(f"a {type(original).__name__} is no network: give a name, a network file or a torch.nn.Module")
    text = str(original)
    return read_description(text) if text in ARCHITECTURES else load_network(text).description


def _shapes(network, size):
    shapes = {graph.INPUT: (1,) + size}
    try:
        with torch.no_grad():
            network.observe(torch.empty(shapes[graph.INPUT], device="meta"),
                            lambda name, value: shapes.update({name: tuple(value.shape)}))
    except RuntimeError as error:
        own = network.description["input_size"]
        raise UserError(f"network {network.description['name']}: does not run on images of {size[1]} x {size[2]} pixels, its own "
                        f"size is {own[1]} x {own[2]} ({one_line(error)})") from None
    return shapes


def _groups(description, blocks, analysis):
    """{name: (block, dimension, kind)} for each free dimension whose tensors all belong to one block, in the network's order."""
    block_of = {}
    for block in blocks:
        block_of.update((node["name"], block["name"]) for node in graph.block_nodes(description, block))
    for name in [description["tap"], description["output"]] + [block[key] for block in blocks for key in ("input", "output")]:
        fix(*analysis.values[name])
    owners, first_keys, is_read = {}, {}, set()
    for (key, number), axis in analysis.tensors.items():
        for leaf in leaves(axis):
            owners.setdefault(leaf, set()).update(block_of.get(user) for user in analysis.users[key, number])
            first_keys.setdefault(leaf, key)
            is_read |= {leaf} if (key, number) in analysis.reading else set()
    heads = {leaf for axis in analysis.heads for leaf in leaves(axis)}
    groups = {}
    for leaf, blocks_of_leaf in owners.items():
        if leaf.is_fixed or leaf not in is_read or len(blocks_of_leaf) > 1 or None in blocks_of_leaf:
            continue
        name = first_keys[leaf][:-len(".weight")] if first_keys[leaf].endswith(".weight") else first_keys[leaf]
        while name in groups:
            name += "+"
        groups[name] = (blocks_of_leaf.pop(), leaf, "heads" if leaf in heads else "channels")
    return groups


def _group(name, block, kind, size, tensors, analysis):
    places = [(key, number, place) for (key, number), axis in tensors.items() for place, factor in enumerate(axis)
              if factor.group == name]
    width = math.gcd(*[axis_size(tensors[key, number], {name: 1}) for key, number, _ in places])
    reading = tuple(place for place in places if place[:2] in analysis.reading)
    return Group(name, block, "groups" if kind == "channels" and width > 1 else kind, size, width, tuple(places), reading)


def _block(network, block, shapes, groups, costs):
    description = network.description
    keys = set()
    for node in graph.block_nodes(description, block):
        keys.update(f"{node['module']}.{name}" for name in operations.tensor_shapes(node["operation"], node["arguments"]))
        keys.update([node["parameter"]] if "parameter" in node else [])
    sizes = {key: parameter.numel() for key, parameter in network.named_parameters() if key in keys}
    return Block(block["name"], kind_of(description, block), shapes[block["input"]][1:], shapes[block["output"]][1:],
                 block["output"], tuple(name for name, group in groups.items() if group.block == block["name"]),
                 costs["blocks"][block["name"]], sum(sizes.values()))
