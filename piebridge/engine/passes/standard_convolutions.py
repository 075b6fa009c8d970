"""Convolution gradients in operators that every inference runtime has: convolution, matrix product, slice, pad, multiply, sum.

Not among PASSES: for runtimes without convolution_backward. The weight's gradient

    dW[o, i, k] = sum over b, p of g[b, o, p] x[b, i, stride p + dilation k - padding]

takes three forms, chosen by the weight, the last of them by the caller, since runtimes differ in what they are fast at:

    1x1         a batched matrix product g x^T, summed over the batch
    depthwise   for each place in the kernel, g times the shifted input, summed
    general     "swapped":  one convolution, batch and channels swapped: x^T by g^T, with stride and dilation swapped too
                "columns":  the shifted inputs side by side (im2col), then one matrix product
                "shifts":   a matrix product for each place in the kernel: no columns to hold
"""

import itertools
import math

import torch

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.engine import compat
from piebridge.engine.passes import edit, split_convolution_backward
from piebridge.engine.propagate import propagate

GENERAL_FORMS = ("swapped", "columns", "shifts")


def run(step, general="swapped", flips_depthwise=True):
    """Returns how many nodes it changed; none is a convolution_backward afterwards. Propagates and finishes by itself.

    general: the form of a general weight's gradient; grouped ones take "columns" instead of "swapped".
    flips_depthwise: the input's gradient of depthwise convolutions with stride 1 as a convolution with the flipped kernel, not as a
    transposed convolution, which runtimes seldom tune for groups. UserError for an unknown form.
    """
    if general not in GENERAL_FORMS:
        raise UserError(f"engine: no form {general!r} of a convolution's weight gradient; there are {', '.join(GENERAL_FORMS)}"
                        f"{closest(general, GENERAL_FORMS)}")
    aten, changed = compat.aten(), split_convolution_backward.run(step)
    for node in list(step.graph.nodes):
        if edit.is_call(node, aten.convolution_backward.default):
            part = next(iter(node.users))
            with step.graph.inserting_before(node):
                new = _Gradient(step, node, general).weight()
            changed += edit.replace(step, part, new)
            step.graph.erase_node(node)
        elif flips_depthwise and edit.is_call(node, aten.convolution.default) and _is_flippable(node):
            with step.graph.inserting_before(node):
                changed += edit.replace(step, node, _flipped(step, node))
    if changed:
        propagate(step).finish()
    return changed


def _is_flippable(node):
    """A transposed convolution with one output channel per group, of stride 1."""
    inputs, weight, _, stride, padding, dilation, is_transposed, _, groups = node.args
    if not is_transposed or set(stride) != {1} or groups != edit.shape(inputs)[1] or edit.shape(weight)[1] != 1:
        return False
    return all(spread * (kernel - 1) >= pad for spread, kernel, pad in zip(dilation, edit.shape(weight)[2:], padding))


def _flipped(step, node):
    inputs, weight, bias, stride, padding, dilation, _, nothing, groups = node.args
    weight = edit.insert(step, compat.aten().flip.default, weight, list(range(2, len(edit.shape(weight)))))
    around = [spread * (kernel - 1) - pad for spread, kernel, pad in zip(dilation, edit.shape(weight)[2:], padding)]
    return edit.insert(step, compat.aten().convolution.default, inputs, weight, bias, stride, around, dilation, False, nothing, groups)


