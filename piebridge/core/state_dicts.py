"""State dicts from `.pth` files, read without running code, and matched to a network's own keys."""

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch

from piebridge.core import compat
from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.core.packages import one_line

_WRAPPERS = ("state_dict", "model", "model_state_dict", "net", "model_ema")  # keys under which training scripts save a state dict
_PLAIN_STORAGES = ("FloatStorage", "DoubleStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage", "ShortStorage",
                   "CharStorage", "ByteStorage", "BoolStorage")


def read_state_dict(path, trust_pickle=False):
    """{key: tensor on the CPU} from a `.pth` or `.pt` file; nothing in the file is run, unless `trust_pickle` allows it.

    UserError for a file that is missing, no torch file, a TorchScript archive, or a pickle of more than tensors (a whole module).
    With `trust_pickle`, of a pickled module its state dict is taken.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if _is_torchscript(path):
        raise UserError(f"{path}: a TorchScript archive, not a state dict; save the module's state_dict() instead")
    try:
        if trust_pickle:
            content = _load(path, weights_only=False)
        else:
            content = _load(path, weights_only=True) if compat.HAS_WEIGHTS_ONLY else load_restricted(path)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: holds pickled objects other than tensors, which could run code ({one_line(error)}); save "
                        "the module's state_dict(), or give trust_pickle=true if you trust whoever made the file") from None
    except Exception as error:  # whatever a damaged archive makes torch raise
        raise UserError(f"{path}: not a readable torch file ({one_line(error)})") from None
    return _tensors_of(path, content)


def load_restricted(path):
    """torch.load with an unpickler that knows tensors and nothing else, for a torch that has no weights_only."""
    return _load(path, weights_only=False, pickle_module=_RestrictedPickle)


def _load(path, weights_only, **arguments):
    if compat.HAS_WEIGHTS_ONLY:
        arguments["weights_only"] = weights_only
    return torch.load(str(path), map_location="cpu", **arguments)


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if module == "collections" and name == "OrderedDict":
            return OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return getattr(torch._utils, name)
        if module == "torch" and name in _PLAIN_STORAGES:
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


class _RestrictedPickle:
    """What torch.load asks of a pickle module."""

    Unpickler = _RestrictedUnpickler

    @staticmethod
    def load(file, **arguments):
        return _RestrictedUnpickler(file, **arguments).load()


def _is_torchscript(path):
    if not zipfile.is_zipfile(str(path)):
        return False
    try:
        with zipfile.ZipFile(str(path)) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _tensors_of(path, content):
    if isinstance(content, torch.nn.Module):  # comes so far only with trust_pickle
        content = content.state_dict()
    for key in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(
            isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content.items()):
        raise UserError(f"{path}: not a state dict (a dict of names and tensors); save the module's state_dict()")
    prefix = "module." if all(key.startswith("module.") for key in content) else ""  # left there by nn.DataParallel
    return OrderedDict((key[len(prefix):], value.detach()) for key, value in content.items())


def match_by_order(where, tensors, expected):
    """Rename `tensors` to the keys of `expected` ({key: shape}) by position; every shape must agree."""
    if len(tensors) != len(expected):
        raise UserError(f"{where}: {len(tensors)} tensors where the architecture has {len(expected)}")
    for (key, tensor), (wanted, shape) in zip(tensors.items(), expected.items()):
        if tuple(tensor.shape) != tuple(shape):
            raise UserError(f"{where}: tensor {key!r} has shape {list(tensor.shape)} where {wanted!r}, at the same place of the "
                            f"architecture, has {list(shape)}")
    return OrderedDict(zip(expected, tensors.values()))


def match_by_name(where, tensors, expected):
    """`tensors` in the order of `expected`; the first key that is missing, extra or of another shape is an error."""
    for key, shape in expected.items():
        if key not in tensors:
            spare = [each for each in tensors if each not in expected]
            raise UserError(f"{where}: tensor {key!r} of the architecture is missing{closest(key, spare)}")
        if tuple(tensors[key].shape) != tuple(shape):
            found = list(tensors[key].shape)
            raise UserError(f"{where}: tensor {key!r} has shape {found} where the architecture has {list(shape)}")
    for key in tensors:
        if key not in expected:
            raise UserError(f"{where}: tensor {key!r} is none of the architecture's{closest(key, list(expected))}")
    return OrderedDict((key, tensors[key]) for key in expected)
