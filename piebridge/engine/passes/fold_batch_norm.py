"""Batch norm with frozen statistics, a factor and a shift per channel, goes into the weight and bias of the convolution before it.

    scale * conv(x, W, b) + shift = conv(x, scale * W, scale * b + shift)

and in the backward, where the output's gradient is multiplied by the scale first:

    dX(scale * g, W) = dX(g, scale * W),    dW(scale * g, x) = scale * dW(g, x),    db(scale * g) = scale * db(g).

Of a frozen convolution the scaled weight is a constant, see fold_constants. Of a trained one it is computed in each step: as large as
the weight, where the two multiplications it replaces are as large as the activation.
"""

from piebridge.engine import compat
from piebridge.engine.passes import edit
from piebridge.engine.passes.fold_constants import Constants
from piebridge.engine.passes.split_convolution_backward import ONLY_WEIGHT


def run(step, tensors):
    constants, changed = Constants(step, tensors), 0
    for node in list(step.graph.nodes):
        if edit.is_call(node, compat.aten().convolution.default) and not node.args[6]:
            changed += _fold_forward(step, node, constants)
    for node in reversed(list(step.graph.nodes)):
        if edit.is_call(node, compat.aten().mul.Tensor):
            changed += _fold_backward(step, node, constants)
    return changed


def _fold_forward(step, node, constants):
    """Absorb what follows the convolution for as long as nobody else reads it. Returns how many nodes."""
    aten, results, chain = compat.aten(), set(step.results), []
    last = node
    while len(last.users) == 1 and last not in results:
        user = next(iter(last.users))
        operand = _per_channel(user, last, constants)
        if operand is None:
            break
        chain.append((user, operand))
        last = user
    if not chain:
        return 0
    inputs, weight, bias, *rest = node.args
    with step.graph.inserting_before(last):
        scale = None
        for each, operand in chain:
            vector = edit.insert(step, aten.view.default, operand, [edit.shape(node)[1]])
            if each.target in (aten.mul.Tensor, aten.div.Tensor):
                scale = vector if scale is None and each.target == aten.mul.Tensor else _scaled(step, each.target, scale, vector)
                bias = None if bias is None else edit.insert(step, each.target, bias, vector)
            elif bias is not None:
                bias = edit.insert(step, each.target, bias, vector)
            else:
                bias = vector if each.target == aten.add.Tensor else edit.insert(step, aten.neg.default, vector)
        if scale is not None:
            weight = edit.insert(step, aten.mul.Tensor, weight, _along_outputs(step, scale, weight))
        new = edit.insert(step, aten.convolution.default, inputs, weight, bias, *rest)
    before = last.args[0] if last.args[0] is not chain[-1][1] else last.args[1]
    edit.replace(step, last, new)
    edit.erase_unused(step, before)
    return len(chain)


def _scaled(step, target, scale, vector):
    if scale is None:  # a division first
        return edit.insert(step, compat.aten().reciprocal.default, vector)
    return edit.insert(step, target, scale, vector)


def _per_channel(node, value, constants):
    """The constant [C, 1, 1] that `node` adds to `value`, subtracts, multiplies or divides it by; or None."""
    aten = compat.aten()
    if node.op != "call_function" or node.kwargs or node.target not in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        return None
    operands = node.args
    if operands[1] is value and node.target in (aten.add.Tensor, aten.mul.Tensor):
        operands = operands[::-1]
    operand = operands[1]
    return operand if operands[0] is value and operand in constants and _is_per_channel(operand, value) else None


def _is_per_channel(operand, value):
    if len(edit.shape(value)) < 3:
        return False
    wanted = [1] * len(edit.shape(value))
    wanted[1] = edit.shape(value)[1]
    return [1] * (len(wanted) - len(edit.shape(operand))) + list(edit.shape(operand)) == wanted and edit.dtype(operand) == edit.dtype(value)


def _along_outputs(step, scale, weight):
    return edit.insert(step, compat.aten().view.default, scale, [-1] + [1] * (len(edit.shape(weight)) - 1))


def _fold_backward(step, node, constants):
    """Let the convolutions' gradients take g where they take scale * g."""
    gradient = next((each for each in node.all_input_nodes if _per_channel(node, each, constants) is not None), None)
    if gradient is None or node in step.results or not node.users:
        return 0
    scale = _per_channel(node, gradient, constants)
    users = list(node.users)
    if not all(_is_linear_in(user, node) for user in users) or all(edit.is_call(user, compat.aten().sum.dim_IntList) for user in users):
        return 0
    for user in users:
        _take_unscaled(step, user, gradient, scale)
    edit.erase_unused(step, node)
    return 1 + len(users)


def _is_linear_in(user, gradient):
    """One of the three gradients of a convolution, with `gradient` that of its output."""
    aten, rank = compat.aten(), len(edit.shape(gradient))
    if edit.is_call(user, aten.convolution.default):
        return bool(user.args[6]) and user.args[0] is gradient and gradient not in user.args[1:3] and user.args[2] is None
    if edit.is_call(user, aten.convolution_backward.default):
        return list(user.args[10]) == ONLY_WEIGHT and not user.args[7] and user.args[0] is gradient and gradient not in user.args[1:3]
    others = [dim for dim in range(rank) if dim != 1]
    return edit.is_call(user, aten.sum.dim_IntList) and sorted(dim % rank for dim in user.args[1]) == others


def _take_unscaled(step, user, gradient, scale):
    aten = compat.aten()
    with step.graph.inserting_before(user):
        if edit.is_call(user, aten.convolution.default):
            weight = user.args[1]
            scaled = edit.insert(step, aten.mul.Tensor, weight, _along_outputs(step, scale, weight))
            user.args = (gradient, scaled) + user.args[2:]
            return
    user.args = (gradient,) + user.args[1:]
    plain = next(iter(user.users)) if edit.is_call(user, aten.convolution_backward.default) else user
    with step.graph.inserting_after(plain):
        scaled = step.graph.call_function(aten.mul.Tensor)
    plain.replace_all_uses_with(scaled)
    with step.graph.inserting_before(scaled):
        scaled.args = (plain, edit.insert(step, aten.view.default, scale, _broadcast(plain)))
    scaled.meta["val"] = plain.meta["val"]


def _broadcast(plain):
    """[O, 1, 1, 1] for a weight, for a bias [C] or one whose dimensions were kept, [1, C, 1, 1]."""
    extents = edit.shape(plain)
    channel = 1 if len(extents) > 1 and extents[0] == 1 and all(extent == 1 for extent in extents[2:]) else 0
    return [-1 if dim == channel else 1 for dim in range(len(extents))]
