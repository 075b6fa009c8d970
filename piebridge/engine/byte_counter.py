"""Live bytes of what is allocated while a block runs: the measurement that a memory plan is held against."""

import weakref

import torch

from piebridge.engine import compat


class ByteCounter(compat.dispatch_mode()):
    """`with ByteCounter() as counter:` counts the storages that ATen calls create in the block, each until it is freed.

    live, peak: bytes. What existed before, workspaces within a kernel, and the allocator's rounding are not counted.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = {}  # storage key -> bytes; 0 for what was there before

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        for tensor in _tensors((arguments, keywords)):
            self._meet(tensor, is_new=False)
        result = function(*arguments, **keywords)
        for tensor in _tensors(result):
            self._meet(tensor, is_new=True)
        self.peak = max(self.peak, self.live)
        return result

    def _meet(self, tensor, is_new):
        key = compat.storage_key(tensor)
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        self._known[key] = storage.nbytes() if is_new else 0
        self.live += self._known[key]
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key):
        self.live -= self._known.pop(key)


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _tensors(each)
