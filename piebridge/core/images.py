"""Read any image a user may have as 8-bit RGB, or say in one line why it cannot be read.

The header is looked at before anything is decoded: a 1 MB file may hold 600 megapixels, and a board dies of it.
"""

import logging
import os
import warnings

import numpy as np
from PIL import Image

from piebridge.core.errors import UserError
from piebridge.core.packages import one_line

LOG = logging.getLogger(__name__)

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm")
MAX_MEGAPIXELS = 64

# The only decoders that are tried. Pillow knows many more, and some of them start other programs.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
_ORIENTATION_TAG = 0x0112
_WHITE = (255, 255, 255)
_TAIL_BYTES = 4096


class BadImage(UserError):
    """A file that cannot be read as an image. `.path` and `.reason` say which and why."""

    def __init__(self, path, reason):
        super().__init__(path, reason)
        self.path = str(path)
        self.reason = reason

    def __str__(self):
        return f"{self.path}: cannot be read as an image ({self.reason}); repair, replace or remove it"


def load_image(path, max_megapixels=MAX_MEGAPIXELS, minimum_side=None):
    """Decode a file to an RGB `PIL.Image`, upright (EXIF), with transparency laid onto white.

    Args:
        path: the file; an image that is decoded already (`PIL.Image`) is brought to the same form.
        max_megapixels: larger images are refused before they are decoded.
        minimum_side: pixels of the shorter side that the caller needs. A JPEG at least four times as large is then decoded at
            1/2, 1/4 or 1/8 of its size, never below twice `minimum_side`, so that the resize that follows still averages.

    Raises:
        BadImage: for whatever is wrong with the file.
    """
    try:
        if isinstance(path, Image.Image):
            return _upright(path, _to_rgb(path))
        with _open(path, max_megapixels) as image:
            if minimum_side is not None and image.format in ("JPEG", "MPO"):
                image.draft("RGB", _draft_size(image.size, 2 * minimum_side))
            image.load()
            return _upright(image, _to_rgb(image))
    except BadImage:
        raise
    except Exception as error:  # decoders raise a dozen types on damaged files, SyntaxError and struct.error among them
        raise BadImage(path, _reason(path, error)) from error


def check_image(path, max_megapixels=MAX_MEGAPIXELS):
    """Raise BadImage if the file is unreadable, too large or cut short, mostly without decoding it.

    The header is read, and the end of a JPEG or PNG file is looked for its end mark. Only a file without one, or of another
    format, is decoded. A file damaged in the middle passes.
    """
    try:
        with _open(path, max_megapixels) as image:
            has_end = image.format in ("JPEG", "MPO", "PNG") and _has_end_mark(path, image.format)
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(path, _reason(path, error)) from error
    if not has_end:
        load_image(path, max_megapixels)


def silence_pillow():
    """Keep Pillow's own warnings (size above 89 megapixels, odd EXIF data), which name no file, off the terminal.

    Filters are the process's, and changing one for a moment is not safe with threads; so those who start threads call this first.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _open(path, max_megapixels):
    """Open and bound the size; nothing is decoded yet. Formats other than the listed ones are refused."""
    if os.path.exists(str(path)) and not os.path.isfile(str(path)) and not os.path.isdir(str(path)):  # opening a pipe would wait for ever
        raise BadImage(path, "not a regular file")
    image = Image.open(str(path), formats=_FORMATS)
    width, height = image.size
    if width * height > max_megapixels * 1e6:
        image.close()
        raise BadImage(path, f"{width} x {height} is {width * height / 1e6:.0f} megapixels, more than the limit of {max_megapixels:g}")
    return image


def _draft_size(size, shorter_side):
    """The smallest (width, height) with the aspect of `size` whose shorter side is at least `shorter_side`."""
    scale = shorter_side / min(size)
    return tuple(max(1, int(side * scale)) for side in size)


def _to_rgb(image):
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return _grey_from_wide(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        background = Image.new("RGB", image.size, _WHITE)
        background.paste(image, mask=image.getchannel("A"))
        return background
    return image.convert("RGB")


def _grey_from_wide(image):
    """16-bit, 32-bit and float grey to 8 bits. Pillow's own conversion would clip everything above 255 to white."""
    is_sixteen_bit = image.mode.startswith("I;16") or image.format in ("PNG", "PPM")  # older Pillow opens these as mode "I"
    values = np.nan_to_num(np.asarray(image).astype(np.float32))
    highest = float(values.max())
    if is_sixteen_bit:
        top = 65535.0
    else:  # no declared range: the smallest usual one that holds the values
        top = next((usual for usual in (1.0, 255.0, 65535.0) if highest <= usual), highest)
    return Image.fromarray(np.clip(values * (255.0 / top) + 0.5, 0, 255).astype(np.uint8))


def _upright(image, rgb):
    """Turn `rgb` as the camera's EXIF note of `image` says. A damaged note is no reason to refuse the picture."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception as error:
        LOG.debug("EXIF data ignored: %s", error)
        return rgb
    methods = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
               8: "ROTATE_90"}
    if orientation not in methods:
        return rgb
    return rgb.transpose(getattr(Image, methods[orientation]))


def _has_end_mark(path, image_format):
    mark = b"IEND" if image_format == "PNG" else b"\xff\xd9"
    with open(str(path), "rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - _TAIL_BYTES))
        return mark in stream.read()


def _reason(path, error):
    """One plain phrase for a decoder's exception."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, IsADirectoryError):
        return "it is a folder"
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return f"far too many pixels: {str(error).split(',')[0]}"
    if os.path.isfile(str(path)) and os.path.getsize(str(path)) == 0:
        return "the file is empty"
    if isinstance(error, OSError) and "cannot identify" in str(error):
        return "not an image, or of a kind that is not read here"
    if isinstance(error, (OSError, SyntaxError, EOFError)) and ("truncated" in str(error).lower() or "EOF" in str(error)):
        return f"the file is cut short: {error}"
    return f"damaged: {one_line(error)}"
