"""A step in two: the frozen prefix, which no trained value enters, and the trained rest: forward with what it keeps, backward, update.

The two need different things. The prefix is inference on weights that never change, so it may run on any library that prepacks them; the
rest wants its weights where the update writes them.
"""

from dataclasses import dataclass
from typing import List, Optional

import torch
from torch import fx

from piebridge.engine.propagate import propagate
from piebridge.engine.step_graph import BATCH, BUFFER, DRAW, FROZEN, INDEX, OUTPUTS, TRAINED, StepGraph, Value

CROSSING = "crossing"  # values from the prefix to the rest are named crossing/0, crossing/1, ...
# what makes a prefix worth a library of its own; everything else moves for the sake of fewer crossing bytes
HEAVY = ("convolution", "mm", "addmm", "bmm", "baddbmm")
VIEWS = ("view", "reshape", "permute", "t", "transpose", "expand", "slice", "select", "squeeze", "unsqueeze")
MOVABLE = (*VIEWS, "_unsafe_view", "clone", "index_select", "full", "full_like", "arange", "scalar_tensor", "_to_copy")
# what a value depends on: frozen tensors, draws, and a batch's input of which it is a view are at hand on either side
CONSTANT, DRAWN, GIVEN, PER_BATCH, PER_UPDATE = range(5)


@dataclass(frozen=True)
class Cut:
    """prefix: StepGraph whose outputs are the crossing values (role OUTPUTS) and the buffers it changes; None where nothing frozen lies
    before the first trained tensor. rest: StepGraph that takes the crossing values as its first BATCH inputs; the whole step where there
    is no prefix.
    """

    prefix: Optional[StepGraph]
    rest: StepGraph
    crossing: List[Value]

    @property
    def crossing_bytes(self):
        return sum(value.bytes for value in self.crossing)


def cut(step):
    """Cut of a StepGraph, which stays as it is.

    The prefix is everything that depends on the batch's inputs, on draws and on tensors that no update changes, but for cheap nodes at its
    end that are computed in the rest where that lets fewer bytes cross. What depends on frozen tensors or on draws alone, and views of an
    input, are computed on either side.
    """
    kinds = _kinds(step)
    inside = {node for node, kind in kinds.items() if kind == PER_BATCH}
    _move_to_rest(step, kinds, inside)
    if not any(_name(node) in HEAVY for node in inside):
        return Cut(None, step.copy(), [])
    results = list(zip(step.outputs, step.results))
    crossing = {node: _crossing_value(position, node) for position, node in enumerate(_crossing_nodes(step, inside))}
    buffers = [(value, node) for value, node in results if value.role == BUFFER and node in inside]
    prefix = _extract(step, [(value, node) for node, value in crossing.items()] + buffers, {})
    rest = _extract(step, [result for result in results if result not in buffers], crossing, is_step=True)
    return Cut(prefix, rest, list(crossing.values()))


def _kinds(step):
    """{node: the most changeable thing that it depends on}."""
    kinds, values = {}, iter(step.inputs)
    for node in step.graph.nodes:
        if node.op == "placeholder":
            kinds[node] = _kind_of_input(next(values))
        elif node.op != "output":
            kind = max((kinds[source] for source in node.all_input_nodes), default=CONSTANT)
            kinds[node] = PER_BATCH if kind == GIVEN and _name(node) not in VIEWS else kind
    return kinds


def _kind_of_input(value):
    if value.role in (FROZEN, BUFFER, INDEX):
        return CONSTANT
    if value.role == DRAW:
        return DRAWN
    return GIVEN if value.role == BATCH and not value.name.startswith("targets") else PER_UPDATE


def _move_to_rest(step, kinds, inside):
    """Take cheap nodes out of `inside`, from the end, where that makes fewer bytes cross: one node, or all readers of one.

    A dropout at the end goes where it makes no difference: without it, the prefix gives the same for an image each time.
    """
    results = set(step.results)
    nodes = list(step.graph.nodes)
    changed = True
    while changed:
        changed = False
        for node in reversed(nodes):
            for group in ({node} & inside, {user for user in node.users if user in inside}):
                least = 0 if any(kinds[source] == DRAWN for each in group for source in each.all_input_nodes) else 1
                if group and all(_is_movable(each, results, inside - group) for each in group) and _saving(group, inside) >= least:
                    inside -= group
                    changed = True


def _is_movable(node, results, others):
    if node in results or any(user in others for user in node.users):
        return False
    return _name(node) in MOVABLE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _saving(group, inside):
    """Bytes fewer that cross when the group is computed in the rest."""
    read = {source for node in group for source in node.all_input_nodes if source in inside and source not in group}
    entering = [source for source in read if all(user in inside for user in source.users)]
    leaving = [node for node in group if any(user not in inside for user in node.users)]
    return sum(map(_bytes, leaving)) - sum(map(_bytes, entering))


def _crossing_nodes(step, inside):
    """In the graph's order: nodes inside that the rest reads; a result other than a buffer is put out by the rest."""
    put_out = {node for value, node in zip(step.outputs, step.results) if value.role != BUFFER}
    return [node for node in step.graph.nodes
            if node in inside and (node in put_out or any(user not in inside and user.op != "output" for user in node.users))]


def _crossing_value(position, node):
    like = node.meta["val"]
    return Value(OUTPUTS, f"{CROSSING}/{position}", tuple(like.shape), like.dtype)


def _extract(step, results, boundary, is_step=False):
    """StepGraph of what `results`, [(Value, node)], need.

    boundary: {node: Value} that come in as BATCH inputs, before the others. is_step: it takes what every step takes (trained tensors,
    states, weights, rate, count), read or not.
    """
    values = dict(zip(step.placeholders, step.inputs))
    needed = _ancestors([node for _, node in results], boundary)
    graph, mapping, inputs = fx.Graph(), {}, []

    def add_input(node, value):
        mapping[node] = graph.placeholder(f"{value.role}_{len(inputs)}")
        mapping[node].meta = {"val": node.meta.get("val")}
        inputs.append(value)

    for node, value in boundary.items():
        if node in needed:
            add_input(node, Value(BATCH, value.name, value.shape, value.dtype))
    for node, value in values.items():
        if node in needed or is_step and value.role not in (FROZEN, BUFFER, INDEX, BATCH, DRAW):
            add_input(node, value)
    for node in step.graph.nodes:
        if node in needed and node not in mapping:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    outputs = [_own_node(graph, mapping[node]) for _, node in results]
    graph.output(tuple(outputs))
    graph_module = fx.GraphModule(step.graph_module, graph)
    part = StepGraph(graph_module, inputs, [value for value, _ in results], _parts(step, inputs), dict(step.facts))
    return propagate(part).finish()


def _own_node(graph, node):
    """An input that is put out as it came is copied: each output is written once."""
    return graph.call_function(torch.ops.aten.clone.default, (node,)) if node.op == "placeholder" else node


def _ancestors(nodes, boundary):
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [] if node in boundary else node.all_input_nodes
    return found


def _parts(step, inputs):
    names = {value.name for value in inputs if value.role == TRAINED}
    return {key: part for key, part in step.parts.items() if key in names}


def _name(node):
    """The operator's name without its overload, such as "convolution"."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", str(node.target))


def _bytes(node):
    like = node.meta["val"]
    return like.numel() * like.element_size() if isinstance(like, torch.Tensor) else 0
