"""Lists of positions in a `.safetensors`: each as one int32 tensor, stored once, and named by its number in the JSON beside it."""

import numpy as np
import torch

from piebridge.core.errors import UserError

PREFIX = "positions/"  # no module path has a slash


class PositionLists:
    """Collects lists for a file that is written."""

    def __init__(self):
        self._numbers = {}

    def number(self, positions):
        return self._numbers.setdefault(tuple(positions), len(self._numbers))

    def pack(self, cuts):
        """{key: [[axis, number], ...]} of {key: [(axis, positions), ...]}."""
        return {key: [[axis, self.number(positions)] for axis, positions in slices] for key, slices in cuts.items()}

    def tensors(self):
        return {PREFIX + str(number): torch.tensor(positions, dtype=torch.int32) for positions, number in self._numbers.items()}


class StoredLists:
    """The lists of a file that was read; they are checked here, and what they are used for is in `unpack`. UserError."""

    def __init__(self, path, tensors):
        self._path, self._lists = path, {}
        for name, tensor in tensors.items():
            values = tensor.tolist() if tensor.dtype == torch.int32 and tensor.dim() == 1 else []
            if not values or min(values) < 0 or len(np.unique(values)) < len(values):
                raise UserError(f"{path}: tensor {name!r} must be a list of different positions, from 0 up, as int32")
            self._lists[name] = values

    def of(self, where, number):
        """The list with this number; `where` begins the sentence of an error."""
        if type(number) is not int or PREFIX + str(number) not in self._lists:
            raise UserError(f"{self._path}: {where}: there is no list of positions {number!r:.20}")
        return self._lists[PREFIX + str(number)]

    def unpack(self, cuts, shapes):
        """{key: [(axis, positions)]} of JSON {key: [[axis, number]]}, checked against {key: shape} of the tensors to be cut."""
        if not isinstance(cuts, dict):
            raise UserError(f"{self._path}: cuts={cuts!r:.60} must be an object of tensors")
        return {key: self._slices(key, slices, shapes) for key, slices in cuts.items()}

    def _slices(self, key, slices, shapes):
        where = f"cuts of {key!r:.80}"
        if key not in shapes:
            raise UserError(f"{self._path}: {where}: the original has no such tensor")
        if not isinstance(slices, list) or not slices or not all(isinstance(each, list) and len(each) == 2 for each in slices):
            raise UserError(f"{self._path}: {where} must be a list of [axis, number]")
        found, shape = [], shapes[key]
        for axis, number in slices:
            if type(axis) is not int or not 0 <= axis < len(shape) or axis in dict(found):
                raise UserError(f"{self._path}: {where}: axis {axis!r:.20} is not one of its {len(shape)}, each at most once")
            positions = self.of(where, number)
            if max(positions) >= shape[axis]:
                raise UserError(f"{self._path}: {where}: position {max(positions)} on axis {axis}, which has {shape[axis]}")
            found.append((axis, positions))
        return found
