"""The unlabelled images of the forge: some to fit on, some held out, each at any size."""

import logging

import numpy as np
import torch

from piebridge.core.errors import UserError
from piebridge.core.images import BadImage, load_image
from piebridge.core.loader import ImageLoader, in_batches
from piebridge.core.prediction import find_images
from piebridge.core.transforms import Transform

LOG = logging.getLogger(__name__)
LEAST_IMAGES = 32
MAX_BAD_SHARE = 0.1
MOST_BYTES = 1 << 30  # of images held in memory: 1,783 of 224 x 224 pixels


class _Sample:
    def __init__(self, path):
        self.path = path


class ForgeImages:
    """`fitted` and `held_out`: lists of positions in `samples`, drawn once with a seed; unreadable images are named and left out.

    folder: searched through for image files. description: the original's, for sizes and normalisation. UserError: fewer than
    LEAST_IMAGES that can be read, many that cannot, or each of one colour, which shows nothing of what a network does.
    """

    def __init__(self, folder, description, settings):
        paths = find_images([folder])
        order = np.random.RandomState(settings.seed).permutation(len(paths))
        wanted = max(settings.images + settings.held_out, LEAST_IMAGES)
        paths, bad, shows_something = _readable([paths[position] for position in order], wanted)
        if len(paths) < LEAST_IMAGES:
            raise UserError(f"{folder}: {len(paths)} images that can be read; the forge needs at least {LEAST_IMAGES}, better hundreds")
        if len(bad) > MAX_BAD_SHARE * (len(paths) + len(bad)):
            raise UserError(f"{folder}: {len(bad)} of {len(paths) + len(bad)} images cannot be read, the first is {bad[0]}")
        if not shows_something:
            raise UserError(f"{folder}: each image looked at is of one colour; proxies are aligned on images that show something")
        held_out = min(settings.held_out, len(paths) // 3)
        self.samples = [_Sample(path) for path in paths[:held_out + settings.images]]
        self.held_out = list(range(held_out))
        self.fitted = list(range(held_out, len(self.samples)))
        self.description, self.settings = description, settings
        self._held_size, self._held = None, None

    def batches(self, indices, sizes, batch_size=None):
        """Yield images float32 [B,3,S,S], or for a list of sizes a list of such, of the samples `indices` in order."""
        pieces = in_batches_of(indices, batch_size or self.settings.batch_size)
        if sizes == self._held_size:
            held = self._held  # to the end, whatever is held meanwhile
            yield from (held[piece] for piece in pieces)
        else:
            yield from (images for _, images in self._loader(sizes).batches(pieces))

    def hold(self, size):
        """Decode all samples at a size once for all passes, and keep them in the place of those of another, if they fit into MOST_BYTES."""
        count = len(self.samples)
        if size == self._held_size or count * 12 * size ** 2 > MOST_BYTES:
            return
        self._held_size, self._held = None, None  # before the new ones are made
        images = torch.empty(count, 3, size, size)
        for indices, batch in self._loader(size).batches(in_batches(count, self.settings.batch_size)):
            images[indices] = batch
        self._held_size, self._held = size, images

    def _loader(self, sizes):
        are_many = isinstance(sizes, (list, tuple))
        transforms = [Transform.for_network(self.description, size=size) for size in (sizes if are_many else [sizes])]
        return ImageLoader(self.samples, transforms if are_many else transforms[0], self.settings.workers)


def in_batches_of(indices, size):
    """A list cut into lists of `size`."""
    return [[indices[position] for position in batch] for batch in in_batches(len(indices), size)]


def _readable(paths, wanted):
    """The first `wanted` paths that can be decoded, those that cannot among what was looked at, and whether one has two colours."""
    readable, bad, shows_something = [], [], False
    for path in paths:
        if len(readable) == wanted:
            break
        try:
            image = load_image(path, minimum_side=32)
        except BadImage as error:
            LOG.warning("%s", error)
            bad.append(path)
            continue
        readable.append(path)
        shows_something = shows_something or any(high > low for low, high in image.getextrema())
    return readable, bad, shows_something
