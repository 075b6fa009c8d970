"""What depends on frozen tensors alone is computed once, before the first step."""

import torch

from piebridge.engine.passes import edit
from piebridge.engine.step_graph import BUFFER, FROZEN, Value

LARGEST_GROWTH = 4 << 20  # bytes by which a folded value may exceed what it is made of: a mask may, a batch of positions may not
ROLES = (FROZEN, BUFFER)


class Constants:
    """The nodes that have the same value in every step, and their values.

    Made of frozen tensors, of buffers that the step does not put out, of tensors in the graph and of numbers. A frozen input whose
    tensor is not given counts as changing.
    """

    def __init__(self, step, tensors):
        put_out = {(value.role, value.name) for value in step.outputs}
        self.bytes = {}  # node -> of the inputs it is made of
        self._values = {}
        self._module = step.graph_module
        for node, value in zip(step.placeholders, step.inputs):
            key = value.role, value.name
            if value.role in ROLES and key not in put_out and key in tensors:
                self.bytes[node], self._values[node] = {node: value.bytes}, tensors[key]
        for node in step.graph.nodes:
            if node not in self.bytes and all(each in self.bytes for each in node.all_input_nodes):
                leaves = {leaf: size for each in node.all_input_nodes for leaf, size in self.bytes[each].items()}
                if self._is_constant(node, sum(leaves.values())):
                    self.bytes[node] = leaves

    @staticmethod
    def _is_constant(node, made_of):
        if node.op != "call_function" or edit.is_random(node):
            return node.op == "get_attr"
        value = node.meta["val"]
        is_free = edit.is_view(node) or not isinstance(value, torch.Tensor)
        return is_free or value.numel() * value.element_size() <= made_of + LARGEST_GROWTH

    def __contains__(self, node):
        return node in self.bytes

    def value(self, node):
        """Its tensor, or tuple of them."""
        if node not in self._values:
            if node.op == "get_attr":
                self._values[node] = getattr(self._module, node.target)
            else:
                arguments, options = torch.fx.map_arg((node.args, node.kwargs), self.value)
                with torch.no_grad():
                    self._values[node] = node.target(*arguments, **options)
        return self._values[node]


def run(step, tensors):
    """Each largest value that is constant becomes an input FROZEN "folded/<n>"; `tensors` gets its tensor.

    Views are left in the graph and their base is folded: they cost nothing, and two views of one weight remain one weight. Equal values
    become one input. What nothing reads any more is left to dead_code.
    """
    constants = Constants(step, tensors)
    results, known = set(step.results), {}
    number = sum(value.name.startswith("folded/") for value in step.inputs)
    points = _points(step, constants, results)
    values = {node: constants.value(node).detach() for node in points}
    for node, tensor in values.items():
        equal = next((folded for folded, other in known.items() if _is_same(tensor, other)), None)
        if equal is None:
            value = Value(FROZEN, f"folded/{number}", tuple(tensor.shape), tensor.dtype)
            equal = step.add_input(value, node.meta["val"].new_empty_strided(tensor.shape, tensor.stride()))
            known[equal], tensors[FROZEN, value.name] = tensor, tensor
            number += 1
        node.replace_all_uses_with(equal)
    for node in points:
        edit.erase_unused(step, node)
    return len(points)


def _points(step, constants, results):
    """The nodes to fold, in the graph's order: constant, computed, and read by something that is not constant, maybe through views."""
    points = set()
    for node in step.graph.nodes:
        if node in constants and any(user not in constants for user in node.users):
            while edit.is_view(node):
                node = node.args[0]
            is_bare = node.op == "placeholder" or (node.op == "call_function" and not node.all_input_nodes)
            if not is_bare and node not in results:
                points.add(node)
    return [node for node in step.graph.nodes if node in points and isinstance(node.meta["val"], torch.Tensor)]


def _is_same(one, other):
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
