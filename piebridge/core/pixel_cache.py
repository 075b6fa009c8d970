"""Decoded images, kept as the 8-bit pixels that the transform has cut and resized: the exact input, without the decoding."""

import torch


class PixelTransform:
    """A Transform up to its pixels: what an ImageLoader then gives is uint8 [B, size, size, 3]."""

    def __init__(self, transform):
        self._transform = transform
        self.size, self.minimum_side = transform.size, transform.minimum_side

    def empty(self, count):
        return torch.empty(count, self.size, self.size, 3, dtype=torch.uint8)

    def write(self, image, output, view_seed=None):
        output[:] = self._transform.pixels(image, view_seed)

    def as_dict(self):
        """What decides the pixels; mean and deviation come later."""
        return {name: value for name, value in self._transform.as_dict().items() if name not in ("mean", "std")}


class PixelLoader:
    """Gives an ImageLoader's batches of one transform from cached pixels, bit for bit.

    views: {view seed: RowTable of pixels}.
    """

    def __init__(self, transform, views):
        self._transform, self._views = transform, views
        self._present = {seed: set(table.usable) for seed, table in views.items()}

    def batches(self, index_lists, view_seed=None):
        """Yield (indices, images float32 [B, 3, S, S]) per list of indices, without the samples that could not be read."""
        table, present = self._views[view_seed], self._present[view_seed]
        for indices in index_lists:
            indices = [index for index in indices if index in present]
            images = self._transform.empty(len(indices))
            for slot, pixels in enumerate(table.read(indices) if indices else ()):
                self._transform.normalise(pixels, images[slot].numpy())
            yield indices, images
