"""The original's tensors, as proxies take their parts of them: in its own order, and, where a set has one, in nested order.

In nested order the channels that the most levels keep come first, so that a proxy's tensor is a prefix of one tensor, and a view
of it. The original itself is in its own order, bit for bit as its file has it; the nested order is then a second copy of the
tensors that are cut anywhere. A device that is short of memory can do without that copy: `is_reordered` turns the original
itself into nested order, which changes its outputs by the rounding of sums, and `in_own_order` undoes it, bit for bit.
"""

import torch
from torch import nn

from piebridge.core.network import GraphNetwork
from piebridge.core.slices import cut, is_prefix, reordered, scatter


class SharedTensors:
    """original: GraphNetwork as its file has it. order: cuts with all positions of each axis they name, or {}.

    `original` is then the one to use: the same, or, where `is_reordered`, one in nested order. keeps_parts: whether a copy that was made
    for one proxy stays for the next.
    """

    def __init__(self, original, order, is_reordered=False, keeps_parts=True):
        self.order, self.description, self.is_reordered, self._keeps_parts = order, original.description, is_reordered, keeps_parts
        tensors = dict(original.named_buffers(), **dict(original.named_parameters()))
        self.shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        self.dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
        self._nested = {key: _like(tensors[key], cut(tensors[key].detach(), slices)) for key, slices in order.items()}
        if is_reordered:
            tensors.update(self._nested)
            original = GraphNetwork(original.description, tensors).eval()
        self.original, self._tensors, self._parts = original, tensors, {}

    def part(self, key, slices):
        """The part of a tensor that its slices (in the original's own order) name.

        Of a parameter: the parameter itself where nothing is cut, a view where its positions are a prefix in nested order (or
        in the own order, where the set has no other), otherwise a copy; the same part is the same object, where parts are kept. A joint
        matrix of query, key and value is three prefixes, and so copied. Buffers are copies, since batch norm writes to them.
        """
        if key in self.order and (slices or self.is_reordered):
            base, slices = self._nested[key], reordered(slices, self.order[key])
        else:
            base = self._tensors[key]
        slices = _not_whole(slices, base.shape)
        if not isinstance(base, nn.Parameter):
            return cut(base, slices).clone()
        if not slices:
            return base
        place = key, tuple((axis, tuple(positions)) for axis, positions in slices)
        part = self._parts[place] if place in self._parts else _like(base, _taken(base.detach(), slices))
        if self._keeps_parts:
            self._parts[place] = part
        return part

    def cuts_in_memory(self, cuts):
        """Cuts of the original's file -> the same cuts of `original`, which may be in nested order."""
        if not self.is_reordered:
            return cuts
        found = dict(cuts, **{key: reordered(cuts.get(key, []), slices) for key, slices in self.order.items()})
        found = {key: _not_whole(slices, self.shapes[key]) for key, slices in found.items()}
        return {key: slices for key, slices in found.items() if slices}


def in_own_order(network, order):
    """A network whose tensors are in nested order -> the same network in the original's own order, bit for bit."""
    tensors = dict(network.named_buffers(), **dict(network.named_parameters()))
    tensors.update({key: _like(tensors[key], scatter(tensors[key].detach(), slices, torch.empty_like(tensors[key].detach())))
                    for key, slices in order.items()})
    return GraphNetwork(network.description, tensors).train(network.training)


def _taken(tensor, slices):
    """`cut`, with copies made by numpy where it can: the thread that loads a level may run no parallel operation of torch."""
    if tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16 or all(is_prefix(positions) for _, positions in slices):
        return cut(tensor, slices)
    array = tensor.numpy()
    for axis, positions in slices:
        array = array[(slice(None),) * axis + (slice(len(positions)),)] if is_prefix(positions) else array.take(positions, axis)
    return torch.from_numpy(array)


def _not_whole(slices, shape):
    return [(axis, positions) for axis, positions in slices if len(positions) < shape[axis] or not is_prefix(positions)]


def _like(whole, part):
    """`part` as a parameter where `whole` is one."""
    return nn.Parameter(part, requires_grad=whole.requires_grad) if isinstance(whole, nn.Parameter) else part
