"""Batches come in order, whole and equal whatever the workers; errors and early ends leave nothing running."""

import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from piebridge.core.errors import UserError
from piebridge.core.images import BadImage
from piebridge.core.loader import ImageLoader
from piebridge.core.transforms import Transform
from piebridge.core.workers import available_memory, resolve_workers, usable_cores

Item = namedtuple("Item", "path label")
FOLDER = Path(__file__).parents[2] / "datasets" / "Clipart10"
SAMPLES = [Item(str(path), 0) for path in sorted(FOLDER.glob("*/*.jpg"))[::12]]  # 50 images
TRANSFORM = Transform(48, (0.5,) * 3, (0.5,) * 3, augment="crop_flip")
BATCHES = [[3, 1, 2], [49], [0, 0, 10], list(range(20, 50)), []]


def started_by_loader(before):
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_order_and_content(workers):
    loader = ImageLoader(SAMPLES, TRANSFORM, workers)
    batches = list(loader.batches(BATCHES))
    assert [indices for indices, _ in batches] == BATCHES
    for indices, images in batches:
        assert images.shape == (len(indices), 3, 48, 48) and images.dtype == torch.float32 and images.is_contiguous()
    from PIL import Image

    for index, image in zip(*batches[0]):
        assert torch.equal(image, TRANSFORM(Image.open(SAMPLES[index].path).convert("RGB")))


def test_views_depend_on_seed_and_sample_only():
    def by_sample(workers, batches, view_seed):
        loaded = ImageLoader(SAMPLES, TRANSFORM, workers).batches(batches, view_seed)
        return {index: image for indices, images in loaded for index, image in zip(indices, images)}

    one = by_sample(0, [[0, 1, 2], [3, 4]], (7, 0))
    other = by_sample(3, [[4], [2, 0], [3, 1]], (7, 0))
    assert all(torch.equal(one[index], other[index]) for index in range(5))
    next_epoch = by_sample(2, [[0, 1, 2]], (7, 1))
    assert not any(torch.equal(one[index], next_epoch[index]) for index in range(3))


def test_several_transforms_share_one_decode():
    small = Transform(32, (0.5,) * 3, (0.5,) * 3, augment="crop_flip")
    (indices, (large_images, small_images)), = ImageLoader(SAMPLES, [TRANSFORM, small], 2).batches([[5, 6]], 1)
    assert large_images.shape == (2, 3, 48, 48)
    assert torch.equal(small_images, next(ImageLoader(SAMPLES, small, 0).batches([[5, 6]], 1))[1])


def test_reads_ahead_but_not_far():
    asked = []

    def index_lists():
        for first in range(0, 4000, 4):
            asked.append(first)
            yield [index % len(SAMPLES) for index in range(first, first + 4)]

    batches = ImageLoader(SAMPLES, TRANSFORM, 2).batches(index_lists())
    assert asked == []
    for position in range(5):
        next(batches)
        assert position + 2 <= len(asked) <= position + 8
    batches.close()
    large = ImageLoader(SAMPLES, TRANSFORM, 2).batches(iter([list(range(40))] * 3))
    next(large)
    large.close()


@pytest.mark.parametrize("end", ["close", "forget", "interrupt"])
def test_stopping_early_ends_the_threads(end):
    before = threading.enumerate()
    batches = ImageLoader(SAMPLES, TRANSFORM, 2).batches([[index % 50] * 8 for index in range(1000)])
    next(batches)
    assert started_by_loader(before)
    if end == "close":
        batches.close()
    elif end == "forget":
        del batches
    else:
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt())
    assert not started_by_loader(before)


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_an_unreadable_file_is_named_at_its_batch(tmp_path, workers):
    before = threading.enumerate()
    (tmp_path / "broken.jpg").write_bytes(Path(SAMPLES[0].path).read_bytes()[:400])
    samples = SAMPLES[:6] + [Item(str(tmp_path / "broken.jpg"), 0), Item(str(tmp_path / "missing.jpg"), 0)]
    batches = ImageLoader(samples, TRANSFORM, workers).batches([[0, 1], [2, 6, 7], [3]])
    assert next(batches)[0] == [0, 1]
    with pytest.raises(BadImage, match="broken.jpg"):
        next(batches)
    assert not started_by_loader(before)


def test_the_size_limit_reaches_the_decoder():
    with pytest.raises(BadImage, match="megapixels, more than the limit of 0.01"):
        next(ImageLoader(SAMPLES, TRANSFORM, 1, max_megapixels=0.01).batches([[0]]))


def test_workers(tmp_path):
    roomy, tight = tmp_path / "roomy", tmp_path / "tight"
    roomy.write_text("MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n")
    tight.write_text("MemTotal: 8000000 kB\nMemAvailable: 900000 kB\n")
    assert resolve_workers("auto", roomy) == usable_cores() >= 1
    assert resolve_workers("auto", tight) == 0
    assert resolve_workers("auto", tmp_path / "none") == usable_cores()
    assert available_memory(tight) == 900000 * 1024 and available_memory(tmp_path / "none") is None
    assert resolve_workers(3) == 3 and resolve_workers(0) == 0
    for wrong in (-1, "two", 1.5, True):
        with pytest.raises(UserError, match="loader.workers=.*whole number of at least 0, or auto"):
            resolve_workers(wrong)
