"""Training on a stream: samples that arrive one after another, each view seen once, so that nothing is worth keeping.

The loop is the usual one. An epoch is a number of samples, and what the loop takes for a sample is a *slot*: its number among the
epoch's arrivals. A slot is filled when the loader comes to it, which is a few batches before the trainable part does.
"""

import contextlib
import copy
import functools
import itertools
import operator

import torch
from PIL import Image

from piebridge.core.errors import UserError
from piebridge.core.labels import Labels
from piebridge.core.layouts import Sample
from piebridge.core.names import closest
from piebridge.core.sampler import epoch_batches


class Stream(Labels):
    """The labels of an epoch's slots, and the samples in those that wait to be decoded.

    arrivals: position -> iterator of (image, label) from that sample of the run on; image: a path or a PIL image; label: its class, by
    name or number. size: samples of an epoch. classes: names.
    """

    def __init__(self, arrivals, size, classes, device):
        super().__init__(torch.zeros(size, dtype=torch.int64, device=device))
        self.size, self.samples = size, {}
        self._arrivals, self._classes = arrivals, list(classes)
        self._coming, self._position = iter(()), 0

    def start(self, position):
        """The next sample to arrive is the `position`-th of the run."""
        self._coming, self._position = self._arrivals(position), position
        self.samples.clear()

    def admit(self, batches):
        """Pass lists of slots on, each when its samples have arrived; no faster than they are asked for."""
        for slots in batches:
            for slot in slots:
                image, label = self._next()
                self._labels[slot] = label
                self.samples[slot] = Sample(image, label)
            yield slots

    def _next(self):
        arrived = next(self._coming, None)
        if arrived is None:
            raise UserError(f"images: the stream ended after {self._position} samples, and an epoch takes stream.samples={self.size}; give "
                            "more, or fewer epochs or samples")
        self._position += 1
        try:
            image, label = arrived
        except (TypeError, ValueError):
            raise UserError(f"images: sample {self._position} is no pair of image and label") from None
        if not isinstance(image, Image.Image):
            image = str(image)
        return image, self._number(label)

    def _number(self, label):
        if isinstance(label, str) and label in self._classes:
            return self._classes.index(label)
        with contextlib.suppress(TypeError):
            if not isinstance(label, bool) and 0 <= operator.index(label) < len(self._classes):
                return operator.index(label)
        raise UserError(f"images: sample {self._position} has the label {label!r}{closest(str(label), self._classes)}; give the name of a "
                        f"class, or its number from 0 to {len(self._classes) - 1}")


class StreamLoader:
    """An ImageLoader of what arrives, in place of one of files."""

    def __init__(self, loader, stream):
        self._loader, self._stream = copy.copy(loader), stream
        self._loader.samples = _Taken(stream.samples)

    def batches(self, slots, view_seed=None):
        return self._loader.batches(self._stream.admit(slots), view_seed)


class StreamSource:
    """What `source` (see core/sources.py) makes of a stream's samples; its levels' loaders become StreamLoaders."""

    needs_level_batches = False

    def __init__(self, source, stream):
        for level in source.levels:
            level.loader = StreamLoader(level.loader, stream)
        self.levels, self.threads, self.usable = source.levels, source.threads, list(range(stream.size))
        self._source, self._stream = source, stream

    def stream(self, batches, epoch, levels):
        """As the wrapped source does; `batches` are the rest of the epoch, so that a run that goes on finds its place."""
        done = self._stream.size - sum(len(batch) for batch in batches)
        self._stream.start(epoch * self._stream.size + done)
        return self._source.stream(batches, epoch, levels)


class _Taken:
    """Samples that are gone once they have been looked at: no decoded or undecoded image outlives its batch."""

    def __init__(self, samples):
        self._samples = samples

    def __getitem__(self, slot):
        return self._samples.pop(slot)


def arrivals_of(dataset, seed):
    """A data set's training images as a stream without an end: pass after pass, each in an order of its own."""
    return functools.partial(_endless, dataset.train, seed)


def arrivals_from(images):
    """Any iterable as a stream. It goes where it stands: a run that goes on after a stop takes what comes then."""
    coming = iter(images)
    return lambda position: coming


def _endless(samples, seed, position):
    first, skipped = divmod(position, len(samples))
    for number in itertools.count(first):
        (order,) = epoch_batches(len(samples), len(samples), seed, number)
        for index in order[skipped:]:
            yield samples[index]
        skipped = 0
