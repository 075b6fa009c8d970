"""Attention's softmax without its guard against rows that are masked altogether, where there are none.

The plain form of attention gives such rows zeros: three booleans and a second copy of the probabilities, kept for the backward.
"""

import math

from torch import fx

from piebridge.engine import compat
from piebridge.engine.passes import edit
from piebridge.engine.passes.fold_constants import Constants


def run(step, tensors):
    aten = compat.aten()
    guards = [node for node in step.graph.nodes if edit.is_call(node, aten.where.self) and _guarded(node) is not None]
    constants = Constants(step, tensors) if guards else None
    changed = 0
    for node in guards:
        softmax = _guarded(node)
        if softmax.args[1] in (-1, len(edit.shape(softmax)) - 1) and _has_finite_rows(softmax.args[0], constants):
            condition, zeros, _ = node.args
            changed += edit.replace(step, node, softmax)
            edit.erase_unused(step, condition)
            edit.erase_unused(step, zeros)
    return changed


def _guarded(node):
    """The softmax s of where(not any(not (x == -inf)), 0, s(x)), or None."""
    aten = compat.aten()
    condition, _, softmax = node.args
    if not edit.is_call(softmax, aten._softmax.default) or not edit.is_call(condition, aten.logical_not.default):
        return None
    found = condition.args[0]
    if not edit.is_call(found, aten.any.dim) or not edit.is_call(found.args[0], aten.logical_not.default):
        return None
    equal = found.args[0].args[0]
    is_guard = edit.is_call(equal, aten.eq.Scalar) and equal.args == (softmax.args[0], -math.inf) and found.args[1] == softmax.args[1]
    return softmax if is_guard else None


def _has_finite_rows(scores, constants):
    """Scores are products of numbers, plus at most constant masks that leave something in each row (along the last dimension)."""
    aten = compat.aten()
    if edit.is_call(scores, aten.bmm.default, aten.mm.default):
        return True
    if edit.is_call(scores, aten.add.Tensor) and not scores.kwargs:
        for one, mask in (scores.args, scores.args[::-1]):
            if mask in constants and edit.shape(mask):
                return _has_finite_rows(one, constants) and bool((constants.value(mask) > -math.inf).any(-1).all())
        return False
    if edit.is_call(scores, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        return not isinstance(scores.args[1], fx.Node) and _has_finite_rows(scores.args[0], constants)
    if edit.is_call(scores, aten.view.default, aten.expand.default, aten.clone.default):
        return edit.shape(scores)[-1] == edit.shape(scores.args[0])[-1] and _has_finite_rows(scores.args[0], constants)
    return False
