"""Windows, resizing and normalisation against torchvision's and Pillow's own."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as reference

from piebridge.core.errors import UserError
from piebridge.core.images import load_image
from piebridge.core.transforms import INTERPOLATIONS, Transform

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN = dict(mean=(0, 0, 0), std=(1, 1, 1))
TWO_LEVELS = 2 / 255 + 1e-6  # the two passes may be done in another order, and each rounds


def noise(width, height, seed=0, lowest=0, highest=256):
    pixels = np.random.RandomState(seed).randint(lowest, highest, (height, width, 3)).astype(np.uint8)
    return Image.fromarray(pixels)


def ramps(width, height):
    """Red tells the place from left to right, green from top to bottom, both 0..255."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 0 * x], axis=2).astype(np.uint8))


@pytest.mark.parametrize("width, height", [(256, 256), (160, 160), (500, 375), (375, 501), (97, 640), (30, 20), (1, 50)])
@pytest.mark.parametrize("size, crop_fraction", [(224, 0.875), (160, 0.875), (64, 1.0), (224, 0.9)])
def test_evaluation_equals_resize_and_centre_crop(width, height, size, crop_fraction):
    image = noise(width, height, lowest=96, highest=160)  # no overshoot is clipped between Pillow's two passes
    expected = reference.Compose([
        reference.Resize(int(math.floor(size / crop_fraction)), interpolation=reference.InterpolationMode.BICUBIC),
        reference.CenterCrop(size), reference.ToTensor()])(image)
    output = Transform(size, crop_fraction=crop_fraction, **PLAIN)(image)
    assert output.shape == (3, size, size) and output.dtype == torch.float32 and output.is_contiguous()
    assert (output - expected).abs().max() <= TWO_LEVELS


@pytest.mark.parametrize("interpolation", sorted(INTERPOLATIONS))
def test_interpolations(interpolation):
    image = noise(100, 100)
    resized = image.resize((50, 50), getattr(Image, interpolation.upper()))
    output = Transform(50, interpolation=interpolation, crop_fraction=1.0, **PLAIN)(image)
    assert (output.permute(1, 2, 0).numpy() * 255 - np.asarray(resized)).__abs__().max() < 1e-3


def test_normalisation_and_channel_order():
    image = Image.new("RGB", (64, 64), (10, 100, 200))
    output = Transform(32, MEAN, STD)(image)
    expected = [(level / 255 - mean) / std for level, mean, std in zip((10, 100, 200), MEAN, STD)]
    assert output.mean(dim=(1, 2)).tolist() == pytest.approx(expected, abs=1e-5)


def test_of_a_network_description():
    description = {"input_size": [3, 224, 224], "normalization": {"mean": [0.5] * 3, "std": [0.25] * 3},
                   "interpolation": "bilinear", "crop_fraction": 0.95}
    transform = Transform.for_network(description)
    assert transform.as_dict() == {
        "size": 224, "mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "crop_fraction": 0.95, "augment": "none",
        "crop_scale": [0.08, 1.0], "crop_ratio": [3 / 4, 4 / 3]}
    assert Transform.for_network(description, size=160, augment="flip").size == 160


def test_a_view_is_decided_by_its_seed_alone():
    image, transform = noise(200, 150), Transform(64, MEAN, STD, augment="crop_flip")
    first = transform(image, (3, 1, 7))
    transform(image, (3, 1, 8))
    assert torch.equal(first, transform(image, (3, 1, 7)))
    assert not torch.equal(first, transform(image, (3, 2, 7)))
    assert torch.equal(transform(image), Transform(64, MEAN, STD)(image))  # no seed: evaluation's view
    assert transform.view((200, 150), 5) == transform.view((200, 150), (5,))


def test_views_are_the_same_on_every_system():
    box, is_flipped = Transform(64, MEAN, STD, augment="crop_flip").view((400, 300), (0, 0, 0))
    words = np.random.PCG64(np.random.SeedSequence((0, 0, 0))).random_raw(5)
    flip, area, ratio, x, y = [int(word >> np.uint64(11)) / 2 ** 53 for word in words]
    area, ratio = 120000 * (0.08 + 0.92 * area), math.exp(math.log(4 / 3) * (2 * ratio - 1))
    width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)
    assert width <= 400 and height <= 300  # the first try fits
    expected = (x * (400 - width), y * (300 - height), x * (400 - width) + width, y * (300 - height) + height)
    assert box == pytest.approx(expected) and is_flipped == (flip < 0.5)


