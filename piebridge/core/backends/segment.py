"""A frozen stretch of a network, from the images to its tap, on one backend."""

import torch

from piebridge.core.errors import UserError
from piebridge.core.workers import usable_cores


class Unsupported(UserError):
    """This network cannot run on this backend here; the text says why."""


class Segment:
    """`segment(images)`: float32 [N,3,S,S], normalised -> the value at the network's tap, float32 [N,...] on the CPU, without
    a gradient.

    backend: its name. input_size: S. batch_size: what the backend was built for; any N is taken, and where the backend `is_fixed`
    to its batch size, images go through it in pieces of that size, the last one filled up with zeros. The features of an image do
    not depend on the images beside it. Calls from several threads at once are not allowed.
    """

    def __init__(self, backend, run, input_size, batch_size, is_fixed=False):
        self.backend, self.input_size, self.batch_size = backend, input_size, batch_size
        self._run, self._is_fixed = run, is_fixed

    def __call__(self, images):
        expected = (3, self.input_size, self.input_size)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected or images.dtype != torch.float32:
            raise ValueError(f"segment {self.backend}: images must be float32 [N,3,{self.input_size},{self.input_size}], "
                             f"not {images.dtype} {list(images.shape)}")
        if not self._is_fixed:
            return self._run(images)
        return torch.cat([self._whole_batch(piece) for piece in images.split(self.batch_size)])

    def _whole_batch(self, images):
        count = len(images)
        if count < self.batch_size:
            filler = torch.zeros((self.batch_size - count,) + tuple(images.shape[1:]))
            images = torch.cat([images, filler])
        return self._run(images)[:count]


def threads():
    """How many threads a library of its own may use: as many as torch was told to use, and no more than there are cores."""
    return max(1, min(torch.get_num_threads(), usable_cores()))
