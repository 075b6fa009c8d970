"""Graphs without in-place operators: what passes may then take for granted is that a value stays what it was computed to be."""

import torch

from piebridge.engine import compat


def is_functional(graph):
    return not any(_is_in_place(node) for node in graph.nodes)


def functionalise(traced, examples, decompositions):
    """GraphModule that computes what `traced` does, lowered by `decompositions`, without in-place operators.

    Nearly all of them are autograd's own sums, into tensors that nothing else reads: they become the operator of the same name that is
    not in place. Where one is left, the calls are traced once more under functionalize, which takes as long as the first trace; autograd
    cannot run inside it, so the module itself cannot be traced in that way.
    """
    order = {node: position for position, node in enumerate(traced.graph.nodes)}
    for node in order:
        if _is_in_place(node) and not _has_another_name(node, order) and not _converts(node):
            plain = _plain(node.target)
            if plain is not None and plain not in decompositions:
                _replace(node, plain, order)
    traced.recompile()
    if is_functional(traced.graph):
        return traced
    return compat.trace(compat.functionalised(traced), examples, decompositions)


def _is_in_place(node):
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _has_another_name(node, order):
    """Whether the memory that a node writes is an input's, or is read later through another node than the one that it is given."""
    names = [other for other in order if order[other] < order[node] and _storage(other) == _storage(node.args[0])]
    is_read = any(order[user] > order[node] for other in names if other is not node.args[0] for user in other.users)
    return is_read or any(name.op == "placeholder" for name in names)


def _storage(node):
    value = node.meta.get("val")
    return compat.storage_key(value) if isinstance(value, torch.Tensor) else node


def _converts(node):
    """Whether a result may be rounded to the type of what it is written into."""
    values = [other.meta.get("val") for other in node.all_input_nodes]  # None for a constant
    return any(value is None for value in values) or len({value.dtype for value in values if value.dim() > 0}) > 1


def _plain(operator):
    """`add.Tensor` for `add_.Tensor`; None where there is no such, or where more than the first argument is written."""
    name = operator.overloadpacket.__name__
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in operator._schema.arguments]
    packet = getattr(compat.aten(), name[:-1], None) if name.endswith("_") and written[0] and not any(written[1:]) else None
    return getattr(packet, operator._overloadname, None)


def _replace(node, plain, order):
    source = node.args[0]
    node.target = plain
    source.replace_all_uses_with(node, delete_user_cb=lambda user: order[user] > order[node])
