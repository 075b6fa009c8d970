"""Results of slow measurements on disk, by content: what they were measured on decides the file they lie in."""

import functools
import hashlib
import logging

import torch

from piebridge.core.errors import UserError
from piebridge.core.files import read_json, sha256_of_json, user_cache_folder, write_json
from piebridge.core.safetensors_file import read_safetensors, tensor_bytes, write_safetensors

LOG = logging.getLogger(__name__)
FORMAT, VERSION = "piebridge-engine-search", 1


class Remembered:
    """{name: JSON value} in a file of its own for each `key`, a JSON value that says what was measured and on what.

    folder: Path; None: "search" in the user's cache folder; False: nothing is kept. A file that cannot be read is worth nothing and is
    replaced; a folder that cannot be written is not an error.
    """

    def __init__(self, key, folder=None):
        self._key, self._path, self._values = key, None, {}  # no path: nothing is kept
        if folder is not False:
            self._path = (folder or user_cache_folder() / "search") / f"{sha256_of_json(key)[:32]}.json"
            content = read_json(self._path)
            if isinstance(content, dict) and [content.get(name) for name in ("format", "version", "key")] == [FORMAT, VERSION, key]:
                self._values = dict(content.get("values") or {})
        self.found, self.computed = 0, 0  # what was asked for, by where it came from

    def value(self, name, compute):
        """What is remembered under `name`, else `compute()`, which is then on disk before this returns."""
        if name in self._values:
            self.found += 1
            return self._values[name]
        value = self._values[name] = compute()
        self.computed += 1
        self._keep(lambda: write_json(self._path, {"format": FORMAT, "version": VERSION, "key": self._key, "values": self._values}))
        return value

    def tensors(self, name, compute):
        """The same for {name: tensor}, in a file of its own beside that."""
        path = self._path and self._path.with_suffix(f".{name}.safetensors")
        if path is not None and path.exists():
            try:
                found = dict(read_safetensors(path)[0])
                self.found += 1
                return found
            except UserError as error:
                LOG.warning("%s; measured again and replaced", error)
        tensors = compute()
        self.computed += 1
        self._keep(lambda: write_safetensors(path, tensors))
        return tensors

    def _keep(self, write):
        try:
            if self._path is not None:
                write()
        except (OSError, UserError) as error:
            LOG.info("search: results are not kept for the next time: %s", error)
            self._path = None


def module_hash(module):
    """sha256 (hex) of what a module is and of all its tensors; of a module's forward, its class's name stands for the code."""
    if hasattr(module, "fingerprint"):
        return module.fingerprint()
    digest = hashlib.sha256(f"{type(module).__module__}.{type(module).__qualname__}\n{module}\n".encode())
    for key, tensor in sorted(module.state_dict().items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def batches_hash(batches):
    """sha256 (hex) of a list of batches, each a tensor or a tuple or list of such things."""
    digest = hashlib.sha256()
    _add(digest, batches)
    return digest.hexdigest()


def _add(digest, value):
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {list(value.shape)}\n".encode())
        digest.update(tensor_bytes(value))
    else:
        digest.update(f"({len(value)}\n".encode())
        for each in value:
            _add(digest, each)


def name_of(function):
    """A name that is the same in another process, unlike a partial's representation."""
    if isinstance(function, functools.partial):
        given = ", ".join([*map(repr, function.args), *(f"{key}={value!r}" for key, value in sorted(function.keywords.items()))])
        return f"{name_of(function.func)}({given})"
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
