"""Batches of decoded images, a few ahead of their use, by threads.

Threads, not processes: Pillow and numpy release the interpreter's lock while they work, and nothing is forked, pickled or put
into /dev/shm, which is where loaders hang on small boards.
"""

import collections
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from .errors import UserError
from .images import MAX_MEGAPIXELS, load_image

logger = logging.getLogger(__name__)

_IMAGES_AHEAD = 32
_LOW_MEMORY_BYTES = 1 << 30


class ImageLoader:
    """Decodes samples into batches, in the order asked for, whatever the number of workers.

    Args:
        samples: sequence of objects with a `.path`.
        transform: a `Transform`, or a list of them: each image is then decoded once and put through all.
        workers: decoding threads; 0 decodes in the calling thread; "auto" is one per usable core, 0 when memory is short.
        max_megapixels: see `load_image`.
    """

    def __init__(self, samples, transform, workers="auto", max_megapixels=MAX_MEGAPIXELS):
        self.samples = samples
        self.has_many_transforms = isinstance(transform, (list, tuple))
        self.transforms = list(transform) if self.has_many_transforms else [transform]
        self.workers = resolve_workers(workers)
        self.max_megapixels = max_megapixels
        self._minimum_side = max(each.minimum_side for each in self.transforms)

    def batches(self, index_lists, view_seed=None):
        """Yield (indices, images) per list of indices; images is float32 [B, 3, S, S], or a list of such, one per transform.

        Args:
            index_lists: iterable of lists of positions in `samples`; read only as far ahead as the decoding is.
            view_seed: None for evaluation's view; else an int or a tuple such as (seed, epoch). The sample's index is added, so
                that a sample's view depends on neither its batch nor its order.

        Raises:
            BadImage: at the batch that holds the unreadable file; it carries the path.
        """
        if self.workers == 0:
            for indices in index_lists:
                indices, images = self._new_batch(indices)
                for slot, index in enumerate(indices):
                    self._fill(images, slot, index, view_seed)
                yield indices, self._output(images)
            return
        executor = ThreadPoolExecutor(self.workers)
        pending = collections.deque()
        try:
            remaining = iter(index_lists)
            is_exhausted = False
            while pending or not is_exhausted:
                # one batch beyond the next one, and more while batches are small
                while not is_exhausted and (len(pending) < 2 or _count(pending) < _IMAGES_AHEAD):
                    batch = next(remaining, None)
                    is_exhausted = batch is None
                    if not is_exhausted:
                        pending.append(self._submit(executor, batch, view_seed))
                if pending:
                    indices, images, jobs = pending[0]
                    for job in jobs:
                        job.result()
                    pending.popleft()
                    yield indices, self._output(images)
        finally:  # also when the consumer stops early, and on Ctrl-C: waits for the images being decoded, starts no other
            for _, _, jobs in pending:
                for job in jobs:
                    job.cancel()
            executor.shutdown(wait=True)

    def _submit(self, executor, indices, view_seed):
        indices, images = self._new_batch(indices)
        jobs = [executor.submit(self._fill, images, slot, index, view_seed) for slot, index in enumerate(indices)]
        return indices, images, jobs

    def _new_batch(self, indices):
        indices = [int(index) for index in indices]
        return indices, [torch.empty(len(indices), 3, each.size, each.size) for each in self.transforms]

    def _fill(self, images, slot, index, view_seed):
        """Decode one sample straight into its place in the batch: nothing is stacked or copied afterwards."""
        image = load_image(self.samples[index].path, self.max_megapixels, self._minimum_side)
        seed = None if view_seed is None else _words(view_seed) + (index,)
        for transform, tensor in zip(self.transforms, images):
            transform.write(image, tensor[slot].numpy(), seed)

    def _output(self, images):
        return images if self.has_many_transforms else images[0]


def resolve_workers(workers):
    """The number of decoding threads: a whole number as given, or "auto" by cores and free memory."""
    if workers == "auto":
        available = available_memory()
        if available is not None and available < _LOW_MEMORY_BYTES:
            logger.info("images are decoded by the main thread: only %d MiB of memory are free", available >> 20)
            return 0
        return usable_cores()
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise UserError("loader.workers=%s: give a whole number of at least 0, or auto" % (workers,))
    return workers


def usable_cores():
    """Cores this process may run on, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(meminfo="/proc/meminfo"):
    """Bytes that can be had without swapping, or None where the system does not say."""
    try:
        with open(meminfo) as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _words(view_seed):
    return tuple(view_seed) if isinstance(view_seed, (tuple, list)) else (view_seed,)


def _count(pending):
    return sum(len(indices) for indices, _, _ in pending)
