"""Batch norm with the statistics of before, a factor and a shift per channel, goes into the weight and bias of the convolution before it.

    scale * conv(x, W, b) + shift = conv(x, scale * W, scale * b + shift)

Of a frozen convolution the scaled weight is a constant, see fold_constants. Of a trained one it is computed in each step, where it is
not larger than the activations that are spared. Otherwise, and where the output is read by others too, subtract, multiply, multiply,
add become multiply, add.
The backward's side is batch_norm_gradients.py.
"""

import math

from piebridge.engine import compat
from piebridge.engine.passes import edit
from piebridge.engine.passes.fold_constants import Constants


def run(step, tensors):
    constants, still, changed = Constants(step, tensors), edit.still_nodes(step), 0
    for node in list(step.graph.nodes):
        if edit.is_call(node, compat.aten().convolution.default) and not node.args[6]:
            chain = _chain(step, node, still)
            if chain:
                changed += _fold(step, node, chain, constants)
    return changed


def _chain(step, node, still):
    """[(call, operand)]: what is done to each channel of the convolution's output, for as long as nobody else reads what comes between."""
    results, chains = set(step.results), [[]]
    for user in node.users if node not in results else ():
        chain, value = [], node
        while user is not None and edit.per_channel(user, value, still) is not None:
            chain.append((user, edit.per_channel(user, value, still)))
            value = user
            user = next(iter(value.users)) if len(value.users) == 1 and value not in results else None
        chains.append(chain)
    return max(chains, key=len)


def _fold(step, node, chain, constants):
    aten, (last, _) = compat.aten(), chain[-1]
    inputs, weight, bias, *rest = node.args
    scales = [operand for call, operand in chain if edit.is_call(call, aten.mul.Tensor, aten.div.Tensor)]
    is_constant = not scales or (weight in constants and all(scale in constants for scale in scales))
    is_worth = is_constant or math.prod(edit.shape(weight)) <= len(chain) * math.prod(edit.shape(node))
    with step.graph.inserting_before(last):
        if len(node.users) == 1 and is_worth:
            scale, shift = _scale_and_shift(step, chain, edit.shape(node)[1], bias)
            if scale is not None:
                weight = edit.insert(step, aten.mul.Tensor, weight, edit.along(step, scale, weight, 0))
            new = edit.insert(step, aten.convolution.default, inputs, weight, shift, *rest)
        elif len(chain) > 2 and 0 < len(scales) < len(chain):
            scale, shift = _scale_and_shift(step, chain, edit.shape(node)[1], None)
            new = edit.insert(step, aten.mul.Tensor, node, edit.along(step, scale, node, 1))
            new = edit.insert(step, aten.add.Tensor, new, edit.along(step, shift, node, 1))
        else:
            return 0
    read = last.all_input_nodes
    edit.replace(step, last, new)
    for each in read:
        edit.erase_unused(step, each)
    return len(chain)


def _scale_and_shift(step, chain, channels, bias):
    """Vectors [C], None for a scale of 1 and a shift of 0, of all calls together, upon what the convolution adds by itself."""
    aten, scale, shift = compat.aten(), None, bias
    for call, operand in chain:
        vector = edit.insert(step, aten.view.default, operand, [channels])
        if edit.is_call(call, aten.mul.Tensor, aten.div.Tensor):
            shift = None if shift is None else edit.insert(step, call.target, shift, vector)
            if scale is not None:
                scale = edit.insert(step, call.target, scale, vector)
            else:
                scale = vector if edit.is_call(call, aten.mul.Tensor) else edit.insert(step, aten.reciprocal.default, vector)
        elif shift is not None:
            shift = edit.insert(step, call.target, shift, vector)
        else:
            shift = vector if edit.is_call(call, aten.add.Tensor) else edit.insert(step, aten.neg.default, vector)
    return scale, shift
