"""Questions about a network description, and edits of it: blocks left out, cut in two, heads joined. Pure data, no tensors.

A description is a dict with JSON values (keys: format, version, name, input_size, normalization, interpolation, crop_fraction,
class_names, head, tap, blocks, nodes, output). Its nodes are in topological order; "x" names the network's input.
"""

import copy

from piebridge.core.errors import UserError
from piebridge.core.names import closest

FORMAT, VERSION = "piebridge-network", 1
INPUT = "x"
VIEWS = ("flatten", "reshape", "permute", "transpose", "select", "slice", "expand_batch", "Flatten", "Identity")
# operations that leave the identity path of a residual block an identity (an activation may follow the addition)
_ON_SKIP_PATH = ("add", "Identity", "Dropout", "ReLU", "relu")


def nodes_by_name(description):
    return {node["name"]: node for node in description["nodes"]}


def ancestors(description, name):
    """Names of the nodes that `name` needs, itself included; the network's input is not a node."""
    nodes = nodes_by_name(description)
    found, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in nodes and current not in found:
            found.add(current)
            waiting.extend(nodes[current]["inputs"])
    return found


def block_nodes(description, block):
    """The nodes of a block in order: what its output needs beyond its input."""
    inside = ancestors(description, block["output"]) - ancestors(description, block["input"])
    return [node for node in description["nodes"] if node["name"] in inside]


def find_head(nodes, output):
    """(head, tap): module path of the last Linear, which must give the output, and the node that feeds it."""
    last = {node["name"]: node for node in nodes}[output]
    if last["operation"] != "Linear":
        raise UserError(f"the network ends in {last['operation']!r}, not in a Linear: nothing to fine-tune as its head")
    return last["module"], last["inputs"][0]


def find_blocks(nodes, scopes, candidates, shapes):
    """The blocks of a network, in order.

    nodes: of the description. scopes: {node name: path of the module whose forward made it}. candidates: paths of modules that
    may be blocks, outer before inner. shapes: {node name: shape}, the input's included. A candidate is a block when one value
    enters it and one leaves it; what lies inside a block is not one.
    """
    blocks = []
    for path in candidates:
        if any(path.startswith(block["name"] + ".") for block in blocks):
            continue
        inside = {node["name"] for node in nodes if (scopes[node["name"]] + ".").startswith(path + ".")}
        parameters = {node["name"] for node in nodes if node["operation"] == "parameter"}
        entering = {name for node in nodes if node["name"] in inside for name in node["inputs"]} - inside - parameters
        leaving = {name for node in nodes if node["name"] not in inside for name in node["inputs"]} & inside - parameters
        if len(entering) != 1 or len(leaving) != 1 or not any("module" in node for node in nodes if node["name"] in inside):
            continue
        block = {"name": path, "input": entering.pop(), "output": leaving.pop()}
        is_same_shape = shapes[block["input"]] == shapes[block["output"]]
        block["is_residual"] = is_same_shape and _has_skip_path(nodes, block)
        blocks.append(block)
    order = {node["name"]: position for position, node in enumerate(nodes)}
    return sorted(blocks, key=lambda block: order[block["output"]])


def _has_skip_path(nodes, block):
    """Whether the block's input reaches its output through additions alone: dropping the block then drops only a correction."""
    by_name = {node["name"]: node for node in nodes}
    waiting, has_addition = [block["output"]], False
    while waiting:
        name = waiting.pop()
        if name == block["input"]:
            return has_addition
        node = by_name.get(name)
        if node is not None and node["operation"] in _ON_SKIP_PATH:
            has_addition = has_addition or node["operation"] == "add"
            waiting.extend(node["inputs"])
    return False


def drop_blocks(description, names):
    """A copy of the description without the named residual blocks: whoever read a block's output reads its input."""
    description = copy.deepcopy(description)
    for name in names:
        block = _droppable(description, name)
        removed = {node["name"] for node in block_nodes(description, block)}
        description["nodes"] = [node for node in description["nodes"] if node["name"] not in removed]
        description["blocks"] = [each for each in description["blocks"] if each["name"] != name]
        for node in description["nodes"]:
            node["inputs"] = [block["input"] if each == block["output"] else each for each in node["inputs"]]
        for holder in [description] + description["blocks"]:
            for key in ("input", "output", "tap"):
                if holder.get(key) == block["output"]:
                    holder[key] = block["input"]
    limit_inplace(description["nodes"])
    return description


def last_cut(description, excluded):
    """The last node whose value alone decides the output and that needs none of the nodes `excluded` (names); "x" where there is none."""
    for node in reversed(description["nodes"]):
        name = node["name"]
        if name != description["output"] and not excluded & ancestors(description, name) and INPUT not in _beyond(description, name):
            return name
    return INPUT


def before(description, name):
    """The description of what gives node `name`: that is its tap and its output. It has no head."""
    needed = ancestors(description, name)
    return dict(description, tap=name, output=name,
                nodes=[_read_as(node, {}) for node in description["nodes"] if node["name"] in needed],
                blocks=[dict(block) for block in description["blocks"] if block["output"] in needed])


