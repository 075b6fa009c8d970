"""Streams: what arrives, in which order, once; which labels and which images; and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from piebridge.config import build_config, parse_overrides
from piebridge.core.clock import Clock
from piebridge.core.dataset import open_dataset
from piebridge.core.errors import UserError
from piebridge.core.loader import ImageLoader
from piebridge.core.sources import Level, LevelSource
from piebridge.core.stream import Stream, StreamSource, arrivals_from, arrivals_of
from piebridge.core.transforms import Transform

CLASSES = ["cat", "dog", "owl"]
SIZE = 6  # samples of an epoch
TRANSFORM = Transform(8, (0, 0, 0), (1, 1, 1), interpolation="nearest", crop_fraction=1.0)


def picture(value):
    """A grey image of one value."""
    return Image.new("RGB", (8, 8), (value, value, value))


def source_of(stream, workers, transform=TRANSFORM, samples=()):
    level = Level("original", ImageLoader(samples, transform, workers), None)
    source = LevelSource([level], [], lambda epoch: (0, epoch), torch.device("cpu"), Clock())
    return StreamSource(source, stream)


def batches_of(first, size=4):
    slots = list(range(first, SIZE))
    return [slots[start:start + size] for start in range(0, len(slots), size)]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_and_labels_come_in_the_order_of_arrival(workers):
    arrivals = [(picture(20 * number), CLASSES[number % 3]) for number in range(2 * SIZE)]
    stream = Stream(arrivals_from(arrivals), SIZE, CLASSES, torch.device("cpu"))
    source = source_of(stream, workers)
    assert source.usable == list(range(SIZE)) and not source.needs_level_batches
    seen = []
    for epoch in range(2):
        for slots, images, level in source.stream(batches_of(0), epoch, np.zeros(SIZE, int)):
            assert images.shape == (len(slots), 3, 8, 8) and level == 0
            seen += [(round(float(image.mean()) * 255), label) for image, label in zip(images, stream[slots].tolist())]
        assert not stream.samples  # nothing is kept
    assert seen == [(20 * number, number % 3) for number in range(2 * SIZE)]


def test_no_sample_is_taken_before_its_turn_comes():
    taken = []

    def camera():
        for number in range(10 ** 9):
            taken.append(number)
            yield picture(0), 0

    stream = Stream(arrivals_from(camera()), 10 ** 6, CLASSES, torch.device("cpu"))
    slots = source_of(stream, 0).stream([[start, start + 1] for start in range(0, 10 ** 6, 2)], 0, np.zeros(10 ** 6, int))
    next(slots)
    assert len(taken) == 2
    slots.close()


def test_a_data_set_goes_by_in_passes_of_their_own_orders_and_a_later_start_finds_its_place():
    dataset = open_dataset("Clipart10", SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=0))
    count = len(dataset.train)
    coming = arrivals_of(dataset, 7)(0)
    order = [next(coming) for _ in range(2 * count)]
    assert sorted(order[:count]) == sorted(order[count:]) == sorted(dataset.train) and order[:count] != order[count:]
    for start in (1, count - 1, count, count + 3):
        coming = arrivals_of(dataset, 7)(start)
        assert [next(coming) for _ in range(5)] == (order + order)[start:start + 5]
    assert next(arrivals_of(dataset, 8)(0)) != order[0]


def test_a_run_that_goes_on_sees_the_same_views_of_the_same_images():
    """Every image of two epochs, in one go and after a stop; no view comes twice, although each image does."""
    dataset = open_dataset("Clipart10", SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=0))
    dataset.train = dataset.train[:5]
    transform = Transform(8, (0, 0, 0), (1, 1, 1), augment="crop_flip")

    def views(starts):
        """[(slot, label, image)] from (epoch, first slot) on."""
        stream = Stream(arrivals_of(dataset, 0), SIZE, dataset.classes, torch.device("cpu"))
        source, found = source_of(stream, 2, transform, dataset.train), []
        for epoch, first in starts:
            for slots, images, _ in source.stream(batches_of(first, 2), epoch, np.zeros(SIZE, int)):
                found += [(label, image) for image, label in zip(images, stream[slots].tolist())]
        return found

    whole, rest = views([(0, 0), (1, 0)]), views([(1, 2)])
    assert len(whole) == 12 and len(rest) == 4
    for (label, image), (again_label, again) in zip(whole[8:], rest):
        assert label == again_label and torch.equal(image, again)
    assert not any(torch.equal(whole[one][1], whole[other][1]) for one in range(12) for other in range(one))


@pytest.mark.parametrize("arrivals, message", [
    ([(picture(0), 0)] * 4, "images: the stream ended after 4 samples, and an epoch takes stream.samples=6; give more, or fewer epochs or"),
    ([(picture(0), "dgo")], "images: sample 1 has the label 'dgo' (did you mean 'dog'?); give the name of a class, or its number from "),
    ([(picture(0), 0), (picture(0), 3)], "images: sample 2 has the label 3; give the name"),
    ([(picture(0), True)], "images: sample 1 has the label True; give the name"),
    ([(picture(0), 1.0)], "images: sample 1 has the label 1.0; give the name"),
    ([picture(0)], "images: sample 1 is no pair of image and label")])
def test_what_is_no_sample_is_refused_in_words(arrivals, message):
    stream = Stream(arrivals_from(arrivals), SIZE, CLASSES, torch.device("cpu"))
    with pytest.raises(UserError) as caught:
        list(source_of(stream, 0).stream(batches_of(0), 0, np.zeros(SIZE, int)))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("overrides, message", [
    (["cache.kind=features"], "cache.kind=features keeps what is seen again, and a stream's samples are seen once; use cache.kind=none"),
    (["cache.kind=pixels"], "cache.kind=pixels keeps what is seen again, and a stream's samples are seen once; use cache.kind=none"),
    (["cache.views=4", "loader.augment=flip"], "cache.views=4 keeps what is seen again, .* use cache.views=0"),
    (["router.kind=residual"], "router.kind=residual looks at all samples before it trains on them"),
    (["splits.shots=3", "pseudo.kind=confidence", "optimizer.label_smoothing=0.0"], "pseudo.kind: a stream's samples come with"),
    (["gate.kind=infobatch"], "gate.kind=infobatch: leaves samples out by their losses of the epoch before, and a stream's samples are "
     "seen once; use gate.kind=unbiased"),
    (["router.skips_proxies=true"], "router.skips_proxies=true: leaves samples out of each epoch .* use router.skips_proxies=false"),
    (["router.lowers=true"], "router.lowers=true: compares a sample's loss with that of the epoch before, .* use router.lowers=false"),
    (["router.audit=0.01"], "router.audit=0.01: looks at images once more, through the original, .* use router.audit=0.0"),
    (["pet.kind=head2toe", "step=eager"], "pet.kind=head2toe: looks at all samples before it trains on them"),
    (["method=FTAll", "pet.kind=all", "as_released=true"], "as_released=true: cuts a data set into whole batches and drops the rest")])
def test_settings_that_need_samples_to_come_again(overrides, message):
    with pytest.raises(UserError, match=message):
        build_config({}, parse_overrides(["stream.samples=100", "router.kind=none"] + overrides))
    assert build_config({}, parse_overrides(["stream.samples=100", "router.kind=none"])).stream.samples == 100
