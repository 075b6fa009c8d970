"""Keep of an activation what its derivative needs, and no more.

* hardtanh and ReLU6 compare their input with both bounds; where the output is kept for the next layer anyway, the output is compared
  instead: y <= low exactly where x <= low, and y >= high where x >= high.
* Where a value is kept for nothing but a comparison, the comparison is made in the forward pass and kept at one bit per element:
  ReLU, ReLU6, hardtanh, hard-sigmoid, masks of attention.
* Dropout's draw is 0 or 1 and is kept at one bit.
* The indices of max pooling, int64, are kept as int8 offsets within their windows.

Hard-swish is not among them: its derivative is (2 x + 3) / 6 between -3 and 3, so it needs x itself, and x does not follow from the
output (two inputs give the same one). It keeps x, and recompute.py makes its output again from x instead of keeping both.
"""

import torch

from piebridge.engine import compat
from piebridge.engine.lifetime import forward_nodes
from piebridge.engine.passes.edit import insert, insert_constant
from piebridge.engine.passes.packed_masks import is_packable, pack, unpack
from piebridge.engine.step_graph import DRAW

COMPARISONS = frozenset("le lt ge gt eq ne bitwise_or bitwise_and bitwise_not logical_or logical_and logical_not".split())
POINTWISE = frozenset("div mul _to_copy view".split())  # what dropout does to its draw
SMALLEST = 64  # elements that are worth the operators


def run(step):
    """How many values are now kept in a smaller form."""
    forward = forward_nodes(step)
    count = sum(_pack_draw(step, forward, node) for node, value in zip(step.placeholders, list(step.inputs))
                if value.role == DRAW and value.facts.get("kind") == "bernoulli")
    pools = [node for node in step.graph.nodes if node in forward and _name(node) == "max_pool2d_with_indices"]
    count += sum(_shrink_indices(step, forward, pool) for pool in pools)
    forward = forward_nodes(step)  # with what has just been put in
    masks = _masks(step, forward)
    cones = set().union(*masks.values()) if masks else set()
    for mask, cone in masks.items():
        leaves = _leaves(cone) if cone else set()
        if cone and all(_is_read_late(leaf, forward, cones) for leaf in leaves):
            continue  # kept in any case
        if cone and _compare_outputs(cone, leaves, forward, cones):
            count += 1
        elif is_packable(mask.meta["val"]):
            _pack_mask(step, forward, mask, cone)
            count += 1
    return count


def _name(node):
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else ""


def _late_users(node, forward):
    return [user for user in node.users if user not in forward and user.op != "output"]


def _masks(step, forward):
    """{bool node that the backward pass reads and the forward pass can make: the backward nodes that make it, set()} if it is there."""
    static = {}
    for node in step.graph.nodes:
        if node.op != "call_function" or not _is_mask(node.meta["val"]):
            continue
        if node in forward:
            if _late_users(node, forward):
                static[node] = set()
        elif _name(node) in COMPARISONS and all(argument in forward or argument in static for argument in node.all_input_nodes):
            static[node] = {node}.union(*(static.get(argument, ()) for argument in node.all_input_nodes))
    inner = {argument for node in static for argument in node.all_input_nodes if all(user in static for user in argument.users)}
    return {node: cone for node, cone in static.items() if node not in inner}


def _is_mask(value):
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.numel() >= SMALLEST


def _leaves(cone):
    return {argument for node in cone for argument in node.all_input_nodes if argument not in cone}


def _is_read_late(leaf, forward, cones):
    """Whether the backward pass reads it, or a view of it, for something else than these masks."""
    key = compat.storage_key(leaf.meta["val"])
    pending, seen = [leaf] + leaf.all_input_nodes, set()
    while pending:
        node = pending.pop()
        value = node.meta.get("val")
        if node in seen or not isinstance(value, torch.Tensor) or compat.storage_key(value) != key:
            continue
        seen.add(node)
        if any(user not in cones and not _is_view_of(user, key) for user in _late_users(node, forward)):
            return True
        pending.extend(list(node.users) + node.all_input_nodes)
    return False


def _is_view_of(node, key):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and compat.storage_key(value) == key


def _compare_outputs(cone, leaves, forward, cones):
    """Compare hardtanh's output with its bounds instead of its input, where the output is kept anyway; whether that was possible."""
    if len(leaves) != 1:
        return False
    leaf, = leaves
    readers = [node for node in cone if leaf in node.all_input_nodes]
    for output in leaf.users:
        if _name(output) != "hardtanh" or not _is_read_late(output, forward, cones):
            continue
        low, high = output.args[1:] if len(output.args) > 1 else (-1.0, 1.0)
        bounds = {"le": low, "ge": high}
        if all(_name(node) in bounds and bounds[_name(node)] == node.args[1] for node in readers):
            for node in readers:
                node.replace_input_with(leaf, output)
            return True
    return False


