"""What a network costs: multiply-accumulates (MACs) and parameters, whole and per block."""

import contextlib

import torch

from piebridge.core import graph


def network_costs(network, input_size=None):
    """{"macs", "parameters", "blocks": {block name: MACs}} of a GraphNetwork; MACs are for one image.

    input_size: pixels of the square input, or [3,H,W]; None: the description's. Convolutions, matrix products and attention
    count; what only adds, scales, normalises or pools does not, as usual. The network runs once, on one image of zeros, and is
    left as it was.
    """
    size = network.description["input_size"] if input_size is None else input_size
    size = [3, size, size] if isinstance(size, int) else list(size)
    by_node = _macs_by_node(network, size)
    blocks = {block["name"]: sum(by_node[node["name"]] for node in graph.block_nodes(network.description, block))
              for block in network.description["blocks"]}
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {"macs": sum(by_node.values()), "parameters": parameters, "blocks": blocks}


def _macs_by_node(network, input_size):
    nodes = graph.nodes_by_name(network.description)
    shapes, macs = {}, {}
    # an empty batch has the shapes of one image at none of the cost; but a shape that mixes images with positions would be lost in it
    images = 1 if any(node["operation"] == "reshape" for node in nodes.values()) else 0

    def note(name, value):
        shapes[name] = value.shape if images else torch.Size((1,) + tuple(value.shape)[1:])
        macs[name] = _macs(network, nodes[name], shapes)

    first = next(network.parameters())
    image = torch.zeros([images] + input_size, device=first.device, dtype=first.dtype)
    with torch.no_grad(), eval_mode(network):
        network.observe(image, note)
    return macs


def _macs(network, node, shapes):
    outputs = shapes[node["name"]].numel()
    if node["operation"] in ("Conv2d", "Linear"):
        weight = network.get_submodule(node["module"]).weight
        return outputs * weight[0].numel()  # weight [out, in/groups, ...]: products per output value
    if node["operation"] in ("linear", "matmul"):
        return outputs * shapes[node["inputs"][0]][-1]
    if node["operation"] == "attention":  # q k^T, then its product with v: both [N,heads,T,T] x [N,heads,T,D]
        query, key = (shapes[name] for name in node["inputs"][:2])
        return query.numel() * key[-2] + outputs * key[-2]
    return 0


@contextlib.contextmanager
def eval_mode(network):
    """Eval mode inside, and afterwards whatever each module's mode was."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
