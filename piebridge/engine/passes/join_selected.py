"""The gradients of parts that were selected from one tensor, put side by side again.

Of queries, keys and values that come out of one packed product, the traced backward spreads each gradient over a tensor of zeros three
times its size, and adds the three.
"""

from piebridge.engine import compat
from piebridge.engine.passes import edit
from piebridge.engine.passes.fold_constants import Constants


def run(step, tensors):
    aten, changed = compat.aten(), 0
    constants = Constants(step, tensors)
    for node in reversed(list(step.graph.nodes)):  # a chain of sums from its end
        if not node.users or not edit.is_call(node, aten.add.Tensor):
            continue
        pieces = _pieces(node, constants)
        if pieces is None or len({dim for dim, _, _ in pieces}) > 1:
            continue
        dim, order = pieces[0][0], {place: piece for _, place, piece in pieces}
        if len(pieces) == len(order) == edit.shape(node)[dim]:
            with step.graph.inserting_before(node):
                joined = edit.insert(step, aten.cat.default, [order[place] for place in sorted(order)], dim)
            read = node.all_input_nodes
            changed += edit.replace(step, node, joined)
            for each in read:
                edit.erase_unused(step, each)
    return changed


def _pieces(node, constants):
    """[(dim, place, piece)] that a sum consists of; None where another thing is added."""
    aten = compat.aten()
    if edit.is_call(node, aten.add.Tensor) and not node.kwargs:
        each = [_pieces(term, constants) for term in node.args]
        return None if None in each else each[0] + each[1]
    piece = _piece(node, constants) if edit.is_call(node, aten.where.self) else None
    return None if piece is None else [piece]


def _piece(node, constants):
    """Of where(place == constant, piece spread along a dimension, 0)."""
    aten = compat.aten()
    mask, spread, zeros = node.args
    is_zero = edit.is_call(zeros, aten.full.default, aten.scalar_tensor.default) and zeros.args[-1] == 0
    if not is_zero or mask not in constants or not edit.is_call(spread, aten.expand.default):
        return None
    rank, piece = len(edit.shape(node)), spread.args[0]
    extents = (1,) * (rank - len(edit.shape(mask))) + edit.shape(mask)
    wide = [dim for dim, extent in enumerate(extents) if extent > 1]
    if len(wide) != 1 or edit.shape(spread) != edit.shape(node):
        return None
    dim, places = wide[0], constants.value(mask).flatten().nonzero().flatten().tolist()
    expected = edit.shape(node)[:dim] + (1,) + edit.shape(node)[dim + 1:]
    return (dim, places[0], piece) if len(places) == 1 and edit.shape(piece) == expected else None
