"""Predictor files: a ResidualPredictor as tensors in one `.safetensors`. Reading one runs no code from it, and checks all of it."""

from collections import OrderedDict

import numpy as np
import torch

from piebridge.core.difficulty import ResidualPredictor
from piebridge.core.errors import UserError
from piebridge.core.safetensors_file import read_header, read_safetensors, write_safetensors

KEY, VALUE = "piebridge_predictor", "1"
MAX_SIZES = {"features": 1 << 20, "levels": 1000, "images": 1 << 24}
# tensor -> what its axes count; all are float64
_AXES = OrderedDict([("mean", ("features",)), ("weights", ("features", "levels")), ("offsets", ("levels",)),
                     ("spreads", ("levels",)), ("scores", ("images",))])


def save_predictor(predictor, path):
    """Write a ResidualPredictor, atomically."""
    arrays = {name: np.ascontiguousarray(getattr(predictor, name), np.float64) for name in _AXES}
    write_safetensors(path, {name: torch.from_numpy(array) for name, array in arrays.items()}, {KEY: VALUE})


def load_predictor(path):
    """The ResidualPredictor of a file. UserError names the file and what is wrong in it."""
    header = read_header(path)
    if header.metadata.get(KEY) != VALUE:
        raise _refusal(path, f"its metadata has {KEY}={header.metadata.get(KEY)!r:.20}, and this piebridge reads {VALUE!r}")
    _check_entries(path, header.entries)
    arrays = {name: tensor.numpy() for name, tensor in read_safetensors(path)[0].items()}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise _refusal(path, f"tensor {name!r} has values that are not finite")
    if not (arrays["spreads"] > 0).all():
        raise _refusal(path, "tensor 'spreads' has values that are not above zero")
    return ResidualPredictor(**arrays)


def _check_entries(path, entries):
    if set(entries) != set(_AXES):
        raise _refusal(path, f"it has the tensors {', '.join(sorted(entries)) or 'none':.80} instead of {', '.join(sorted(_AXES))}")
    sizes = {}
    for name, axes in _AXES.items():
        entry = entries[name]
        if entry.dtype != "F64" or len(entry.shape) != len(axes):
            raise _refusal(path, f"tensor {name!r} is {entry.dtype} {list(entry.shape)}, and should be F64 with {len(axes)} axes")
        for axis, size in zip(axes, entry.shape):
            if not 1 <= size <= MAX_SIZES[axis]:
                raise _refusal(path, f"tensor {name!r} is for {size} {axis}; 1 to {MAX_SIZES[axis]} are possible")
            if sizes.setdefault(axis, size) != size:
                raise _refusal(path, f"tensor {name!r} is for {size} {axis}, and those before it for {sizes[axis]}")


def _refusal(path, problem):
    return UserError(f"{path}: not a predictor of residuals ({problem}); write it again with piebridge forge")
