"""What batch norm with the statistics of before costs the backward: the gradient g of its output, times the scale per channel.

A convolution's gradients are linear in g, so that the scale goes into the weight, or into the result:

    dX(scale * g, W) = dX(g, scale * W),    dW(scale * g, x) = scale * dW(g, x),    db(scale * g) = scale * db(g).

Where the factor (gamma) is trained, its gradient wants the convolution's output, sum(g * (conv(x, W) + b - mean)). Where W is trained too,

    sum(g * conv(x, W)) = sum(W * dW(g, x))

for each output channel, and the output need not be kept: of each layer only its input is.
"""

import math
import operator

from piebridge.engine import compat
from piebridge.engine.passes import edit
from piebridge.engine.passes.fold_constants import Constants
from piebridge.engine.passes.split_convolution_backward import ONLY_WEIGHT
from piebridge.engine.step_graph import TRAINED


def run(step, tensors):
    aten, changed = compat.aten(), 0
    constants, still = Constants(step, tensors), edit.still_nodes(step)
    for node in reversed(list(step.graph.nodes)):
        if edit.is_call(node, aten.mul.Tensor) and node.users and node not in step.results:
            changed += _unscale(step, node, constants, still)
    whole = {node for node, value in zip(step.placeholders, step.inputs) if value.role == TRAINED and step.parts[value.name].is_whole}
    for node in list(step.graph.nodes):
        if edit.is_call(node, aten.sum.dim_IntList):
            changed += _without_output(step, node, whole, still)
    return changed


def _unscale(step, node, constants, still):
    """Let the convolutions' gradients take g where they take scale * g."""
    gradient = next((each for each in node.all_input_nodes if edit.per_channel(node, each, still) is not None), None)
    users = list(node.users)
    if gradient is None or not all(_is_linear_in(user, node) for user in users):
        return 0
    scale = edit.per_channel(node, gradient, still)
    is_sum = [edit.is_call(user, compat.aten().sum.dim_IntList) for user in users]
    if all(is_sum) or _cost(users, scale, constants) > 2 * math.prod(edit.shape(node)):
        return 0
    for user in users:
        _take(step, user, gradient, scale)
    edit.erase_unused(step, node)
    return 1 + len(users)


def _cost(users, scale, constants):
    """Numbers to multiply in each step, instead of the gradient's."""
    aten, cost = compat.aten(), 0
    for user in users:
        if edit.is_call(user, aten.convolution.default) and not (user.args[1] in constants and scale in constants):
            cost += math.prod(edit.shape(user.args[1]))
        elif edit.is_call(user, aten.convolution_backward.default):
            cost += math.prod(edit.shape(user.args[2]))
    return cost


def _is_linear_in(user, gradient):
    """One of the three gradients of a convolution, with `gradient` that of its output."""
    aten = compat.aten()
    if edit.is_call(user, aten.convolution.default):
        return bool(user.args[6]) and user.args[0] is gradient and gradient not in user.args[1:3] and user.args[2] is None
    if edit.is_call(user, aten.convolution_backward.default):
        return list(user.args[10]) == ONLY_WEIGHT and not user.args[7] and user.args[0] is gradient and gradient not in user.args[1:3]
    return edit.is_call(user, aten.sum.dim_IntList) and _is_over_channels(user)


def _is_over_channels(node):
    rank = len(edit.shape(node.args[0]))
    return sorted(dim % rank for dim in node.args[1]) == [dim for dim in range(rank) if dim != 1] and not node.kwargs


def _take(step, user, gradient, scale):
    aten = compat.aten()
    if edit.is_call(user, aten.convolution.default):
        with step.graph.inserting_before(user):
            weight = edit.insert(step, aten.mul.Tensor, user.args[1], edit.along(step, scale, user.args[1], 0))
        user.args = (gradient, weight) + user.args[2:]
        return
    user.args = (gradient,) + user.args[1:]
    plain = next(iter(user.users)) if edit.is_call(user, aten.convolution_backward.default) else user
    readers = list(plain.users)
    with step.graph.inserting_after(plain):
        scaled = step.graph.call_function(aten.mul.Tensor)
    is_kept = edit.is_call(plain, aten.sum.dim_IntList) and len(plain.args) > 2 and plain.args[2]
    with step.graph.inserting_before(scaled):
        scaled.args = (plain, edit.along(step, scale, plain, 1 if is_kept else 0))
    scaled.meta["val"] = plain.meta["val"]
    for reader in readers:
        reader.replace_input_with(plain, scaled)


def _without_output(step, node, whole, still):
    """sum(g * (z - mean)) for z = conv(x, W, b), from dW(g, x)."""
    aten, product = compat.aten(), node.args[0]
    if not edit.is_call(product, aten.mul.Tensor) or not _is_over_channels(node) or len(product.users) > 1:
        return 0
    for gradient, centred in (product.args, product.args[::-1]):
        output, mean = centred, None
        if edit.is_call(centred, aten.sub.Tensor) and len(centred.users) == 1:
            output, mean = centred.args[0], edit.per_channel(centred, centred.args[0], still)
            if mean is None:
                continue
        if edit.is_call(output, aten.convolution.default) and output.args[1] in whole:
            of_weight = _weight_gradient(gradient, output)
            if of_weight is not None:
                _replace(step, node, gradient, output, mean, of_weight)
                return 1
    return 0


def _weight_gradient(gradient, output):
    """dW(g, x) of this convolution, if the graph has it."""
    inputs, weight, _, *geometry = output.args
    for user in getattr(gradient, "users", ()):
        if edit.is_call(user, compat.aten().convolution_backward.default) and user.args[:3] == (gradient, inputs, weight):
            if list(user.args[4:10]) == geometry and list(user.args[10]) == ONLY_WEIGHT:
                return next(each for each in user.users if edit.is_call(each, operator.getitem))
    return None


def _replace(step, node, gradient, output, mean, of_weight):
    """The gradient of the weight is needed earlier than it stood, and all that it reads is there."""
    aten, (_, weight, bias) = compat.aten(), output.args[:3]
    node.prepend(of_weight.args[0])
    node.prepend(of_weight)
    channels = edit.shape(output)[1]
    with step.graph.inserting_before(node):
        new = edit.insert(step, aten.mul.Tensor, weight, of_weight)
        new = edit.insert(step, aten.sum.dim_IntList, new, list(range(1, len(edit.shape(weight)))))
        for each, combine in ((bias, aten.add.Tensor), (mean, aten.sub.Tensor)):
            if each is not None:
                total = edit.insert(step, aten.sum.dim_IntList, gradient, [0] + list(range(2, len(edit.shape(gradient)))))
                vector = edit.insert(step, aten.view.default, each, [channels])
                new = edit.insert(step, combine, new, edit.insert(step, aten.mul.Tensor, vector, total))
        if edit.shape(new) != edit.shape(node):
            new = edit.insert(step, aten.view.default, new, list(edit.shape(node)))
    product = node.args[0]
    edit.replace(step, node, new)
    edit.erase_unused(step, product)
