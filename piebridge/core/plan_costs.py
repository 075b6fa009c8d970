"""What single images cost here: decoding, frozen networks, the trained part. Measured on a few real images, in a stated time."""

import contextlib
import logging
import statistics
import time

import numpy as np
import torch

from piebridge.core.bad_images import NOTHING_READABLE
from piebridge.core.device import limited_threads, same_random_numbers, synchronizer
from piebridge.core.errors import UserError
from piebridge.core.gate import OpenGate
from piebridge.core.graph import INPUT
from piebridge.core.loader import in_batches

LOG = logging.getLogger(__name__)
LEAST_CALLS = 2  # that are counted, of anything; one before them warms up
MOST_CALLS = 60
DECODED = 64  # images, at most
LEAST_SECONDS = 1.0  # left to measure, where something is measured that is known


class Costs:
    """Milliseconds per image, but for the bytes.

    decode: {pixels: ms}. frozen: {level name: ms of its frozen part}. trained: {level name: ms of forward, backward and update from its tap
    on}. cached: ms of the same on rows that are ready. row_values: numbers at the tap.
    """

    def __init__(self, decode, frozen, trained, cached, row_values):
        self.decode, self.frozen, self.trained, self.cached, self.row_values = decode, frozen, trained, cached, row_values


class Ruler:
    """Measures costs. part: a `FrozenPart`; levels: the Offers that samples could be given; step: of the run's kind, on the part's tuning;
    seconds: about how long all of it may take, though LEAST_CALLS of each are measured in any case."""

    def __init__(self, part, levels, step, seconds):
        self.part, self.work, self.levels, self.step = part, part.work, levels, step
        self._deadline = time.perf_counter() + seconds
        self._left = 1
        self._wait = synchronizer(part.work.device)

    def measure(self):
        """The Costs of the original and of every level on offer; what is trained is as it was before."""
        part, is_cacheable = self.part, self.part.tuning.tap != INPUT
        deep = [] if part.is_at_head else [level for level in self.levels if not level.needs_images]
        sizes = sorted({part.native} | {level.resolution for level in self.levels}, reverse=True)
        self._left = len(sizes) + is_cacheable + len(deep) + 2
        decode, images = {}, {}
        for size in sizes:
            decode[size], images[size] = self._decode(size)
        frozen = {"original": self._frozen(images[part.native]) if is_cacheable else 0.0}
        for level in self.levels:
            frozen[level.name] = level.share * frozen["original"]
        with self._as_before():
            values = self._values(images[part.native])
            trained = {"original": self._step(values)}
            for level in self.levels:
                trained[level.name] = trained["original"] if part.is_at_head else level.share * trained["original"]
            for level in deep:  # the original itself on smaller images
                trained[level.name] = self._step(self._values(images[level.resolution]))
            with limited_threads(1 if part.is_at_head else None):
                cached = self._step(values) if is_cacheable else None
        return Costs(decode, frozen, trained, cached, int(np.prod(values.shape[1:])))

    def _decode(self, size):
        """(milliseconds of an image, the first batch)."""
        part, batch_size = self.part, self.part.config.loader.batch_size
        chosen = np.linspace(0, part.count - 1, min(part.count, DECODED)).astype(int)
        lists = [chosen[batch].tolist() for batch in in_batches(len(chosen), batch_size)]
        stop, first, seen, start = self._share(), None, 0, time.perf_counter()
        with contextlib.closing(part.loader(size).batches(lists, self.work.view_seed(0))) as batches:
            for indices, images in batches:
                first = images if first is None and indices else first
                seen += len(indices)
                if seen >= 2 * batch_size and time.perf_counter() > stop:
                    break
        if first is None:
            raise UserError(NOTHING_READABLE)
        return 1000 * (time.perf_counter() - start) / seen, first

    def _frozen(self, images):
        known = self.part.decisions.values.get("backend", {}).get("milliseconds")
        if known and time.perf_counter() > self._deadline - LEAST_SECONDS:  # what the choice of the backend measured will do
            return known
        measured = self._timed(lambda: self.part.original.features(images)) / len(images)
        return min(known or measured, measured)  # whatever else runs can only make a call longer

    def _values(self, images):
        """What the trained part is given of images of any size."""
        with torch.no_grad():
            return self.part.tuning.frozen().features(images.to(self.work.device)) if self.part.tuning.tap != INPUT else images

    def _step(self, inputs):
        labels = torch.zeros(len(inputs), dtype=torch.int64, device=self.work.device)
        return self._timed(lambda: self.step(inputs, labels, OpenGate(), 0.0)) / len(inputs)

    def _timed(self, call):
        """Median milliseconds of a call."""
        stop, times = self._share(), []
        call()
        while len(times) < LEAST_CALLS or (time.perf_counter() < stop and len(times) < MOST_CALLS):
            start = time.perf_counter()
            call()
            self._wait()
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times)

    def _share(self):
        """When the next measurement has to end, so that all of them have their turn."""
        now = time.perf_counter()
        left, self._left = max(1, self._left), self._left - 1
        return now + max(0.0, self._deadline - now) / left

    @contextlib.contextmanager
    def _as_before(self):
        tuning = self.part.tuning
        kept = {key: tensor.clone() for key, tensor in tuning.state().items()}
        try:
            with same_random_numbers(self.work.device):
                yield
        finally:
            tuning.restore(kept)
