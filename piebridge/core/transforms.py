"""From a decoded image to the network's input: cut a window, resize it, normalise. Evaluation and augmented views.

A view is a window in the image and a flip. It is drawn before any resizing and does not depend on the output size, so that the
original at 224 px and a proxy at 160 px look at the same part of the same image.
"""

import math

import numpy as np
import torch
from PIL import Image

from piebridge.core.errors import UserError
from piebridge.core.names import closest

_FILTERS = getattr(Image, "Resampling", Image)  # Pillow before 9.1 has them in the module itself
INTERPOLATIONS = {name: getattr(_FILTERS, name.upper())
                  for name in ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")}
AUGMENTATIONS = ("none", "flip", "crop_flip")

_CROP_TRIES = 10


class Transform:
    """`transform(image, view_seed=None)` -> float32 tensor [3, size, size].

    Without a `view_seed` the view is that of evaluation: shorter side to `size / crop_fraction`, centre crop. With one, and with
    `augment` other than "none", the view is drawn from the seed alone: the same seed gives the same view in any process.

    Args:
        size: output pixels, square.
        mean, std: per channel (red, green, blue), for values in 0..1.
        interpolation: a key of INTERPOLATIONS; shrinking is antialiased.
        crop_fraction: part of the resized shorter side that the centre crop keeps, in (0, 1].
        augment: "none"; "flip" (evaluation's window, mirrored half of the time); "crop_flip" (random resized crop and flip).
        crop_scale: smallest and largest part of the image's area that a random crop keeps.
        crop_ratio: smallest and largest width / height of a random crop.

    Raises:
        UserError: an unknown interpolation or augmentation, or a size or fraction out of range.
    """

    def __init__(self, size, mean, std, interpolation="bicubic", crop_fraction=0.875, augment="none", crop_scale=(0.08, 1.0),
                 crop_ratio=(3 / 4, 4 / 3)):
        _check_choice("interpolation", interpolation, INTERPOLATIONS)
        _check_choice("augment", augment, AUGMENTATIONS)
        if int(size) != size or size < 1:
            raise UserError(f"input size {size!r}: give a whole number of pixels, at least 1")
        if not 0 < crop_fraction <= 1:
            raise UserError(f"crop_fraction={crop_fraction!r}: give a number above 0, at most 1")
        self.size = int(size)
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        self.interpolation = interpolation
        self.crop_fraction = float(crop_fraction)
        self.augment = augment
        self.crop_scale = tuple(crop_scale)
        self.crop_ratio = tuple(crop_ratio)
        # (value / 255 - mean) / std as one multiplication and one addition
        std_column = np.asarray(self.std, np.float64).reshape(3, 1, 1)
        mean_column = np.asarray(self.mean, np.float64).reshape(3, 1, 1)
        self._factor = (1 / (255 * std_column)).astype(np.float32)
        self._offset = (-mean_column / std_column).astype(np.float32)

    @classmethod
    def for_network(cls, description, size=None, augment="none"):
        """The transform that a network description asks for; `size` replaces its input size (a proxy at lower resolution)."""
        return cls(size or description["input_size"][-1], description["normalization"]["mean"],
                   description["normalization"]["std"], description["interpolation"], description["crop_fraction"], augment)

    def as_dict(self):
        """Everything that decides the output, as JSON: part of a cache key."""
        names = ("size", "mean", "std", "interpolation", "crop_fraction", "augment", "crop_scale", "crop_ratio")
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items() if name in names}

    @property
    def minimum_side(self):
        """Pixels of an image's shorter side below which even the smallest window would have to be enlarged."""
        if self.augment == "crop_flip":
            return math.ceil(self.size / math.sqrt(self.crop_scale[0] * self.crop_ratio[0]))
        return self._resized_side()

    def __call__(self, image, view_seed=None):
        output = torch.empty(3, self.size, self.size)
        self.write(image, output.numpy(), view_seed)
        return output

    def empty(self, count):
        """A batch that `write` fills: float32 [count, 3, size, size]."""
        return torch.empty(count, 3, self.size, self.size)

    def write(self, image, output, view_seed=None):
        """Like the call, into `output`: a float32 numpy array [3, size, size], such as a slot of a batch."""
        self.normalise(self.pixels(image, view_seed), output)

    def pixels(self, image, view_seed=None):
        """The view before it is normalised: uint8 [size, size, 3]."""
        box, is_flipped = self.view(image.size, view_seed)
        pixels = np.asarray(image.resize((self.size, self.size), INTERPOLATIONS[self.interpolation], box=box))
        return pixels[:, ::-1] if is_flipped else pixels

    def normalise(self, pixels, output):
        """uint8 [size, size, 3] into `output`, float32 [3, size, size]."""
        # numpy, not torch: one call of torch may start a team of threads, in each of the loader's threads
        np.copyto(output, pixels.transpose(2, 0, 1))
        np.multiply(output, self._factor, out=output)
        np.add(output, self._offset, out=output)

    def view(self, image_size, view_seed=None):
        """The window (left, upper, right, lower; pixels, fractions allowed) in an image of (width, height), and the flip."""
        if view_seed is None or self.augment == "none":
            return self._evaluation_box(image_size), False
        generator = _generator(view_seed)
        is_flipped = bool(generator.random() < 0.5)
        if self.augment == "flip":
            return self._evaluation_box(image_size), is_flipped
        return self._random_box(image_size, generator), is_flipped

    def _resized_side(self):
        return max(self.size, int(math.floor(self.size / self.crop_fraction)))

    def _evaluation_box(self, image_size):
        """Resize and centre crop as one window: only the pixels that are kept get resampled."""
        width, height = image_size
        side = self._resized_side()
        if width <= height:
            resized_width, resized_height = side, int(side * height / width)
        else:
            resized_width, resized_height = int(side * width / height), side
        left = int(round((resized_width - self.size) / 2))
        upper = int(round((resized_height - self.size) / 2))
        to_x, to_y = width / resized_width, height / resized_height
        return (left * to_x, upper * to_y, min(width, (left + self.size) * to_x), min(height, (upper + self.size) * to_y))

    def _random_box(self, image_size, generator):
        width, height = image_size
        log_ratio = [math.log(ratio) for ratio in self.crop_ratio]
        for _ in range(_CROP_TRIES):
            area_part, ratio_part, x_part, y_part = generator.random(4).tolist()
            area = width * height * (self.crop_scale[0] + area_part * (self.crop_scale[1] - self.crop_scale[0]))
            ratio = math.exp(log_ratio[0] + ratio_part * (log_ratio[1] - log_ratio[0]))
            box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
            if box_width <= width and box_height <= height:
                left, upper = x_part * (width - box_width), y_part * (height - box_height)
                return (left, upper, min(width, left + box_width), min(height, upper + box_height))
        # a very long image: the largest centred window of an allowed shape
        ratio = min(max(width / height, self.crop_ratio[0]), self.crop_ratio[1])
        box_width, box_height = min(width, height * ratio), min(height, width / ratio)
        left, upper = (width - box_width) / 2, (height - box_height) / 2
        return (left, upper, left + box_width, upper + box_height)


def _generator(view_seed):
    """A generator of its own for each view. `view_seed` is a non-negative int or a sequence of them."""
    words = [int(word) for word in view_seed] if isinstance(view_seed, (tuple, list)) else int(view_seed)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def _check_choice(key, value, known):
    if value not in known:
        raise UserError(f"{key}={value} is not known{closest(value, known)}; choose one of {', '.join(known)}")