def after(description, name):
    """The description of what follows node `name`, a cut (see `last_cut`): its input "x" is that node's value."""
    needed = _beyond(description, name)
    after = dict(description, nodes=[_read_as(node, {name: INPUT}) for node in description["nodes"] if node["name"] in needed])
    after["blocks"] = [dict(block) for block in description["blocks"]
                       if block["output"] in needed and block["input"] in needed | {name}]
    for holder in [after] + after["blocks"]:
        for key in ("input", "tap"):
            if holder.get(key) == name:
                holder[key] = INPUT
    limit_inplace(after["nodes"])
    return after


def insert_after(description, name, nodes):
    """A copy with further nodes right behind node `name`: they may read it, and what read it reads the last of them instead."""
    last = nodes[-1]["name"]
    place = [INPUT, *[node["name"] for node in description["nodes"]]].index(name)
    known = [_read_as(node, {name: last}) for node in description["nodes"]]
    description = dict(description, nodes=known[:place] + [_read_as(node, {}) for node in nodes] + known[place:],
                       blocks=[dict(block) for block in description["blocks"]])
    for holder, key in [(description, "tap")] + [(block, "input") for block in description["blocks"]]:
        if holder[key] == name:
            holder[key] = last
    limit_inplace(description["nodes"])
    return description


def _read_as(node, names):
    """A copy of a node, to be changed, that reads what `names` ({node: another}) has in place of what it read."""
    return dict(node, inputs=[names.get(each, each) for each in node["inputs"]], arguments=dict(node["arguments"]))


def _beyond(description, name):
    """Names of what the output needs where the value of `name` is given; "x" is one of them where that does not suffice."""
    nodes = nodes_by_name(description)
    found, waiting = set(), [description["output"]]
    while waiting:
        current = waiting.pop()
        if current != name and current not in found:
            found.add(current)
            waiting.extend(nodes[current]["inputs"] if current in nodes else ())
    return found


def put_below(description, prefix):
    """A copy in which every module and parameter sits one level lower, below `prefix`."""
    description = copy.deepcopy(description)
    for holder in [description] + description["nodes"]:
        for key in ("head", "module", "parameter"):
            if key in holder:
                holder[key] = prefix + "." + holder[key]
    return description


def _droppable(description, name):
    blocks = {block["name"]: block for block in description["blocks"]}
    if name not in blocks:
        raise UserError(f"network {description['name']}: no block {name!r}{closest(name, list(blocks))}")
    if not blocks[name]["is_residual"]:
        able = ", ".join(block["name"] for block in description["blocks"] if block["is_residual"]) or "none"
        raise UserError(f"network {description['name']}: block {name!r} cannot be left out: it is no residual block with equal "
                        f"input and output shape; those are: {able}")
    return blocks[name]


def limit_inplace(nodes):
    """Turn `inplace` off wherever the overwritten value has another reader or may share memory with one.

    So a description means the same whether or not a backend works in place.
    """
    by_name = {node["name"]: node for node in nodes}
    readers = {}
    for node in nodes:
        for name in node["inputs"]:
            readers[name] = readers.get(name, 0) + 1
    for node in nodes:
        if node["arguments"].get("inplace"):
            source = by_name.get(node["inputs"][0])
            is_shared = source is None or readers[source["name"]] > 1 or source["operation"] in VIEWS + ("parameter",)
            node["arguments"]["inplace"] = not is_shared


def join_averaged_heads(nodes, output):
    """(nodes, output, paths): two Linear heads whose mean is the output, as one Linear on their joined inputs.

    (A a + p + B b + q) / 2 = [A/2 B/2] [a; b] + (p + q) / 2: the same function, with one head to fine-tune (distilled DeiT).
    `paths`: the two module paths, or None where the network does not end so; the joined head has the first one's path and name.
    """
    by_name = {node["name"]: node for node in nodes}
    last = by_name[output]
    is_half = (last["operation"], last["arguments"].get("value")) in (("div", 2), ("mul", 0.5))
    total = by_name.get(last["inputs"][0]) if is_half else None
    if total is None or total["operation"] != "add" or len(total["inputs"]) != 2:
        return nodes, output, None
    heads = [by_name.get(name) for name in total["inputs"]]
    if any(head is None or head["operation"] != "Linear" or not head["arguments"]["bias"] for head in heads):
        return nodes, output, None
    first, second = heads
    joined = {"name": first["name"] + "_input", "operation": "cat", "inputs": [first["inputs"][0], second["inputs"][0]],
              "arguments": {"dim": 1}}
    head = dict(first, inputs=[joined["name"]], arguments=dict(
        first["arguments"], in_features=first["arguments"]["in_features"] + second["arguments"]["in_features"]))
    gone = {node["name"] for node in (last, total, first, second)}
    rest = [node for node in nodes if node["name"] not in gone]
    return rest + [joined, head], head["name"], (first["module"], second["module"])
