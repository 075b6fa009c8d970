"""Nodes for what is added to a network's description, with all of their arguments, and fresh tensors for them."""

import torch

from piebridge.core import operations


def function_node(name, operation, inputs, **arguments):
    return {"name": name, "operation": operation, "inputs": list(inputs), "arguments": arguments}


def binary_node(name, operation, first, second):
    """add, sub, mul or div of two nodes, or of a node and a number."""
    if isinstance(second, str):
        return function_node(name, operation, [first, second], value=None)
    return function_node(name, operation, [first], value=second)


def module_node(name, operation, source, **arguments):
    """A module at the path `name`, whose dots are underlines in the node's name."""
    return dict(function_node(name.replace(".", "_"), operation, [source], **arguments), module=name)


def parameter_node(name, shape):
    """A parameter at the path `name`."""
    return dict(function_node(name.replace(".", "_"), operations.PARAMETER, [], shape=list(shape)), parameter=name)


def linear_node(name, source, in_features, out_features):
    return module_node(name, "Linear", source, in_features=in_features, out_features=out_features, bias=True)


def conv_node(name, source, in_channels, out_channels, kernel_size=1, groups=1):
    """A convolution that keeps the map's size."""
    return module_node(name, "Conv2d", source, in_channels=in_channels, out_channels=out_channels, kernel_size=[kernel_size] * 2,
                       stride=[1, 1], padding=[kernel_size // 2] * 2, dilation=[1, 1], groups=groups, bias=True, padding_mode="zeros")


def fresh_tensors(nodes, like):
    """{state dict key: torch.nn.Parameter} of the nodes' tensors: as torch initialises modules, zeros for parameters by themselves.

    like: a tensor of the device and type that they shall have.
    """
    tensors = {}
    for node in nodes:
        if node["operation"] == operations.PARAMETER:
            tensors[node["parameter"]] = torch.nn.Parameter(torch.zeros(node["arguments"]["shape"]).to(like))
        elif operations.tensor_shapes(node["operation"], node["arguments"]):
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in node["arguments"].items()}
            module = operations.MODULES[node["operation"]].module(**values).to(like.device, like.dtype)
            tensors.update({f"{node['module']}.{name}": parameter for name, parameter in module.named_parameters()})
    return tensors


def block_values(description, blocks, originals):
    """For each of `blocks` the node of `description` that has its value; for a block left out there, the node that feeds it.

    originals: all blocks of the network that `description` is a proxy of.
    """
    present = {node["name"] for node in description["nodes"]}
    feeder = {block["output"]: block["input"] for block in originals}
    names = []
    for block in blocks:
        name = block["output"]
        while name not in present and name in feeder:
            name = feeder[name]
        names.append(name)
    return names


def value_shapes(network, names):
    """{node name: shape without the batch} of some values of a GraphNetwork, from one image of zeros."""
    first, is_training = next(network.parameters()), network.training
    image = torch.zeros([1] + list(network.description["input_size"]), device=first.device, dtype=first.dtype)
    with torch.no_grad():
        values = network.eval().values(image, names)
    network.train(is_training)
    return {name: tuple(value.shape[1:]) for name, value in values.items()}
