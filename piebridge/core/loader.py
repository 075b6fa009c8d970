"""Batches of decoded images, a few ahead of their use, by threads.

Threads, not processes: Pillow and numpy release the interpreter's lock while they work, and nothing is forked, pickled or put
into /dev/shm, which is where loaders hang on small boards.
"""

import collections
from concurrent.futures import ThreadPoolExecutor

import torch

from piebridge.core.images import MAX_MEGAPIXELS, load_image, silence_pillow
from piebridge.core.workers import resolve_workers

_IMAGES_AHEAD = 32


class ImageLoader:
    """Decodes samples into batches, in the order asked for, whatever the number of workers.

    Args:
        samples: sequence of objects with a `.path`.
        transform: a `Transform`, or a list of them: each image is then decoded once and put through all.
        workers: decoding threads; 0 decodes in the calling thread; "auto" is one per usable core, 0 when memory is short.
        max_megapixels: see `load_image`.
    """

    def __init__(self, samples, transform, workers="auto", max_megapixels=MAX_MEGAPIXELS):
        silence_pillow()
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


def _words(view_seed):
    return tuple(view_seed) if isinstance(view_seed, (tuple, list)) else (view_seed,)


def _count(pending):
    return sum(len(indices) for indices, _, _ in pending)
