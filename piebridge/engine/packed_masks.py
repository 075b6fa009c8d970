"""Booleans at one bit each, by ordinary ATen operators, so that every executor runs them."""

import math

import torch

from piebridge.engine import compat
from piebridge.engine.propagate import insert, insert_constant

POWERS = "mask_powers"  # uint8 [8, 1]: 1, 2, 4 ... 128


def is_packable(mask):
    """Whether a value's elements can be viewed as one row: anything else would need a copy of it first."""
    return mask.is_contiguous() and mask.numel() > 0


def pack(step, mask):
    """At the insertion point: the node of bool [...] -> the node of uint8 [ceil(n / 8)]; bit k of byte i is element k * ceil(n / 8) + i.

    Eight long rows, and not the eight neighbours of a byte: sums over rows are fast.
    """
    aten, count = compat.aten(), mask.meta["val"].numel()
    rows = mask
    if count % 8:
        flat = insert(step, aten.view.default, mask, [count])
        rows = insert(step, aten.constant_pad_nd.default, flat, [0, -count % 8], False)
    rows = insert(step, aten.view.default, rows, [8, math.ceil(count / 8)])
    weighted = insert(step, aten.mul.Tensor, rows, insert_constant(step, POWERS, powers()))
    return insert(step, aten.sum.dim_IntList, weighted, [0], False, dtype=torch.uint8)


def unpack(step, bits, shape):
    """At the insertion point: the node of what `pack` made -> the node of bool `shape`."""
    aten, count = compat.aten(), math.prod(shape)
    rows = insert(step, aten.bitwise_and.Tensor, bits, insert_constant(step, POWERS, powers()))
    mask = insert(step, aten.ne.Scalar, rows, 0)
    if count % 8:
        flat = insert(step, aten.view.default, mask, [8 * math.ceil(count / 8)])
        mask = insert(step, aten.slice.Tensor, flat, 0, 0, count)
    return insert(step, aten.view.default, mask, list(shape))


def powers():
    return torch.tensor([[2 ** bit] for bit in range(8)], dtype=torch.uint8)
