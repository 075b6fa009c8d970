"""Slices: which part of the original's tensor a proxy's tensor is.

The slices of one tensor are a list of (axis, positions): what is kept along that axis, in the order in which it is kept. *Cuts*
are {state dict key: slices}. Positions are explicit lists; tensors that are cut alike share one list object.

    cuts = {"conv1.weight": [(0, [4, 1, 7])], "bn1.weight": [(0, [4, 1, 7])], "conv2.weight": [(1, [4, 1, 7])]}
"""

import torch


def cut(tensor, slices):
    """The part of a tensor that its slices name: a view where each list of positions is 0, 1, 2, ...; otherwise a copy."""
    for axis, positions in slices:
        if is_prefix(positions):
            tensor = tensor.narrow(axis, 0, len(positions))
        else:
            tensor = tensor.index_select(axis, _index(positions, tensor))
    return tensor


def scatter(part, slices, whole):
    """A copy of `whole` in which the part that `cut` takes out is `part`: cut(scatter(part, s, whole), s) equals part.

    part: of the shape of cut(whole, slices). `whole` is not changed, and both may carry gradients.
    """
    if not slices:
        if part.shape != whole.shape:
            raise ValueError(f"a part of shape {list(part.shape)} where its place has {list(whole.shape)}")
        return part.clone()
    (axis, positions), rest = slices[0], slices[1:]
    index = _index(positions, whole)
    return whole.index_copy(axis, index, scatter(part, rest, whole.index_select(axis, index)))


def is_prefix(positions):
    return positions[-1] == len(positions) - 1 and list(positions) == list(range(len(positions)))


def reordered(slices, order):
    """Slices of a tensor, told as slices of cut(tensor, order): cut(cut(tensor, order), reordered(slices, order)) is the same.

    order: slices whose positions are all of their axis. An axis of it that `slices` leaves whole is put back into its own order.
    """
    given, rearranged = dict(slices), []
    for axis, positions in order:
        places = {position: place for place, position in enumerate(positions)}
        rearranged.append((axis, [places[position] for position in given.pop(axis, range(len(positions)))]))
    return rearranged + list(given.items())


def _index(positions, tensor):
    return torch.tensor(positions, dtype=torch.int64, device=tensor.device)
