"""LoRA (Hu et al. 2022): W + (alpha / r) B A in place of W, for linear layers, attention projections and 1x1 convolutions."""

import copy
import math
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn

from piebridge.core import graph, operations
from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.core.pet_structure import Structure, check_width, chosen_blocks, head_keys
from piebridge.core.widths import lora_cuts

# down, up: keys of A [r, in, ...] and B [out, r, ...]; weight: of what they add to; scale: alpha / r; dropout: on the input of A
Factors = namedtuple("Factors", "down up weight scale dropout")
JOINT = "linear"  # the operation whose weight is a parameter of its own: torch's joint projection of query, key and value


class LoraLayer(nn.Module):
    """layer(x) + scale * B A dropout(x) for a Linear, or a 1x1 convolution whose stride A takes over."""

    def __init__(self, layer, down, up, scale, dropout):
        """layer: frozen. down: Parameter A [r, in] or [r, in, 1, 1]; up: Parameter B [out, r] or [out, r, 1, 1]."""
        super().__init__()
        self.layer, self.lora_A, self.lora_B, self.scale = layer, down, up, scale
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x):
        y = self.dropout(x)
        if isinstance(self.layer, nn.Linear):
            return self.layer(x) + self.scale * F.linear(F.linear(y, self.lora_A), self.lora_B)
        return self.layer(x) + self.scale * F.conv2d(F.conv2d(y, self.lora_A, stride=self.layer.stride), self.lora_B)


def lora(network, settings):
    """A and B of r rows and columns for each target, and the head; A Kaiming uniform, B zero, so that training starts at the original."""
    targets = _targets(network, settings)
    joint = {path for path, node in targets.items() if node["operation"] == JOINT}
    check_width(network, settings, max(max(_weight(network, node).shape[:2]) for node in targets.values()))
    like = network.head.weight
    added, factors = {}, {}
    for path, node in targets.items():
        outputs, inputs, *rest = _weight(network, node).shape
        down = nn.init.kaiming_uniform_(torch.empty([settings.r, inputs] + rest), a=math.sqrt(5))
        tensors = {f"{path}.lora_A": down, f"{path}.lora_B": torch.zeros([outputs, settings.r] + rest)}
        added.update({key: nn.Parameter(tensor.to(like.device, like.dtype)) for key, tensor in tensors.items()})
        factors[path] = Factors(*tensors, f"{path}.weight", settings.alpha / settings.r, settings.dropout)
    renamed = {f"{path}.{name}": key for path in joint for name, key in _joint_keys(network.description, targets[path]).items()}
    return Structure(list(added) + head_keys(network), lambda description: _with_modules(description, joint), added, renamed, factors)


def put_lora(network, tensors, factors):
    """Put a LoraLayer into the place of each target that the network has; returns the network."""
    for path, entry in factors.items():
        holder, (*parents, key) = network, path.split(".")
        for part in parents:
            holder = holder._modules.get(part, nn.Module())
        if key in holder._modules:
            layer = holder._modules[key]
            holder._modules[key] = LoraLayer(layer, tensors[entry.down], tensors[entry.up], entry.scale, entry.dropout)
    return network


def factor_cuts(cuts, factors):
    """Cuts of all A and B that follow from those of the weights, see `widths.lora_cuts`."""
    return lora_cuts(cuts, {entry.weight: (entry.down, entry.up) for entry in factors.values()})


def merged(tensors, factors):
    """{key: tensor} without A and B: each weight is W + scale B A, computed in float64."""
    tensors = dict(tensors)
    for entry in factors.values():
        up, down = tensors.pop(entry.up).double(), tensors.pop(entry.down).double()
        weight = tensors[entry.weight]
        change = entry.scale * up.flatten(1) @ down.flatten(1)
        tensors[entry.weight] = (weight.double() + change.view_as(weight)).to(weight.dtype)
    return tensors


def _targets(network, settings):
    """{module path: node} of the layers that `pet.target` names, in order; without it all that LoRA knows, but for the head."""
    description = network.description
    blocks = chosen_blocks(network, settings)
    inside = {node["name"] for block in blocks for node in graph.block_nodes(description, block)}
    able = {_path(description, node): node for node in description["nodes"] if _is_able(description, node)}
    for target in settings.target:
        if not any(_is_named(path, target) for path in able):
            words = sorted(set(able) | {path.rpartition(".")[2] for path in able})
            raise UserError(f"pet.target={target}: network {description['name']} has no linear layer or 1x1 convolution of that name"
                            f"{closest(target, words)}; names are the last parts of paths such as {', '.join(list(able)[:4])}")
    chosen = {path: node for path, node in able.items()
              if (settings.blocks == "all" or node["name"] in inside)
              and (not settings.target or any(_is_named(path, target) for target in settings.target))}
    if not chosen:
        raise UserError(f"pet.kind=lora: no layer of network {description['name']} is in pet.blocks={settings.blocks} and "
                        f"pet.target={', '.join(settings.target) or 'any'}; name other blocks or targets")
    return chosen


def _is_named(path, target):
    return path == target or path.endswith("." + target)


def _is_able(description, node):
    arguments = node["arguments"]
    if node["operation"] == "Conv2d":
        is_pointwise = operations.pair(arguments["kernel_size"]) == [1, 1] and not any(operations.pair(arguments["padding"]))
        return is_pointwise and arguments["groups"] == 1
    if node["operation"] == JOINT:
        return _joint_keys(description, node) is not None
    return node["operation"] == "Linear" and node["module"] != description["head"]


def _joint_keys(description, node):
    """{"weight": key, "bias": key} of a function `linear` whose weight and bias are parameters that nothing else reads, else None."""
    by_name = graph.nodes_by_name(description)
    owners = [by_name.get(name) for name in node["inputs"][1:]]
    names = [name for each in description["nodes"] for name in each["inputs"]]
    if any(owner is None or "parameter" not in owner or names.count(owner["name"]) > 1 for owner in owners):
        return None
    return dict(zip(("weight", "bias"), [owner["parameter"] for owner in owners]))


def _path(description, node):
    """Of a joint projection the name that peft and torch give it: `in_proj` for `in_proj_weight`."""
    if node["operation"] != JOINT:
        return node["module"]
    weight = _joint_keys(description, node)["weight"]
    return weight[:-len("_weight")] if weight.endswith("_weight") else weight + "_projection"


def _weight(network, node):
    key = f"{node['module']}.weight" if "module" in node else _joint_keys(network.description, node)["weight"]
    return dict(network.named_parameters())[key]


def _with_modules(description, joint):
    """The description in which each joint projection whose path is in `joint` is a Linear: what LoRA can stand in for."""
    if not joint:
        return description
    description = copy.deepcopy(description)
    by_name, gone = graph.nodes_by_name(description), set()
    for node in description["nodes"]:
        if node["operation"] == JOINT and _joint_keys(description, node) and _path(description, node) in joint:
            outputs, inputs = by_name[node["inputs"][1]]["arguments"]["shape"]
            gone.update(node["inputs"][1:])
            path, has_bias = _path(description, node), len(node["inputs"]) > 2
            node.update(operation="Linear", module=path, inputs=node["inputs"][:1],
                        arguments={"in_features": inputs, "out_features": outputs, "bias": has_bias})
    description["nodes"] = [node for node in description["nodes"] if node["name"] not in gone]
    return description