def test_random_windows_have_the_asked_area_and_shape():
    transform = Transform(64, MEAN, STD, augment="crop_flip")
    boxes, flips = zip(*(transform.view((320, 240), (0, seed)) for seed in range(2000)))
    left, upper, right, lower = np.array(boxes).T
    assert (left >= 0).all() and (upper >= 0).all() and (right <= 320).all() and (lower <= 240).all()
    ratios, areas = (right - left) / (lower - upper), (right - left) * (lower - upper) / (320 * 240)
    assert ratios.min() > 0.749 and ratios.max() < 1.334 and areas.min() >= 0.0799 and areas.max() <= 1
    assert 0.45 < np.mean(flips) < 0.55
    torch.manual_seed(0)
    theirs = np.array([reference.RandomResizedCrop.get_params(torch.empty(3, 240, 320), (0.08, 1.0), (3 / 4, 4 / 3))
                          for _ in range(2000)])
    assert np.mean(areas) == pytest.approx(np.mean(theirs[:, 2] * theirs[:, 3] / (320 * 240)), abs=0.03)


def test_the_window_is_what_comes_out():
    image, transform = ramps(1000, 800), Transform(50, augment="crop_flip", interpolation="bilinear", **PLAIN)
    for seed in range(20):
        (left, upper, right, lower), is_flipped = transform.view(image.size, seed)
        output = transform(image, seed)
        reds = output[0].mean(dim=0)
        if is_flipped:
            reds = reds.flip(0)
        step_x, step_y = (right - left) / 50, (lower - upper) / 50
        assert reds[0].item() == pytest.approx((left + step_x / 2) / 1000, abs=0.01)
        assert reds[-1].item() == pytest.approx((right - step_x / 2) / 1000, abs=0.01)
        assert output[1, 0].mean().item() == pytest.approx((upper + step_y / 2) / 800, abs=0.01)
        assert output[1, -1].mean().item() == pytest.approx((lower - step_y / 2) / 800, abs=0.01)


def test_flip_mirrors_half_of_the_views():
    image, transform = noise(80, 80), Transform(64, MEAN, STD, augment="flip")
    plain = transform(image)
    are_mirrored = [torch.equal(transform(image, seed), plain.flip(2)) for seed in range(100)]
    assert all(is_mirrored or torch.equal(transform(image, seed), plain) for seed, is_mirrored in enumerate(are_mirrored))
    assert 30 < sum(are_mirrored) < 70


def test_a_proxy_sees_the_same_window_at_a_lower_resolution():
    full, low = (Transform(size, MEAN, STD, augment="crop_flip") for size in (224, 160))
    for seed in range(5):
        assert full.view((640, 480), seed) == low.view((640, 480), seed)
    centre = [np.array(transform.view((640, 480))[0]) for transform in (full, low)]
    assert np.abs(centre[0] - centre[1]).max() < 3  # whole pixels of the resized image


@pytest.mark.parametrize("width, height", [(3000, 10), (10, 3000), (1, 1), (2, 1)])
def test_extreme_shapes(width, height):
    transform = Transform(32, MEAN, STD, augment="crop_flip")
    for view_seed in [None] + list(range(10)):
        assert torch.isfinite(transform(noise(width, height), view_seed)).all()


def test_minimum_side_suffices_for_the_smallest_window():
    transform = Transform(224, MEAN, STD, augment="crop_flip")
    side = transform.minimum_side
    assert 224 <= math.sqrt(side * side * 0.08 * 3 / 4) < 225
    assert Transform(224, MEAN, STD).minimum_side == 256


def test_draft_decoding_changes_little(tmp_path):
    source = sorted((Path(__file__).parents[2] / "datasets/Clipart10/fruit").glob("*.jpg"))[0]
    Image.open(str(source)).resize((1600, 1600), Image.BICUBIC).save(str(tmp_path / "large.jpg"), quality=95)
    transform = Transform(96, **PLAIN)
    full = transform(load_image(tmp_path / "large.jpg"))
    draft = transform(load_image(tmp_path / "large.jpg", minimum_side=transform.minimum_side))
    assert (full - draft).abs().mean() < 0.004


@pytest.mark.parametrize("arguments, message", [
    (dict(interpolation="bicubik"), "interpolation=bicubik is not known .did you mean 'bicubic'.*nearest, box"),
    (dict(augment="mixup"), "augment=mixup is not known; choose one of none, flip, crop_flip"),
    (dict(size=0), "input size 0: give a whole number of pixels"),
    (dict(crop_fraction=1.5), "crop_fraction=1.5: give a number above 0, at most 1"),
])
def test_refusals(arguments, message):
    settings = dict(size=32, mean=MEAN, std=STD)
    settings.update(arguments)
    with pytest.raises(UserError, match=message):
        Transform(**settings)
