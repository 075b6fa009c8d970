"""The backward of a convolution in up to three nodes, so that each gradient lives and dies by itself.

The input's gradient becomes the transposed convolution that it is: convolution_backward would want the input too, for its shape alone,
and keep an activation alive that a bias-only update does not need. The weight's remains a convolution_backward, for it alone. The
bias's is a sum.
"""

import operator

from piebridge.engine import compat
from piebridge.engine.passes import edit

ONLY_WEIGHT = [False, True, False]


def run(step):
    changed = 0
    for node in list(step.graph.nodes):
        if edit.is_call(node, compat.aten().convolution_backward.default) and list(node.args[10]) != ONLY_WEIGHT:
            changed += _split(step, node)
    return changed


def _split(step, node):
    aten = compat.aten()
    gradient, inputs, weight, _, *geometry, _ = node.args
    changed = 0
    for part in list(node.users):
        with step.graph.inserting_before(node):
            if part.args[1] == 0:
                new = edit.laid_out_like(step, part, _input_gradient(step, node))
            elif part.args[1] == 1:
                alone = edit.insert(step, aten.convolution_backward.default, gradient, inputs, weight, None, *geometry, ONLY_WEIGHT)
                new = edit.insert(step, operator.getitem, alone, 1)
            else:
                others = [dim for dim in range(len(edit.shape(gradient))) if dim != 1]
                new = edit.insert(step, aten.sum.dim_IntList, gradient, others)
        changed += edit.replace(step, part, new)
    step.graph.erase_node(node)
    return changed


def _input_gradient(step, node):
    """A stride leaves inputs at the far edge that only some kernels of the same output size reach: output_padding brings them back."""
    gradient, inputs, weight, _, stride, padding, dilation, is_transposed, _, groups, _ = node.args
    target, nothing = compat.aten().convolution.default, [0] * len(stride)
    if is_transposed:
        return edit.insert(step, target, gradient, weight, None, stride, padding, dilation, False, nothing, groups)
    sizes = zip(edit.shape(inputs)[2:], edit.shape(gradient)[2:], edit.shape(weight)[2:], stride, padding, dilation)
    edge = [wanted - ((extent - 1) * step_ - 2 * pad + spread * (kernel - 1) + 1) for wanted, extent, kernel, step_, pad, spread in sizes]
    return edit.insert(step, target, gradient, weight, None, stride, padding, dilation, True, edge, groups)
