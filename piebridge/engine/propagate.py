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
