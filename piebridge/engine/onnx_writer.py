"""A training step as one standard ONNX file, which any inference runtime can run: opset 17, default domain, static shapes.

Inputs and outputs go by name: `trained/<key>`, `frozen/<key>`, `buffer/<key>`, `index/<key>`, `state/<key>/<slot>`; the batch's own
names (`inputs`, `targets`), `weights`, `rate`, `count`, `draw/<number>`. An output `next/<name>` is what the caller feeds into the input
`<name>` of the next step; beside these stand `losses` and `outputs`.
"""

import json
import operator

import torch

from piebridge.core.errors import UserError
from piebridge.engine.onnx_graph import OnnxGraph
from piebridge.engine.onnx_operators import RULES, Result
from piebridge.engine.passes import standard_convolutions
from piebridge.engine.step_graph import BUFFER, FROZEN, INDEX, LOSSES, OUTPUTS, STATE, TRAINED

NEXT = "next/"
LARGEST_BYTES = 2 ** 31
# what says only where and as what a result lies; its type is known from the result itself
PLACEMENT = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")
KEPT = (TRAINED, FROZEN, BUFFER, INDEX, STATE)  # inputs that have names of their own among those of their role


def input_name(value):
    """The name in the file of a step's input (a step_graph.Value)."""
    return f"{value.role}/{value.name}" if value.role in KEPT else value.name


def output_name(value):
    return value.name if value.role in (LOSSES, OUTPUTS) else NEXT + input_name(value)


def to_onnx(step, tensors, is_frozen_constant=True, general="columns"):
    """onnx.ModelProto of a StepGraph.

    tensors: {(role, name): tensor}, of which those are read that become constants: frozen ones, buffers that no step changes, and the
    indices of partly trained tensors, unless is_frozen_constant is False: then these are inputs too. Of all these, what nothing reads is
    left out.
    general: how the weight gradient of a dense kernel larger than 1x1 is computed, see passes/standard_convolutions.py. The new value of
    a partly trained tensor is put out whole.
    UserError where an operator has no standard form, and where the file would be larger than protobuf allows, 2 GiB.
    """
    graph, step = OnnxGraph(), step.copy()
    standard_convolutions.run(step, general, flips_depthwise=False)
    values, inputs = {}, []
    changed = {(value.role, value.name) for value in step.outputs}
    for node, value in zip(step.placeholders, step.inputs):
        is_constant = value.role in (FROZEN, INDEX) or (value.role == BUFFER and (BUFFER, value.name) not in changed)
        if is_constant and not node.users and value.role != INDEX:  # an index is read below, if by nothing else
            continue
        if is_constant and is_frozen_constant:
            values[node] = graph.constant(tensors[value.role, value.name], input_name(value))
        else:
            values[node] = graph.declared(input_name(value), value.shape, value.dtype)
            inputs.append(values[node])
    for node in step.graph.nodes:
        if node.op == "get_attr":
            values[node] = graph.constant(getattr(step.graph_module, node.target))
        elif node.op == "call_function":
            values[node] = _converted(graph, node, values)
    outputs = [graph.named(output_name(value), _whole(graph, step, value, values[node], values))
               for node, value in zip(step.results, step.outputs)]
    feeds = {each.name: each.name[len(NEXT):] for each in outputs if each.name.startswith(NEXT)}
    model = graph.model(inputs, outputs, {"piebridge.feeds": json.dumps(feeds)})
    if model.ByteSize() >= LARGEST_BYTES:
        raise UserError(f"engine: the step with its frozen weights takes {model.ByteSize() >> 20} MiB, and an ONNX file holds 2048; "
                        "use backend=eager")
    return model


def _converted(graph, node, values):
    if node.target is operator.getitem:
        return values[node.args[0]][node.args[1]]
    name = str(node.target).partition(".")[2] if str(node.target).startswith("aten.") else str(node.target)
    rule = RULES.get(name)
    if rule is None:
        raise UserError(f"engine: operator {node.target} ({node.name}) has no standard ONNX form here; use backend=eager")
    arguments, keywords = torch.fx.map_arg((list(node.args), dict(node.kwargs)), values.__getitem__)
    value = rule(graph, _result(node), *arguments, **_kept(keywords))
    if value is None:
        given = [list(each.meta["val"].shape) for each in node.all_input_nodes]
        raise UserError(f"engine: operator {node.target} ({node.name}, on shapes {given}) has no standard ONNX form with these arguments; "
                        "use backend=eager")
    return value


def _kept(keywords):
    return {key: value for key, value in keywords.items() if key not in PLACEMENT}


def _result(node):
    found = node.meta["val"]
    results = [(tuple(each.shape), each.dtype) for each in (found if isinstance(found, (tuple, list)) else [found]) if each is not None]
    used = {user.args[1] for user in node.users if user.target is operator.getitem}
    return Result(results[0][0], results[0][1], results, used)


def _whole(graph, step, value, new, values):
    """Of a partly trained tensor: the whole of it, with the part's new value in its place."""
    part = step.parts.get(value.name)
    if value.role != TRAINED or part is None or part.is_whole:
        return new
    old, index = values[step.node_of(TRAINED, value.name)], values[step.node_of(INDEX, value.name)]
    order = [part.dim] + [axis for axis in range(len(old.shape)) if axis != part.dim]
    positions = graph.reshape(index, index.shape + (1,))
    front = graph.transpose(old, order)
    written = graph.node("ScatterND", [front, positions, graph.transpose(new, order)], front.shape, old.dtype)
    return graph.transpose(written, [order.index(axis) for axis in range(len(order))])
