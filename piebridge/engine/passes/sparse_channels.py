"""Of a partly trained weight only the chosen channels' gradient is computed, from only those channels of the activation.

The captured graph computes a weight's whole gradient dW and selects from it. Here the selection moves up through dW = g^T x:

    channels of the input (dim 1): x is selected, right where the forward makes it, so that only the part is kept;
    channels of the output (dim 0), attention heads among them: g is selected;
    depthwise convolutions: both.
"""

import math
import operator

import torch
from torch import fx

from piebridge.engine import compat
from piebridge.engine.passes import edit
from piebridge.engine.passes.split_convolution_backward import ONLY_WEIGHT
from piebridge.engine.step_graph import INDEX


def run(step):
    select = compat.aten().index_select.default
    indices = {step.placeholders[position] for position, _ in step.inputs_of(INDEX)}
    changed, selected = 0, {}
    for node in list(step.graph.nodes):
        if edit.is_call(node, select) and node.args[2] in indices and node.args[0].op != "placeholder":
            if _reaches_product(node.args[0], node.args[1]):
                with step.graph.inserting_before(node):
                    new = _Push(step, node.args[2], selected).gradient(node.args[0], node.args[1])
                whole = node.args[0]
                changed += edit.replace(step, node, new)
                edit.erase_unused(step, whole)
    return changed


def _source(node, dim):
    """(the operand that a selection along `dim` of this node's result is one of, its dim) for operators that only move data; or None."""
    aten, extents = compat.aten(), edit.shape(node)
    dim %= len(extents)
    if edit.is_call(node, aten.permute.default):
        return node.args[0], node.args[1][dim] % len(extents)
    if edit.is_call(node, aten.t.default):
        return node.args[0], 1 - dim
    if edit.is_call(node, aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten._unsafe_view.default):
        return _through_view(edit.shape(node.args[0]), extents, dim, node)
    return None


def _through_view(before, after, dim, node):
    """A view keeps a dimension where as many elements lie behind it before as after, and it is as long."""
    behind = math.prod(after[dim + 1:])
    for position, extent in enumerate(before):
        if extent == after[dim] and extent > 1 and math.prod(before[position + 1:]) == behind:
            return node.args[0], position
    return None


def _weight_gradient(node):
    """The convolution_backward that `node` is the weight's gradient of, or None."""
    if not edit.is_call(node, operator.getitem) or node.args[1] != 1:
        return None
    product = node.args[0]
    is_alone = edit.is_call(product, compat.aten().convolution_backward.default) and list(product.args[10]) == ONLY_WEIGHT
    return product if is_alone and not product.args[7] else None


def _convolution_selects(product, dim):
    """(input's channels selected?, gradient's channels selected?), or None where the groups do not allow it."""
    gradient, inputs, weight = product.args[:3]
    groups = product.args[9]
    if groups == 1:
        return (dim == 1, dim == 0) if dim in (0, 1) else None
    is_depthwise = groups == edit.shape(inputs)[1] == edit.shape(gradient)[1]
    return (True, True) if is_depthwise and dim == 0 else None


def _reaches_product(node, dim):
    """Does a selection from `node` come up to a product whose operands can be selected instead?"""
    aten = compat.aten()
    if _weight_gradient(node) is not None:
        return _convolution_selects(_weight_gradient(node), dim) is not None
    if edit.is_call(node, aten.mm.default):
        return True
    if edit.is_call(node, aten.bmm.default):
        return dim % 3 != 0
    if _source(node, dim) is not None:
        return _reaches_product(*_source(node, dim))
    pairs = _element_wise(node, dim)
    if pairs is not None:
        return any(each is not None and _reaches_product(node.args[position], each) for position, each in pairs)
    if edit.is_call(node, aten.sum.dim_IntList):
        return _reaches_product(node.args[0], _before_sum(node, dim))
    return False


def _element_wise(node, dim):
    """[(argument's position, its dimension that is selected, None for a broadcast one)] of the tensors, or None for other operators."""
    aten = compat.aten()
    if not edit.is_call(node, aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar,
                        aten.clone.default):
        return None
    rank, pairs = len(edit.shape(node)), []
    for position, argument in enumerate(node.args):
        if isinstance(argument, fx.Node):
            own = dim % rank - (rank - len(edit.shape(argument)))
            is_broadcast = own < 0 or edit.shape(argument)[own] != edit.shape(node)[dim % rank]
            pairs.append((position, None if is_broadcast else own))
    return pairs


