"""Bottleneck adapters (Houlsby et al. 2019): y = x + up(act(down(x))) behind a block, as ordinary nodes of the network."""

import torch

from piebridge.core import graph
from piebridge.core.added_nodes import binary_node, conv_node, fresh_tensors, function_node, linear_node, value_shapes
from piebridge.core.errors import UserError
from piebridge.core.pet_structure import Structure, check_width, chosen_blocks, head_keys

PREFIX = "adapters."  # of the adapters' modules


def adapter(network, settings):
    """An adapter of width r behind each chosen block, and the head. up is zero at first, so that training starts at the original.

    Behind [N, C, H, W] down and up are 1x1 convolutions around a ReLU, behind [N, T, D] linear layers around a GELU.
    """
    original, blocks = network.description, chosen_blocks(network, settings)
    if not blocks:
        raise UserError(f"pet.kind=adapter: network {original['name']} has no blocks that an adapter could stand behind; use pet.kind=lora")
    if any(node.get("module", "").startswith(PREFIX) for node in original["nodes"]):
        raise UserError(f"pet.kind=adapter: network {original['name']} has adapters already; give the original it was made of, or use "
                        "pet.kind=head")
    shapes = value_shapes(network, [block["output"] for block in blocks])
    check_width(network, settings, max(_channels(shape) for shape in shapes.values()))
    layers, added = {}, {}
    for block in blocks:
        layers[block["output"]] = nodes = _adapter(block, shapes[block["output"]], settings.r)
        added.update(_tensors(nodes, network.head.weight))

    def edit(description):
        return _with_adapters(description, original["blocks"], layers)
    return Structure(list(added) + head_keys(network), edit, added)


def _adapter(block, shape, width):
    """The nodes of an adapter behind values of `shape`; the first and the last read a node that is known when they are inserted."""
    is_map, channels = len(shape) == 3, _channels(shape)
    prefix, path = block["output"] + "_adapter", PREFIX + block["name"].replace(".", "_")
    layer = conv_node if is_map else linear_node
    down, up = [f"{prefix}_{part}" for part in ("down", "up")]
    return [dict(layer(f"{path}.down", None, channels, width), name=down),
            function_node(f"{prefix}_act", "relu" if is_map else "gelu", [down]),
            dict(layer(f"{path}.up", f"{prefix}_act", width, channels), name=up),
            binary_node(f"{prefix}_add", "add", None, up)]


def _channels(shape):
    """Of values [C, H, W] or [T, D]."""
    return shape[0] if len(shape) == 3 else shape[-1]


def _tensors(nodes, like):
    """{key: Parameter} of an adapter, of the type and on the device of `like`: as torch initialises `down`, zero biases, a zero `up`."""
    tensors = fresh_tensors(nodes, like)
    with torch.no_grad():
        for key, tensor in tensors.items():
            if key.endswith(".bias") or ".up." in key:
                tensor.zero_()
    return tensors


def _with_adapters(description, blocks, layers):
    """The description of the original or of a level with all adapters inserted.

    blocks: of the original. layers: {block output: nodes}. Where a level lacks a block, its adapter stands behind what the block's
    input has become, that is behind the adapters of the blocks before it.
    """
    known = {node["name"] for node in description["nodes"]} | {graph.INPUT}
    inputs = {block["output"]: block["input"] for block in blocks}
    last = {}  # node: the end of what was inserted behind it
    for block in blocks:
        if block["output"] not in layers:
            continue
        name = block["output"]
        while name not in known:
            name = inputs[name]
        place = last.get(name, name)
        down, act, up, add = layers[block["output"]]
        nodes = [dict(down, inputs=[place]), act, up, dict(add, inputs=[place, up["name"]])]
        description = graph.insert_after(description, place, nodes)
        last[name] = add["name"]
    return description
