"""How good a network is: on the validation images after each epoch, and on the test images at the end."""

import contextlib

import torch

from piebridge.core.as_released import CountedValidation, counted_images
from piebridge.core.loader import ImageLoader, in_batches
from piebridge.core.networks import load_network
from piebridge.core.progress_bar import progress_bar
from piebridge.core.step import evaluate
from piebridge.core.transforms import Transform


def build_validation(work, frozen):
    """What judges each epoch of a run, on validation images. frozen: a FrozenPart."""
    if not work.config.as_released:
        return Validation(work, frozen, work.dataset.val)
    counted, share = counted_images(work.dataset.test)
    return CountedValidation(Validation(work, frozen, counted), share)


class Validation:
    """Accuracy on some images (`samples`), always through the original. What a frozen network makes of them is computed once, by
    `prepare`, where it is feature vectors, which are small."""

    def __init__(self, work, frozen, samples):
        self._work, self._frozen, self._samples = work, frozen, samples
        self._features = None

    def prepare(self):
        if self._frozen.is_at_head:
            self._features = list(self._values())

    def __call__(self, trainable):
        """(accuracy, mean loss), or (None, None) without images."""
        return evaluate(trainable, self._values() if self._features is None else self._features)

    def _values(self):
        for images, labels in self._images():
            yield self._frozen.original.features(images).to(self._work.device), labels

    def _images(self):
        return evaluation_batches(self._work, self._work.network.description, self._samples)


def evaluation_batches(work, description, samples):
    """Yield (images float32 [B, 3, S, S], labels int [B]) of `samples` on the run's device, as the description wants them."""
    settings = work.config.loader
    loader = ImageLoader(samples, Transform.for_network(description), settings.workers, settings.max_megapixels, work.bad_images)
    labels = torch.tensor([sample.label for sample in samples], device=work.device)
    bar = progress_bar(total=len(samples), desc="evaluating", unit="image")
    with bar, contextlib.closing(loader.batches(in_batches(len(samples), settings.eval_batch_size))) as batches:
        for indices, images in batches:
            work.interrupt.check()
            if indices:
                yield images.to(work.device), labels[indices]
            bar.update(len(indices))


def test_accuracy(network_file, work):
    """Accuracy of a saved network on the test images, or None where there are none."""
    network = load_network(str(network_file)).to(work.device).eval()
    counted, share = counted_images(work.dataset.test) if work.config.as_released else (work.dataset.test, 1.0)
    accuracy = evaluate(network, evaluation_batches(work, network.description, counted))[0]
    return None if accuracy is None else accuracy * share
