"""Dimensions: which axes of which tensors and values are one and the same, so that what is cut from one is cut from all.

An axis is a list of `Dimension`s, outer first; its size is their product, and an axis of size 1 is the empty list. Axes that an
operation ties together (the two sides of a sum, a convolution's input and its weight) are unified. Where one side is a product
of finer dimensions (768 channels that are seen as 12 heads of 64), the coarser side is split. A bottleneck, for example:

    axis 0 of conv1.weight = axis 0 of bn1.weight = axis 1 of conv2.weight: one dimension, of size 64

What must keep its size is fixed: what enters or leaves a block, what a softmax normalises over, what is indexed.
"""

import functools
import operator


class Dimension:
    """One factor of an axis. `size` and `is_fixed` are to be read of `leaves()` only, since splits and merges come later."""

    def __init__(self, size, is_fixed=False):
        self.size, self.is_fixed = size, is_fixed
        self._same_as, self._parts = None, None

    def leaves(self):
        """The dimensions that this one now consists of, outer first; equal objects are the same dimension."""
        root = self
        while root._same_as is not None:
            root = root._same_as
        if root._parts is None:
            return [root]
        return [leaf for part in root._parts for leaf in part.leaves()]

    def split(self, outer):
        """Make this leaf a product of two: `outer`, which divides its size, and the rest."""
        self._parts = [Dimension(outer, self.is_fixed), Dimension(self.size // outer, self.is_fixed)]

    def merge(self, other):
        """Make another leaf of the same size this one."""
        if other is not self:
            other._same_as = self
            self.is_fixed = self.is_fixed or other.is_fixed


def fresh(size, is_fixed=False):
    """A new axis of this size."""
    return [Dimension(size, is_fixed)] if size > 1 else []


def leaves(axis):
    return [leaf for dimension in axis for leaf in dimension.leaves()]


def size_of(axis):
    return product(leaf.size for leaf in leaves(axis))


def product(sizes):
    """math.prod, which Python 3.6 has not."""
    return functools.reduce(operator.mul, sizes, 1)


def fix(*axes):
    """Nothing may be cut from these axes."""
    for axis in axes:
        for leaf in leaves(axis):
            leaf.is_fixed = True


def unify(first, second):
    """Two axes of equal size become the same. Where their factors do not fit each other (6 x 2 and 4 x 3), both are fixed."""
    left, right = list(first), list(second)
    while left and right:
        left[:1], right[:1] = left[0].leaves(), right[0].leaves()
        one, other = left[0], right[0]
        if one.size == other.size:
            one.merge(other)
            del left[0], right[0]
        elif one.size % other.size == 0:
            one.split(other.size)
        elif other.size % one.size == 0:
            other.split(one.size)
        else:
            fix(left, right)
            return


def regroup(axes, shape):
    """The axes of a value with these axes after a reshape; all is fixed where its factors do not fit the new shape."""
    waiting = [dimension for axis in axes for dimension in axis]
    regrouped = []
    for size in shape:
        axis = []
        while size > 1:
            waiting[:1] = waiting[0].leaves()
            first = waiting[0]
            if size % first.size == 0:
                axis.append(waiting.pop(0))
                size //= first.size
            elif first.size % size == 0:
                first.split(size)
            else:
                fix(*axes)
                return [fresh(each, is_fixed=True) for each in shape]
        regrouped.append(axis)
    return regrouped


def broadcast(first, second):
    """Axes of what an elementwise operation makes of two values, which it ties together; an axis of size 1 stretches."""
    rank = max(len(first), len(second))
    first, second = ([[]] * (rank - len(axes)) + axes for axes in (first, second))
    for one, other in zip(first, second):
        if one and other:
            unify(one, other)
    return [one or other for one, other in zip(first, second)]
