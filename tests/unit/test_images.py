"""Every kind of image file a folder may hold: read as upright RGB, or refused with its path and a reason."""

import io
import os
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from piebridge.core.errors import UserError
from piebridge.core.images import BadImage, check_image, load_image


def picture(width=90, height=60):
    """A smooth colour image, so that lossy formats stay close to it."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 255 - x], axis=2).astype(np.uint8))


def pixels(image):
    return np.asarray(image).astype(int)


def png_header(width, height):
    """A PNG that claims a size and holds no pixels."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b""))


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".ppm", ".jpg", ".webp"])
def test_colour_files_are_read_as_they_are(tmp_path, suffix):
    path = tmp_path / ("x" + suffix)
    picture().save(str(path), quality=95)
    image = load_image(path)
    assert image.mode == "RGB" and type(image.size) is tuple and image.size == (90, 60)
    assert np.abs(pixels(image) - pixels(picture())).mean() < 3
    check_image(path)


def test_grey_and_black_and_white(tmp_path):
    picture().convert("L").save(str(tmp_path / "grey.jpg"))
    picture().convert("1").save(str(tmp_path / "bits.png"))
    grey = pixels(load_image(tmp_path / "grey.jpg"))
    assert (grey[..., 0] == grey[..., 1]).all() and (grey[..., 1] == grey[..., 2]).all()
    assert np.abs(grey[..., 0] - pixels(picture().convert("L"))).mean() < 3
    assert set(np.unique(pixels(load_image(tmp_path / "bits.png")))) == {0, 255}


def test_palette_with_and_without_transparency(tmp_path):
    image = Image.new("P", (8, 4), 0)
    image.putpalette([200, 30, 40, 10, 220, 30] + [0] * 750)
    image.paste(1, (4, 0, 8, 4))
    image.save(str(tmp_path / "plain.png"))
    image.save(str(tmp_path / "clear.png"), transparency=0)
    image.save(str(tmp_path / "clear.gif"), transparency=0)
    assert pixels(load_image(tmp_path / "plain.png"))[0, 0].tolist() == [200, 30, 40]
    for name in ("clear.png", "clear.gif"):
        read = pixels(load_image(tmp_path / name))
        assert read[0, 0].tolist() == [255, 255, 255] and read[0, 7].tolist() == [10, 220, 30]


def test_transparency_is_laid_onto_white(tmp_path):
    Image.new("RGBA", (4, 4), (100, 0, 0, 51)).save(str(tmp_path / "rgba.png"))  # a fifth of red, four fifths of white
    Image.new("LA", (4, 4), (0, 128)).save(str(tmp_path / "la.png"))
    keyed = Image.new("RGB", (4, 4), (1, 2, 3))
    keyed.save(str(tmp_path / "keyed.png"), transparency=(1, 2, 3))
    assert pixels(load_image(tmp_path / "rgba.png"))[0, 0].tolist() == [224, 204, 204]
    assert abs(pixels(load_image(tmp_path / "la.png"))[0, 0] - 127).max() <= 1
    assert pixels(load_image(tmp_path / "keyed.png"))[0, 0].tolist() == [255, 255, 255]


def test_cmyk(tmp_path):
    picture().convert("CMYK").save(str(tmp_path / "cmyk.jpg"), quality=95)
    assert np.abs(pixels(load_image(tmp_path / "cmyk.jpg")) - pixels(picture())).mean() < 3


@pytest.mark.parametrize("name", ["grey.png", "grey.tif"])
def test_sixteen_bits_keep_their_range(tmp_path, name):
    values = np.array([[0, 257 * 10, 257 * 128, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(str(tmp_path / name))
    assert pixels(load_image(tmp_path / name))[0, :, 0].tolist() == [0, 10, 128, 255]


def test_dark_sixteen_bit_image_is_not_stretched(tmp_path):
    Image.fromarray(np.full((2, 2), 200, dtype=np.uint16)).save(str(tmp_path / "dark.png"))
    assert pixels(load_image(tmp_path / "dark.png")).max() == 1


def test_float_image(tmp_path):
    Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32)).save(str(tmp_path / "float.tif"))
    assert pixels(load_image(tmp_path / "float.tif"))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, orientation):
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture().save(str(path), exif=exif.tobytes(), quality=95)
    assert (pixels(load_image(path)) == pixels(ImageOps.exif_transpose(Image.open(str(path))))).all()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_is_no_reason_to_refuse(tmp_path):
    path = tmp_path / "exif.jpg"
    picture().save(str(path), exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff")
    assert load_image(path).size == (90, 60)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".gif", ".webp"])
