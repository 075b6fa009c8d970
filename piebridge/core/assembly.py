"""From a configuration to the parts of the loop. Methods differ in these parts only."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from piebridge.core.as_released import CountedValidation, FreshAdamStep, counted_images, released_batches
from piebridge.core.direct_step import DirectStep
from piebridge.core.gate import GATES
from piebridge.core.loader import ImageLoader, in_batches
from piebridge.core.loop import Parts
from piebridge.core.preparation import FrozenPart, caches_features
from piebridge.core.progress_bar import progress_bar
from piebridge.core.sampler import EverySample, OriginalOnly, epoch_batches
from piebridge.core.step import EagerStep, evaluate
from piebridge.core.transforms import Transform
from piebridge.core.tuning import BODIES, Tuning

STEPS = {"eager": EagerStep, "direct": DirectStep, "fresh_adam": FreshAdamStep}


@dataclass
class Workplace:
    """What a method is given to build its parts with."""

    config: Any
    network: Any  # the original: GraphNetwork with a fresh head
    fingerprint: str  # of the original as it was loaded
    dataset: Any
    device: torch.device
    clock: Any
    folder: Any  # RunFolder
    interrupt: Any
    decisions: Any  # Decisions
    bad_images: Any  # BadImages

    def view_seed(self, epoch):
        """Seed of an epoch's augmented views, the same every `cache.views` epochs; None where all epochs show the same view."""
        views = self.config.cache.views
        return None if self.config.loader.augment == "none" else (self.config.seed, epoch % views if views else epoch)


def build_parts(work):
    """The Parts of the loop; what led to them is in `work.decisions`."""
    config = work.config
    # what is trained runs in torch: where the backend is free, with the frozen batch norm folded away
    tuning = Tuning(work.network, config.pet, config.backend.name if config.backend.name in BODIES else "folded")
    frozen = FrozenPart(work, tuning)
    source, router = frozen.source_and_router()
    gate = config.gate.kind
    if gate == "auto":  # behind a cache a skipped backward saves microseconds, and costs accuracy (measured, see doc/LOG.md)
        gate = "none" if caches_features(config, tuning) else "loss"
    labels = torch.tensor([sample.label for sample in work.dataset.train], device=work.device)
    parts = Parts(source=source, step=STEPS[config.step](tuning, config.optimizer), gate=GATES[gate](config.gate),
                  router=router, labels=labels, validate=_validation(work, frozen), settings=config.optimizer,
                  epochs=config.epochs, batch_size=config.loader.batch_size, seed=config.seed,
                  describe_sample=lambda index: work.dataset.relative_path(work.dataset.train[index]),
                  batches=released_batches if config.as_released else epoch_batches,
                  pruner=OriginalOnly(router) if config.router.skips_proxies else EverySample())
    work.decisions.decide("gate", lambda: gate)
    return parts


def _validation(work, frozen):
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

