"""Booleans at one bit each, by ordinary ATen operators, so that every executor runs them.

A dimension of 8 n becomes [8, n], and the eight are summed up, each with its own power of two. Only a dimension is split, so this works on
values in any memory layout, and keeps it, above all channels last. Where no dimension is a multiple of eight, all are flattened and padded.
"""

import math

import torch

from piebridge.engine import compat
from piebridge.engine.passes.edit import insert, insert_constant, shape

POWERS = "mask_powers"  # uint8 [8]: 1, 2, 4 ... 128


def is_packable(mask):
    """Whether a fake tensor can be packed as it lies."""
    return mask.is_contiguous() and mask.numel() > 0


def pack(step, mask):
    """At the insertion point: bits, a node of uint8 with an eighth of the elements of the node `mask`, bool."""
    aten, given, (dim, padded) = compat.aten(), shape(mask), _split(shape(mask))
    if padded is not None:
        mask = insert(step, aten.view.default, mask, [math.prod(given)])
        mask = insert(step, aten.constant_pad_nd.default, mask, [0, padded - math.prod(given)], False)
        given = (padded,)
    parts = insert(step, aten.view.default, mask, [*given[:dim], 8, given[dim] // 8, *given[dim + 1:]])
    weighted = insert(step, aten.mul.Tensor, parts, _powers(step, len(given) - dim))
    return insert(step, aten.sum.dim_IntList, weighted, [dim], False, dtype=torch.uint8)


def unpack(step, bits, wanted):
    """At the insertion point: a node of bool with the shape `wanted` again, from the node that `pack` made."""
    aten, (dim, padded) = compat.aten(), _split(wanted)
    rank = len(wanted) if padded is None else 1
    parts = insert(step, aten.bitwise_and.Tensor, insert(step, aten.unsqueeze.default, bits, dim), _powers(step, rank - dim))
    mask = insert(step, aten.ne.Scalar, parts, 0)
    if padded is not None:
        mask = insert(step, aten.view.default, mask, [padded])
        mask = insert(step, aten.slice.Tensor, mask, 0, 0, math.prod(wanted))
    return insert(step, aten.view.default, mask, list(wanted))


def _split(given):
    """(the dimension to split, None), or (0, elements of the flat and padded mask)."""
    for dim, extent in enumerate(given):
        if extent % 8 == 0:
            return dim, None
    return 0, -(-math.prod(given) // 8) * 8


def _powers(step, behind):
    """uint8 [8, 1, ...] with `behind` dimensions of one."""
    constant = insert_constant(step, POWERS, torch.tensor([2 ** bit for bit in range(8)], dtype=torch.uint8))
    return insert(step, compat.aten().view.default, constant, [8] + [1] * behind)
