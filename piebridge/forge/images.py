"""The unlabelled images of the forge: some to fit on, some held out, each at any size."""

import logging

import numpy as np

from piebridge.core.errors import UserError
from piebridge.core.images import BadImage, load_image
from piebridge.core.loader import ImageLoader, in_batches
from piebridge.core.prediction import find_images
from piebridge.core.transforms import Transform

LOG = logging.getLogger(__name__)
LEAST_IMAGES = 32
MAX_BAD_SHARE = 0.1


class _Sample:
    def __init__(self, path):
        self.path = path


class ForgeImages:
    """`fitted` and `held_out`: lists of positions in `samples`, drawn once with a seed; unreadable images are named and left out.

    folder: searched through for image files. description: the original's, for sizes and normalisation. UserError: fewer than
    LEAST_IMAGES that can be read, many that cannot, or all of one colour, which shows nothing of what a network does.
    """

    def __init__(self, folder, description, settings):
        paths = find_images([folder])
        order = np.random.RandomState(settings.seed).permutation(len(paths))
        wanted = settings.images + settings.held_out
        paths, self.bad = _readable([paths[position] for position in order], wanted)
        if len(paths) < LEAST_IMAGES:
            raise UserError(f"{folder}: {len(paths)} images that can be read; the forge needs at least {LEAST_IMAGES}, better hundreds")
        if len(self.bad) > MAX_BAD_SHARE * (len(paths) + len(self.bad)):
            raise UserError(f"{folder}: {len(self.bad)} of {len(paths) + len(self.bad)} images cannot be read, the first is {self.bad[0]}")
        held_out = min(settings.held_out, len(paths) // 3)
        self.samples = [_Sample(path) for path in paths[:held_out + settings.images]]
        self.held_out = list(range(held_out))
        self.fitted = list(range(held_out, len(self.samples)))
        self.description, self.settings = description, settings
        self._check_colours(folder)

    def batches(self, indices, sizes, batch_size=None):
        """Yield images float32 [B,3,S,S], or for a list of sizes a list of such, of the samples `indices` in order."""
        for _, images in self._loader(sizes).batches(in_batches_of(indices, batch_size or self.settings.batch_size)):
            yield images

    def _loader(self, sizes):
        are_many = isinstance(sizes, (list, tuple))
        transforms = [Transform.for_network(self.description, size=size) for size in (sizes if are_many else [sizes])]
        return ImageLoader(self.samples, transforms if are_many else transforms[0], self.settings.workers)

    def _check_colours(self, folder):
        for images in self.batches(self.fitted[:LEAST_IMAGES], 32):
            if float(images.flatten(2).std(2).max()) > 1e-3:
                return
        raise UserError(f"{folder}: each image looked at is of one colour; proxies are aligned on images that show something")


def in_batches_of(indices, size):
    """A list cut into lists of `size`."""
    return [[indices[position] for position in batch] for batch in in_batches(len(indices), size)]


def _readable(paths, wanted):
    """The first `wanted` paths that can be decoded, and those that cannot among what was looked at."""
    readable, bad = [], []
    for path in paths:
        if len(readable) == wanted:
            break
        try:
            load_image(path, minimum_side=32)
            readable.append(path)
        except BadImage as error:
            LOG.warning("%s", error)
            bad.append(path)
    return readable, bad
