"""Offsets in one block of memory for values whose lifetimes are known.

Greedy by size, best fit (Pisarchyk & Lee, 2020, "Efficient memory management for deep neural net inference"), and the same for two
other orders, of which the smallest result counts. No arena can be smaller than the most bytes that live at one time.
"""

from dataclasses import dataclass
from typing import Tuple

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True)
class Arena:
    """offsets: bytes from its begin, one per value. bytes: its size. bound: most bytes that live at one time, a lower bound."""

    offsets: Tuple[int, ...]
    bytes: int
    bound: int


def plan_arena(sizes, spans, alignment=ALIGNMENT):
    """Arena for values of `sizes` bytes that live over `spans` [(first, last)], positions inclusive: no two that live together overlap."""
    sizes = [-(-size // alignment) * alignment for size in sizes]
    numbers = range(len(sizes))
    keys = (lambda i: (-sizes[i], spans[i]),
            lambda i: (-sizes[i] * (spans[i][1] - spans[i][0] + 1), spans[i]),
            lambda i: (spans[i][0] - spans[i][1], -sizes[i]))
    bound = _bound(sizes, spans)
    best = None
    for key in keys:
        offsets = _place(sorted(numbers, key=key), sizes, spans)
        total = max((offset + size for offset, size in zip(offsets, sizes)), default=0)
        if best is None or total < best.bytes:
            best = Arena(tuple(offsets), total, bound)
        if total == bound:
            break
    return best


def _place(order, sizes, spans):
    """Offsets: each value in turn goes into the smallest gap between those it lives together with, else behind them."""
    offsets = [0] * len(sizes)
    placed = []
    for number in order:
        first, last = spans[number]
        taken = sorted((offsets[other], sizes[other]) for other in placed if spans[other][0] <= last and first <= spans[other][1])
        offsets[number] = _best_gap(taken, sizes[number])
        placed.append(number)
    return offsets


def _best_gap(taken, size):
    end, best, smallest = 0, None, None
    for offset, taken_size in taken:
        gap = offset - end
        if gap >= size and (smallest is None or gap < smallest):
            best, smallest = end, gap
        end = max(end, offset + taken_size)
    return end if best is None else best


def _bound(sizes, spans):
    changes = {}
    for size, (first, last) in zip(sizes, spans):
        changes[first] = changes.get(first, 0) + size
        changes[last + 1] = changes.get(last + 1, 0) - size
    live = most = 0
    for position in sorted(changes):
        live += changes[position]
        most = max(most, live)
    return most
