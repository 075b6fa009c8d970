"""Shapes, types, strides and storages of a graph's values, computed anew after an edit."""

import torch

from piebridge.core.errors import UserError
from piebridge.engine import compat


def propagate(step):
    """Fill in each node's `meta["val"]`, a fake tensor; values that share memory when they run share a fake storage. Returns step.

    UserError where an operator refuses the shapes it gets, which is a mistake in a pass.
    """
    mode = compat.fake_mode()
    values = {}
    with mode, torch.no_grad():
        inputs = iter(step.inputs)
        for node in step.graph.nodes:
            if node.op == "placeholder":
                value = next(inputs)
                values[node] = _input(value, node.meta.get("val"))
            elif node.op == "get_attr":
                constant = getattr(step.graph_module, node.target)
                values[node] = mode.from_tensor(constant)
            elif node.op == "call_function":
                arguments = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    values[node] = node.target(*arguments[0], **arguments[1])
                except Exception as error:
                    reason = (str(error).splitlines() or [""])[0][:160]
                    raise UserError(f"engine: {node.name} = {node.target}: {type(error).__name__}: {reason}") from error
            if node.op != "output":
                node.meta["val"] = values[node]
    return step


def _input(value, like):
    """like: what stood there before; its strides and device stay where its shape does."""
    if like is None or tuple(like.shape) != value.shape:
        return torch.empty(value.shape, dtype=value.dtype)
    return torch.empty_strided(value.shape, like.stride(), dtype=value.dtype, device=like.device)


def insert(step, operator, *arguments, **keywords):
    """A call at the graph's insertion point, its `meta["val"]` filled in from its arguments'; returns the node."""
    node = step.graph.call_function(operator, arguments, keywords)
    given = torch.fx.map_arg((arguments, keywords), lambda argument: argument.meta["val"])
    with compat.fake_mode_of(step.placeholders[0].meta["val"]), torch.no_grad():
        node.meta["val"] = operator(*given[0], **given[1])
    return node


def insert_constant(step, name, tensor):
    """The node of a constant of the graph module, made unless it is there; for a pass's own fixed tables."""
    for node in step.graph.nodes:
        if node.op == "get_attr" and node.target == name:
            return node
    step.graph_module.register_buffer(name, tensor)
    first = next(node for node in step.graph.nodes if node.op != "placeholder")
    with step.graph.inserting_before(first):
        node = step.graph.get_attr(name)
    node.meta["val"] = compat.fake_mode_of(step.placeholders[0].meta["val"]).from_tensor(tensor)
    return node