@pytest.mark.parametrize("part", [0.01, 0.3, 0.6, 0.95])
def test_truncated(tmp_path, suffix, part):
    path = tmp_path / ("cut" + suffix)
    picture(300, 200).save(str(path))
    path.write_bytes(path.read_bytes()[:int(path.stat().st_size * part)])
    for read in (load_image, check_image):
        with pytest.raises(BadImage) as caught:
            read(path)
        assert caught.value.path == str(path) and "\n" not in str(caught.value)
        assert str(caught.value).startswith(str(path) + ": cannot be read as an image (")


@pytest.mark.parametrize("content, reason", [
    (b"", "the file is empty"),
    (b"this is text\n" * 50, "not an image"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),  # Pillow would start Ghostscript
])
def test_files_that_are_not_images(tmp_path, content, reason):
    path = tmp_path / "fake.jpg"
    path.write_bytes(content)
    for read in (load_image, check_image):
        with pytest.raises(BadImage, match=reason):
            read(path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(BadImage, match="no such file"):
        load_image(tmp_path / "none.jpg")
    with pytest.raises(BadImage, match="it is a folder"):
        load_image(tmp_path)


@pytest.mark.parametrize("width, height", [(9000, 8000), (12000, 10000), (30000, 30000)])  # around Pillow's own two limits
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_are_refused_by_their_header(tmp_path, width, height):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(width, height))
    for read in (load_image, check_image):
        with pytest.raises(BadImage, match="megapixels|too many pixels"):
            read(path)


def test_the_limit_is_the_callers(tmp_path):
    picture(300, 200).save(str(tmp_path / "x.png"))
    load_image(tmp_path / "x.png", max_megapixels=0.06)
    with pytest.raises(BadImage, match="300 x 200 is 0 megapixels, more than the limit of 0.059"):
        load_image(tmp_path / "x.png", max_megapixels=0.059)


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
def test_large_photos_are_decoded_smaller(tmp_path, kind):
    path = tmp_path / "photo.jpg"
    picture(1700, 1300).save(str(path), kind, quality=92)
    small = load_image(path, minimum_side=128)
    assert min(small.size) == 325  # a quarter of 1300: at least twice 128
    whole = load_image(path)
    assert whole.size == (1700, 1300)
    shrunk = [pixels(image.resize((170, 130), Image.BICUBIC)) for image in (small, whole)]
    assert np.abs(shrunk[0] - shrunk[1]).mean() < 1


def test_small_photos_are_not(tmp_path):
    picture(500, 400).save(str(tmp_path / "x.jpg"))
    assert load_image(tmp_path / "x.jpg", minimum_side=128).size == (500, 400)


def test_bytes_after_the_end_do_no_harm(tmp_path):
    buffer = io.BytesIO()
    picture().save(buffer, "JPEG")
    (tmp_path / "x.jpg").write_bytes(buffer.getvalue() + b"\0" * 10000)
    check_image(tmp_path / "x.jpg")


def test_damage_in_the_middle_is_found_when_it_is_decoded(tmp_path):
    buffer = io.BytesIO()
    picture().save(buffer, "PNG")
    content = bytearray(buffer.getvalue())
    middle = content.index(b"IDAT") + 40
    content[middle:middle + 20] = b"\xff" * 20
    (tmp_path / "x.png").write_bytes(bytes(content))
    check_image(tmp_path / "x.png")
    with pytest.raises(BadImage):
        load_image(tmp_path / "x.png")


def test_bad_image_is_a_user_error_that_travels():
    error = pickle.loads(pickle.dumps(BadImage("a/b.jpg", "the file is empty")))
    assert isinstance(error, UserError) and (error.path, error.reason) == ("a/b.jpg", "the file is empty")
    assert str(error) == "a/b.jpg: cannot be read as an image (the file is empty); repair, replace or remove it"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(str(tmp_path / "a.jpg"))
    for read in (load_image, check_image):
        with pytest.raises(BadImage, match="not a regular file"):
            read(tmp_path / "a.jpg")
