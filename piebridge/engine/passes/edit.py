"""Small tools for editing a step's graph."""

import torch

from piebridge.engine import compat
from piebridge.engine.step_graph import BUFFER, FROZEN, TRAINED


def aten():
    return compat.aten()


def insert(step, target, *arguments, **options):
    """A call at the graph's insertion point, its `meta["val"]` filled in. Arguments: nodes, numbers, lists.

    What the operator raises for these arguments passes through, and the graph is as before.
    """
    values, named = torch.fx.map_arg((arguments, options), lambda each: each.meta["val"])
    with compat.fake_mode_of(step.placeholders[0].meta["val"]), torch.no_grad():
        value = target(*values, **named)
    node = step.graph.call_function(target, arguments, options)
    node.meta["val"] = value
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


def still_nodes(step):
    """The nodes that nothing of this step's batch goes into: weights, statistics, and what is made of them."""
    still = {node for node, value in zip(step.placeholders, step.inputs) if value.role in (TRAINED, FROZEN, BUFFER)}
    for node in step.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and set(node.all_input_nodes) <= still and not is_random(node)):
            still.add(node)
    return still


def per_channel(node, value, still):
    """The operand [C, 1, 1] out of `still` that `node` adds to `value` [B, C, *], subtracts, multiplies or divides it by; or None."""
    operators = aten()
    if not is_call(node, operators.add.Tensor, operators.sub.Tensor, operators.mul.Tensor, operators.div.Tensor) or node.kwargs:
        return None
    operands = node.args
    if operands[1] is value and is_call(node, operators.add.Tensor, operators.mul.Tensor):
        operands = operands[::-1]
    operand, extents = operands[1], list(shape(value))
    if operands[0] is not value or operand not in still or len(extents) < 3 or dtype(operand) != dtype(value):
        return None
    wanted = [extent if dim == 1 else 1 for dim, extent in enumerate(extents)]
    return operand if [1] * (len(wanted) - len(shape(operand))) + list(shape(operand)) == wanted else None


def along(step, vector, other, dim):
    """A vector [n], in whatever shape it has, seen so that it goes along dimension `dim` of `other`."""
    return insert(step, aten().view.default, vector, [-1 if each == dim else 1 for each in range(len(shape(other)))])


def laid_out_like(step, node, new):
    """`new`, or a copy of it that has the strides of `node`: what reads it may be a view that other strides do not allow."""
    if strides(new) == strides(node):
        return new
    layouts = (torch.contiguous_format, torch.channels_last) if len(shape(node)) == 4 else (torch.contiguous_format,)
    layout = next((each for each in layouts if node.meta["val"].is_contiguous(memory_format=each)), torch.contiguous_format)
    return insert(step, aten().clone.default, new, memory_format=layout)
