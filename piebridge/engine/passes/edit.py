"""Small tools for editing a step's graph."""

import torch

from piebridge.engine import compat


def aten():
    return compat.aten()


def insert(step, target, *arguments, **options):
    """A call at the graph's insertion point, its `meta["val"]` filled in. Arguments: nodes, numbers, lists."""
    node = step.graph.call_function(target, arguments, options)
    values, named = torch.fx.map_arg((arguments, options), lambda each: each.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*values, **named)
    return node


def shape(node):
    return tuple(node.meta["val"].shape)


def strides(node):
    return tuple(node.meta["val"].stride())


def dtype(node):
    return node.meta["val"].dtype


def is_call(node, *targets):
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in targets


def is_view(node):
    """Its result is the first argument's memory seen otherwise."""
    return node.op == "call_function" and getattr(node.target, "is_view", False)


def is_random(node):
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def replace(step, node, by):
    """Let all users read `by` and take the node away. Returns 1, to be counted."""
    node.replace_all_uses_with(by)
    step.graph.erase_node(node)
    return 1


def erase_unused(step, node):
    """Take a node away, and what only it has read."""
    if node.users or node.op == "placeholder":
        return
    read = node.all_input_nodes
    step.graph.erase_node(node)
    for each in read:
        erase_unused(step, each)