def _position(step):
    return {node: position for position, node in enumerate(step.graph.nodes)}


def _pack_mask(step, forward, mask, cone):
    """Make the mask in the forward pass, behind the last value it compares, and keep its bits."""
    position = _position(step)
    readers = _late_users(mask, forward)
    last = max(_leaves(cone) if cone else [mask], key=position.get)
    copies = {}
    with step.graph.inserting_before(last.next if last.op == "call_function" else _first_call(step)):
        for node in sorted(cone, key=position.get):
            arguments, keywords = torch.fx.map_arg((node.args, node.kwargs), lambda argument: copies.get(argument, argument))
            copies[node] = insert(step, node.target, *arguments, **keywords)
        bits = pack(step, copies.get(mask, mask))
    with step.graph.inserting_before(min(readers, key=position.get)):
        again = unpack(step, bits, mask.meta["val"].shape)
    for reader in readers:
        reader.replace_input_with(mask, again)
    for node in sorted(cone, key=position.get, reverse=True):
        if not node.users:
            step.graph.erase_node(node)


def _first_call(step):
    return next(node for node in step.graph.nodes if node.op == "call_function")


def _pack_draw(step, forward, draw):
    """Keep the bits of dropout's draw; make what was derived from it again in the backward pass."""
    position = _position(step)
    derived = [draw]
    for node in step.graph.nodes:
        if node in forward and _name(node) in POINTWISE and node.all_input_nodes and set(node.all_input_nodes) <= set(derived):
            derived.append(node)
    readers = [(user, node) for node in derived for user in _late_users(node, forward)]
    value = draw.meta["val"]
    if not readers or value.numel() < SMALLEST or not value.is_contiguous() or not draw.users:
        return 0
    aten = compat.aten()
    with step.graph.inserting_before(min(draw.users, key=position.get)):
        bits = pack(step, insert(step, aten.ne.Scalar, draw, 0))
    copies = {}
    with step.graph.inserting_before(min((user for user, _ in readers), key=position.get)):
        copies[draw] = insert(step, aten._to_copy.default, unpack(step, bits, value.shape), dtype=value.dtype)
        needed = {node for _, node in readers}
        for node in reversed(derived):
            needed.update(argument for argument in node.all_input_nodes if node in needed)
        for node in derived[1:]:
            if node in needed:
                arguments, keywords = torch.fx.map_arg((node.args, node.kwargs), lambda argument: copies.get(argument, argument))
                copies[node] = insert(step, node.target, *arguments, **keywords)
    for user, node in readers:
        user.replace_input_with(node, copies[node])
    return 1


def _shrink_indices(step, forward, pool):
    """index = base + row * width + column of the window's pixel -> int8 row * kernel width + column, and back."""
    position = _position(step)
    node = next((user for user in pool.users if user.args[1] == 1), None)
    readers = _late_users(node, forward) if node is not None else []
    image = pool.args[0].meta["val"].shape
    window, stride, padding, dilation = _window(pool)
    if not readers or dilation != (1, 1) or window[0] * window[1] > 127 or window[1] > image[-1]:
        return 0
    aten, (height, width) = compat.aten(), image[-2:]
    rows, columns = (torch.arange(extent) * stride[axis] - padding[axis] for axis, extent in enumerate(node.meta["val"].shape[-2:]))
    table = rows[:, None] * width + columns
    name = "pool_{}x{}_{}x{}_{}x{}_{}x{}".format(height, width, *window, *stride, *padding)
    with step.graph.inserting_before(node.next):
        distance = insert(step, aten.sub.Tensor, node, insert_constant(step, name, table))
        row = insert(step, aten.div.Tensor_mode, distance, width, rounding_mode="floor")
        offset = insert(step, aten.sub.Tensor, distance, insert(step, aten.mul.Tensor, row, width - window[1]))
        small = insert(step, aten._to_copy.default, offset, dtype=torch.int8)
    with step.graph.inserting_before(min(readers, key=position.get)):
        row = insert(step, aten.div.Tensor_mode, small, window[1], rounding_mode="floor")
        row = insert(step, aten._to_copy.default, row, dtype=torch.int64)
        distance = insert(step, aten.add.Tensor, insert(step, aten.mul.Tensor, row, width - window[1]), small)
        index = insert(step, aten.add.Tensor, distance, insert_constant(step, name, table))
    for reader in readers:
        reader.replace_input_with(node, index)
    return 1


def _window(pool):
    """(kernel, stride, padding, dilation) of a max pooling, each (height, width)."""
    given = list(pool.args[1:5]) + [None] * (5 - len(pool.args))
    pairs = [tuple(value) * (2 if len(value) == 1 else 1) if isinstance(value, (tuple, list)) else value for value in given]
    kernel, stride, padding, dilation = pairs
    return kernel, stride or kernel, padding or (0, 0), dilation or (1, 1)
