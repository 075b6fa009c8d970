"""Operators that do nothing, or more than they need to: neutral arithmetic, copies, views of views, tensors read for their shape alone."""

import torch
from torch import fx

from piebridge.engine import compat
from piebridge.engine.passes import edit


def run(step):
    results, changed, found = set(step.results), 0, True
    while found:
        found = 0
        for node in list(step.graph.nodes):
            by = _simpler(step, node) if node.op == "call_function" else None
            if by is None or (node in results and (by in results or by.op == "placeholder")):
                continue
            found += edit.replace(step, node, by)
            results = set(step.results)
        step.graph.eliminate_dead_code()  # what is left behind counts as a reader otherwise
        changed += found
    return changed


def _simpler(step, node):
    """A node with the same value, type and shape, or None."""
    rule = _rules().get(node.target)
    by = rule(step, node) if rule else None
    return by if by is not None and _is_alike(node, by) else None


def _is_alike(node, by):
    """In strides too: a view of one may not be possible of the other."""
    return edit.shape(node) == edit.shape(by) and edit.dtype(node) == edit.dtype(by) and edit.strides(node) == edit.strides(by)


def _rules():
    aten = compat.aten()
    rules = {aten.add.Tensor: _plus_nothing, aten.sub.Tensor: _plus_nothing, aten.mul.Tensor: _times_one, aten.div.Tensor: _times_one,
             aten.mul.Scalar: _times_one, aten.div.Scalar: _times_one, aten._to_copy.default: _copy, aten.clone.default: _copy,
             aten.view.default: _view, aten.squeeze.dims: _view, aten.unsqueeze.default: _view,
             aten.permute.default: _permute, aten.expand.default: _first, aten.full_like.default: _filled}
    rules.update({operator: _first for operator in (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)})
    return rules


def _first(step, node):
    return node.args[0]


def _plus_nothing(step, node):
    return node.args[0] if _is_number(node.args[1], 0) else None


def _times_one(step, node):
    return node.args[0] if _is_number(node.args[1], 1) else None


def _is_number(value, number):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def _copy(step, node):
    """Nothing is written in place, so a copy is needed for another type, device or layout only."""
    options = {name: value for name, value in node.kwargs.items() if value is not None}
    source = node.args[0].meta["val"]
    if options.get("device", source.device) != source.device or edit.strides(node) != edit.strides(node.args[0]):
        return None
    return node.args[0]


def _view(step, node):
    """A view of a view is a view of the base, one of the same shape is the base."""
    base = node.args[0]
    while edit.is_call(base, compat.aten().view.default, compat.aten().unsqueeze.default, compat.aten().squeeze.dims):
        base = base.args[0]
        if edit.shape(base) == edit.shape(node):
            break
    if base is node.args[0] or edit.shape(base) == edit.shape(node):
        return base
    with step.graph.inserting_before(node):
        try:
            return edit.insert(step, compat.aten().view.default, base, list(edit.shape(node)))
        except (RuntimeError, ValueError):  # strides that only the steps between allow
            return None


def _permute(step, node):
    base, order = node.args
    rank = len(order)
    order = [dim % rank for dim in order]
    if order == list(range(rank)):
        return base
    if not edit.is_call(base, compat.aten().permute.default):
        return None
    first = [dim % rank for dim in base.args[1]]
    order = [first[dim] for dim in order]
    if order == list(range(rank)):
        return base.args[0]
    with step.graph.inserting_before(node):
        return edit.insert(step, compat.aten().permute.default, base.args[0], order)


def _filled(step, node):
    """Not made after the likeness of a tensor, which would be kept for that."""
    like = node.meta["val"]
    if not like.is_contiguous() or isinstance(node.args[1], fx.Node):
        return None
    with step.graph.inserting_before(node):
        return edit.insert(step, compat.aten().full.default, list(like.shape), node.args[1], dtype=like.dtype, layout=torch.strided,
                           device=like.device, pin_memory=False)
