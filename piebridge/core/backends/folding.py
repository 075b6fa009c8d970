"""Batch norm folded into the convolutions before it: a network with fewer nodes and the same function in eval mode."""

import numpy as np
import torch

from piebridge.core.network import GraphNetwork, expected_shapes


def batch_norm_scale(arrays, eps):
    """(scale, shift), float64 [C], of a batch norm in eval mode: y = scale x + shift.

    arrays: its weight, bias, running_mean and running_var, numpy [C]; weight and bias may be None.
    """
    weight, bias, mean, variance = [None if each is None else each.astype(np.float64) for each in arrays]
    scale = 1.0 / np.sqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return scale, shift


def fold_batch_norm(network, convert=None):
    """A GraphNetwork of its own tensors, in eval mode, without the batch norms that have a convolution to themselves.

    convert: tensor -> tensor, for each. See `folded`.
    """
    description, tensors = folded(network.description, {key: tensor.detach() for key, tensor in network.state_dict().items()})
    if convert is not None:
        tensors = {key: convert(tensor) for key, tensor in tensors.items()}
    return GraphNetwork(description, tensors).eval().requires_grad_(False)


def folded(description, tensors, left=()):
    """(description, {key: tensor}) of the same function in eval mode, with batch norm folded into the convolution before it.

    w' = w * gamma / sqrt(var + eps), b' = beta + (b - mean) * gamma / sqrt(var + eps), computed in float64. The folded
    convolution has the batch norm's node name, so that block and tap names stay valid. left: names of nodes that stay as they are.
    """
    tensors, nodes, by_name = dict(tensors), [], {node["name"]: node for node in description["nodes"]}
    uses, gone = _uses(description), set()
    for node in description["nodes"]:
        source = by_name.get(node["inputs"][0]) if node["inputs"] else None
        is_free = node["name"] not in left and (source is None or source["name"] not in left)
        if is_free and node["operation"] == "BatchNorm2d" and _is_foldable(node, source, uses, description):
            tensors.update(_folded_tensors(node, source, tensors))
            node = dict(source, name=node["name"], arguments=dict(source["arguments"], bias=True))
            gone.add(source["name"])
        nodes.append(node)
    description = dict(description, nodes=[node for node in nodes if node["name"] not in gone])
    return description, {key: tensors[key] for key in expected_shapes(description)}


def _uses(description):
    """How often each node's output is read and each module is called: {name or ("module", path): count}."""
    counts = {}
    for node in description["nodes"]:
        for key in node["inputs"] + [("module", node.get("module"))]:
            counts[key] = counts.get(key, 0) + 1
    for name in [description["tap"]] + [block[end] for block in description["blocks"] for end in ("input", "output")]:
        counts[name] = counts.get(name, 0) + 1
    return counts


def _is_foldable(norm, source, uses, description):
    if source is None or source["operation"] != "Conv2d" or not norm["arguments"]["track_running_stats"]:
        return False
    return all(uses[key] == 1 for key in (source["name"], ("module", source["module"]), ("module", norm["module"])))


def _folded_tensors(norm, conv, tensors):
    def array(path, name):
        tensor = tensors.get(path + "." + name)
        return None if tensor is None else tensor.cpu().numpy()
    weight, bias = tensors[conv["module"] + ".weight"], array(conv["module"], "bias")
    arrays = [array(norm["module"], name) for name in ("weight", "bias", "running_mean", "running_var")]
    scale, shift = batch_norm_scale(arrays, norm["arguments"]["eps"])
    bias = shift if bias is None else bias * scale + shift
    scale = torch.from_numpy(scale).to(weight.device)
    return {conv["module"] + ".weight": (weight.double() * scale[:, None, None, None]).to(weight.dtype),
            conv["module"] + ".bias": torch.from_numpy(bias).to(weight.device, weight.dtype)}