def _before_sum(node, dim):
    """The dimension, before a sum, of what is dimension `dim` after it."""
    rank = len(edit.shape(node.args[0]))
    summed = {each % rank for each in node.args[1]} or set(range(rank))
    keeps = len(node.args) > 2 and node.args[2]
    left = list(range(rank)) if keeps else [each for each in range(rank) if each not in summed]
    return left[dim % len(left)]


class _Push:
    """Rebuilds what leads to a gradient, with a selection by `index` further up. The graph's insertion point is the selection's."""

    def __init__(self, step, index, selected):
        self.step, self.index, self.selected = step, index, selected

    def insert(self, target, *arguments, **options):
        return edit.insert(self.step, target, *arguments, **options)

    def gradient(self, node, dim):
        """The selection along `dim` of this part of a gradient."""
        aten = compat.aten()
        dim %= max(len(edit.shape(node)), 1)
        product = _weight_gradient(node)
        if product is not None:
            return self._convolution(product, dim)
        if edit.is_call(node, aten.mm.default):
            return self._matrices(node, dim, 0)
        if edit.is_call(node, aten.bmm.default):
            return self._matrices(node, dim, 1)
        source = _source(node, dim)
        if source is not None and _reaches_product(*source):
            return self._moved(node, dim, self.gradient(*source))
        pairs = _element_wise(node, dim) if _reaches_product(node, dim) else None
        if pairs is not None:
            arguments = list(node.args)
            for position, own in pairs:
                if own is not None:
                    arguments[position] = self.gradient(node.args[position], own)
            return self.insert(node.target, *arguments, **node.kwargs)
        if edit.is_call(node, aten.sum.dim_IntList) and _reaches_product(node, dim):
            return self.insert(node.target, self.gradient(node.args[0], _before_sum(node, dim)), *node.args[1:], **node.kwargs)
        return self.insert(aten.index_select.default, node, dim, self.index)

    def _convolution(self, product, dim):
        gradient, inputs, weight, bias, *geometry, mask = product.args
        of_inputs, of_gradient = _convolution_selects(product, dim)
        if of_inputs:
            inputs = self.operand(inputs, 1)
        if of_gradient:
            gradient = self.operand(gradient, 1)
        if of_inputs and of_gradient:
            geometry[-1] = edit.shape(gradient)[1]
        weight = self.insert(compat.aten().slice.Tensor, weight, dim, 0, edit.shape(self.index)[0])  # read for its shape alone
        part = self.insert(product.target, gradient, inputs, weight, bias, *geometry, mask)
        return self.insert(operator.getitem, part, 1)

    def _matrices(self, node, dim, batch_dims):
        left, right = node.args
        if dim == batch_dims:
            left = self.operand(left, dim)
        else:
            right = self.operand(right, dim)
        return self.insert(node.target, left, right)

    def _moved(self, node, dim, part):
        if edit.is_call(node, compat.aten().permute.default, compat.aten().t.default):
            return self.insert(node.target, part, *node.args[1:])
        extents = list(edit.shape(node))
        extents[dim] = edit.shape(self.index)[0]
        try:
            return self.insert(compat.aten().view.default, part, extents)
        except (RuntimeError, ValueError):  # the part lies in memory in another order
            whole = self.insert(compat.aten().clone.default, part, memory_format=torch.contiguous_format)
            return self.insert(compat.aten().view.default, whole, extents)

    def operand(self, node, dim):
        """The selection from an operand of the product, made as early as the operand is: what is kept from there on is the part."""
        key = node, dim, self.index
        if key not in self.selected:
            source = _source(node, dim)
            if source is not None:
                self.selected[key] = self._early(node, self._moved, node, dim, self.operand(*source))
            else:
                self.selected[key] = self._early(node, self.insert, compat.aten().index_select.default, node, dim, self.index)
        return self.selected[key]

    def _early(self, node, make, *arguments):
        behind = node if node.op != "placeholder" else self.step.placeholders[-1]
        with self.step.graph.inserting_before(behind.next):
            return make(*arguments)
