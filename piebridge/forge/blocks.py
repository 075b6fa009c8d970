"""The frozen blocks of a description, and what kind each is."""

import itertools

from piebridge.core import graph, operations

# what may follow the last sum of a residual block
_AFTER_SUM = ("Identity", "Dropout", "ReLU", "ReLU6", "SiLU", "Hardswish", "GELU", "relu", "relu6", "silu", "hardswish", "gelu")


def find_blocks(description, shapes):
    """Blocks as in a description ({"name", "input", "output", "is_residual"}), in order.

    The description's own; the stages of a plain chain, which has none, or whose own are of one layer each and so have no inside.
    """
    blocks = description["blocks"]
    return blocks if any(_has_inside(description, block) for block in blocks) else _stages(description, shapes)


def _has_inside(description, block):
    return sum(node["operation"] in ("Conv2d", "Linear", "linear") for node in graph.block_nodes(description, block)) > 1


def kind_of(description, block):
    """"transformer", "inverted residual" (around a depthwise convolution), "residual" or "plain"."""
    inside = graph.block_nodes(description, block)
    names = {node["operation"].lower() for node in inside}
    if "attention" in names or {"matmul", "softmax"} <= names:
        return "transformer"
    if any(node["operation"] == "Conv2d" and _is_depthwise(node["arguments"]) for node in inside):
        return "inverted residual"
    return "residual" if block["is_residual"] or _ends_in_sum(description, block) else "plain"


def _is_depthwise(arguments):
    return arguments["groups"] == arguments["in_channels"] > 1


def _ends_in_sum(description, block):
    """Whether the output is a sum of two values that both come from the block's input (a shortcut with its own convolution)."""
    nodes = graph.nodes_by_name(description)
    node = nodes[block["output"]]
    while node["operation"] in _AFTER_SUM and node["inputs"][0] in nodes:
        node = nodes[node["inputs"][0]]
    return node["operation"] == "add" and len(node["inputs"]) == 2 and all(
        name == block["input"] or block["input"] in graph.ancestors(description, name) for name in node["inputs"])


def _stages(description, shapes):
    """Of a network without blocks: its stretches of equal resolution, cut where one value alone goes on."""
    stages, start = [], graph.INPUT
    runs = itertools.groupby(spine(description), key=lambda each: tuple(shapes[each[0]][2:]))
    for _, run in runs:
        names, have_tensors = zip(*run)
        if any(have_tensors):  # pooling and flattening alone are no stage, and go with the next one
            stages.append({"name": f"stage{len(stages) + 1}", "input": start, "output": names[-1], "is_residual": False})
            start = names[-1]
    return stages


def spine(description):
    """(name, whether there are tensors since the last one) of each node up to the tap whose value alone is read later."""
    needed = graph.ancestors(description, description["tap"])
    nodes = [node for node in description["nodes"] if node["name"] in needed and node["operation"] != operations.PARAMETER]
    last_reader = {name: position for position, node in enumerate(nodes) for name in node["inputs"]}
    waiting, has_tensors = {graph.INPUT}, False
    for position, node in enumerate(nodes):
        has_tensors = has_tensors or bool(operations.tensor_shapes(node["operation"], node["arguments"]))
        waiting = {name for name in waiting | {node["name"]} if last_reader.get(name, len(nodes)) > position}
        if waiting == {node["name"]}:
            yield node["name"], has_tensors
            has_tensors = False