class _Gradient:
    """Of one weight. Shapes: gradient [B, O, *P], inputs [B, I, *S], weight [O, I / groups, *K]."""

    def __init__(self, step, node, general):
        self.step, self.general = step, general
        self.gradient, self.inputs, weight, _, self.stride, self.padding, self.dilation, is_transposed, _, self.groups, _ = node.args
        if is_transposed:  # it is the other's gradient with the sides changed
            self.gradient, self.inputs = self.inputs, self.gradient
        self.kernel, self.shape = list(edit.shape(weight)[2:]), list(edit.shape(weight))
        self.batch, self.outputs, *self.places = edit.shape(self.gradient)
        self.spatial = list(range(2, 2 + len(self.kernel)))
        self.size = math.prod(self.places)

    def insert(self, target, *arguments):
        return edit.insert(self.step, target, *arguments)

    def weight(self):
        if self.groups > 1 and self.shape[1] == 1:
            return self.depthwise()
        if math.prod(self.kernel) == 1:
            return self.view(self.product(next(self.shifted())), self.shape)
        if self.general == "shifts":
            return self.shifts()
        return self.columns() if self.general == "columns" or self.groups > 1 else self.swapped()

    def view(self, node, extents):
        if not node.meta["val"].is_contiguous():
            node = edit.insert(self.step, compat.aten().clone.default, node, memory_format=torch.contiguous_format)
        return self.insert(compat.aten().view.default, node, list(extents))

    def shifted(self):
        """The inputs that the output's places see through each place of the kernel, [B, I, *P] each, in the kernel's order."""
        aten, padded = compat.aten(), self.inputs
        if any(self.padding):
            around = [pad for each in reversed(self.padding) for pad in (each, each)]
            padded = self.insert(aten.constant_pad_nd.default, padded, around, 0.0)
        for place in itertools.product(*map(range, self.kernel)):
            part = padded
            for dim, at, spread, stride, extent in zip(self.spatial, place, self.dilation, self.stride, self.places):
                end = at * spread + stride * (extent - 1) + 1
                if (at * spread, end, stride) != (0, edit.shape(part)[dim], 1):
                    part = self.insert(aten.slice.Tensor, part, dim, at * spread, end, stride)
            yield part

    def product(self, columns):
        """[O, I' / groups]: g times columns [B, I', *P], summed over batch and places."""
        aten, grouped = compat.aten(), self.batch * self.groups
        left = self.view(self.gradient, [grouped, self.outputs // self.groups, self.size])
        right = self.view(columns, [grouped, -1, self.size])
        each = self.insert(aten.bmm.default, left, self.insert(aten.permute.default, right, [0, 2, 1]))
        width = edit.shape(each)[2]
        if self.batch > 1:
            each = self.view(each, [self.batch, self.groups * edit.shape(each)[1], width])
            each = self.insert(aten.sum.dim_IntList, each, [0])
        return self.view(each, [self.outputs, width])

    def shifts(self):
        """[O, I / groups] side by side along the kernel."""
        aten = compat.aten()
        parts = [self.view(self.product(part), self.shape[:2] + [1]) for part in self.shifted()]
        return self.view(self.insert(aten.cat.default, parts, 2), self.shape)

    def columns(self):
        """im2col: channels outside, the kernel's places inside, which keeps groups together."""
        aten = compat.aten()
        parts = [self.view(part, [self.batch, edit.shape(self.inputs)[1], 1, self.size]) for part in self.shifted()]
        return self.view(self.product(self.insert(aten.cat.default, parts, 2)), self.shape)

    def depthwise(self):
        aten, multiplier = compat.aten(), self.outputs // self.groups
        gradient, extents, summed = self.gradient, None, [0] + self.spatial
        if multiplier > 1:
            gradient = self.view(gradient, [self.batch, self.groups, multiplier] + self.places)
            extents, summed = [self.batch, self.groups, 1] + self.places, [0] + [dim + 1 for dim in self.spatial]
        parts = []
        for part in self.shifted():
            part = part if extents is None else self.view(part, extents)
            each = self.insert(aten.sum.dim_IntList, self.insert(aten.mul.Tensor, gradient, part), summed)
            parts.append(self.view(each, [self.outputs, 1]))
        return self.view(self.insert(aten.cat.default, parts, 1) if len(parts) > 1 else parts[0], self.shape)

    def swapped(self):
        """The result is longer than the kernel where the last inputs are out of the stride's reach."""
        aten = compat.aten()
        swap = [1, 0] + self.spatial
        inputs, gradient = [self.insert(aten.permute.default, each, swap) for each in (self.inputs, self.gradient)]
        result = self.insert(aten.convolution.default, inputs, gradient, None, self.dilation, self.padding, self.stride, False,
                             [0] * len(self.kernel), 1)
        for dim, extent in zip(self.spatial, self.kernel):
            if edit.shape(result)[dim] != extent:
                result = self.insert(aten.slice.Tensor, result, dim, 0, extent)
        return self.insert(aten.permute.default, result, swap)
