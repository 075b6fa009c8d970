"""Batches of decoded images, a few ahead of their use, by threads.

Threads, not processes: Pillow and numpy release the interpreter's lock while they work, and nothing is forked, pickled or put
into /dev/shm, which is where loaders hang on small boards.
"""

import collections
from concurrent.futures import ThreadPoolExecutor

from piebridge.core.images import MAX_MEGAPIXELS, BadImage, load_image, silence_pillow
from piebridge.core.workers import resolve_workers

_IMAGES_AHEAD = 32


class ImageLoader:
    """Decodes samples into batches, in the order asked for, whatever the number of workers.

    Args:
        samples: sequence of objects with a `.path`.
        transform: a `Transform`, or a list of them: each image is then decoded once and put through all.
        workers: decoding threads; 0 decodes in the calling thread; "auto" is one per usable core, 0 when memory is short.
        max_megapixels: see `load_image`.
        on_bad: called with the BadImage of each unreadable file, in order (see core/bad_images.py); None: it is raised.
    """

    def __init__(self, samples, transform, workers="auto", max_megapixels=MAX_MEGAPIXELS, on_bad=None):
        silence_pillow()
        self.samples = samples
        self.has_many_transforms = isinstance(transform, (list, tuple))
        self.transforms = list(transform) if self.has_many_transforms else [transform]
        self.workers = resolve_workers(workers)
        self.max_megapixels = max_megapixels
        self.on_bad = on_bad
        self._minimum_side = max(each.minimum_side for each in self.transforms)

    def with_transform(self, transform):
        """The same samples and settings with another transform."""
        return ImageLoader(self.samples, transform, self.workers, self.max_megapixels, self.on_bad)

    def batches(self, index_lists, view_seed=None):
        """Yield (indices, images) per list of indices; images is float32 [B, 3, S, S], or a list of such, one per transform.

        Args:
            index_lists: iterable of lists of positions in `samples`; read only as far ahead as the decoding is.
            view_seed: None for evaluation's view; else an int or a tuple such as (seed, epoch). The sample's index is added, so
                that a sample's view depends on neither its batch nor its order.

        Raises:
            BadImage: at the batch that holds an unreadable file, where there is no `on_bad`; with one, the batch goes without it.
        """
        if self.workers == 0:
            for indices in index_lists:
                indices, images = self._new_batch(indices)
                yield self._output(indices, images, [self._fill(images, slot, index, view_seed) for slot, index in enumerate(indices)])
            return
        executor = ThreadPoolExecutor(self.workers)
        pending = collections.deque()
        try:
            remaining = iter(index_lists)
            while self._submit_ahead(executor, remaining, pending, view_seed):
                indices, images, jobs = pending[0]
                errors = [job.result() for job in jobs]
                pending.popleft()
                yield self._output(indices, images, errors)
        finally:  # also when the consumer stops early, and on Ctrl-C: waits for the images being decoded, starts no other
            for _, _, jobs in pending:
                for job in jobs:
                    job.cancel()
            executor.shutdown(wait=True)

    def _submit_ahead(self, executor, remaining, pending, view_seed):
        """Keep one batch beyond the next one in work, and more while batches are small; False when none is left."""
        while len(pending) < 2 or _count(pending) < _IMAGES_AHEAD:
            batch = next(remaining, None)
            if batch is None:
                break
            indices, images = self._new_batch(batch)
            jobs = [executor.submit(self._fill, images, slot, index, view_seed) for slot, index in enumerate(indices)]
            pending.append((indices, images, jobs))
        return bool(pending)

    def _new_batch(self, indices):
        indices = [int(index) for index in indices]
        return indices, [each.empty(len(indices)) for each in self.transforms]

    def _fill(self, images, slot, index, view_seed):
        """Decode one sample straight into its place in the batch: nothing is stacked or copied. Returns what went wrong, or None."""
        try:
            image = load_image(self.samples[index].path, self.max_megapixels, self._minimum_side)
        except BadImage as error:
            if self.on_bad is None:
                raise
            return error
        seed = None if view_seed is None else _words(view_seed) + (index,)
        for transform, tensor in zip(self.transforms, images):
            transform.write(image, tensor[slot].numpy(), seed)
        return None

    def _output(self, indices, images, errors):
        if any(errors):
            for error in filter(None, errors):
                self.on_bad(error)
            kept = [slot for slot, error in enumerate(errors) if error is None]
            indices, images = [indices[slot] for slot in kept], [tensor[kept] for tensor in images]
        return indices, images if self.has_many_transforms else images[0]


def in_batches(count, size):
    """[0, ..., count - 1] cut into lists of `size`."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def _words(view_seed):
    return tuple(view_seed) if isinstance(view_seed, (tuple, list)) else (view_seed,)


def _count(pending):
    return sum(len(indices) for indices, _, _ in pending)
