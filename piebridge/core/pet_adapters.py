"""Bottleneck adapters (Houlsby et al. 2019): y = x + up(act(down(x))) behind a block, as ordinary nodes of the network."""

import torch
from torch import nn

from piebridge.core import graph
from piebridge.core.errors import UserError
from piebridge.core.pet_structure import Structure, check_width, chosen_blocks, head_keys


def adapter(network, settings):
    """An adapter of width r behind each chosen block, and the head. up is zero at first, so that training starts at the original.

    Behind [N, C, H, W] down and up are 1x1 convolutions around a ReLU, behind [N, T, D] linear layers around a GELU.
    """
    original, blocks = network.description, chosen_blocks(network, settings)
    if not blocks:
        raise UserError(f"pet.kind=adapter: network {original['name']} has no blocks that an adapter could stand behind; use pet.kind=lora")
    like = network.head.weight
    images = torch.zeros([1] + list(original["input_size"]), device=like.device, dtype=like.dtype)
    with torch.no_grad():
        shapes = {name: value.shape for name, value in network.values(images, [block["output"] for block in blocks]).items()}
    check_width(network, settings, max(_channels(shape) for shape in shapes.values()))
    layers, added = {}, {}
    for block in blocks:
        layers[block["output"]] = nodes = _adapter(block, shapes[block["output"]], settings.r)
        for node in nodes:
            if "module" in node:
                added.update(_tensors(node, like, is_zero=node["name"].endswith("up")))

    def edit(description):
        return _with_adapters(description, original["blocks"], layers)
    return Structure(list(added) + head_keys(network), edit, added)


def _adapter(block, shape, width):
    """The nodes of an adapter behind values of `shape`; the first and the last read a node that is known when they are inserted."""
    is_map, channels = len(shape) == 4, _channels(shape)
    prefix, path = block["output"] + "_adapter", "adapters." + block["name"].replace(".", "_")
    names = {part: f"{prefix}_{part}" for part in ("down", "act", "up", "add")}

    def layer(part, inputs, outputs, source):
        if is_map:
            arguments = {"in_channels": inputs, "out_channels": outputs, "kernel_size": [1, 1], "stride": [1, 1], "padding": [0, 0],
                         "dilation": [1, 1], "groups": 1, "bias": True, "padding_mode": "zeros"}
        else:
            arguments = {"in_features": inputs, "out_features": outputs, "bias": True}
        return {"name": names[part], "operation": "Conv2d" if is_map else "Linear", "module": f"{path}.{part}", "inputs": source,
                "arguments": arguments}
    return [layer("down", channels, width, None),
            {"name": names["act"], "operation": "relu" if is_map else "gelu", "inputs": [names["down"]], "arguments": {}},
            layer("up", width, channels, [names["act"]]),
            {"name": names["add"], "operation": "add", "inputs": None, "arguments": {"value": None}}]


def _channels(shape):
    """Of values [N, C, H, W] or [N, T, D]."""
    return shape[1] if len(shape) == 4 else shape[-1]


def _tensors(node, like, is_zero):
    """{key: Parameter} of an adapter's layer, of the type and on the device of `like`; those of `down` as torch begins them."""
    classes = {"Conv2d": nn.Conv2d, "Linear": nn.Linear}
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in node["arguments"].items()}
    layer = classes[node["operation"]](**arguments)
    nn.init.zeros_(layer.bias)
    if is_zero:
        nn.init.zeros_(layer.weight)
    return {f"{node['module']}.{name}": nn.Parameter(tensor.detach().to(like.device, like.dtype))
            for name, tensor in layer.named_parameters()}


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
