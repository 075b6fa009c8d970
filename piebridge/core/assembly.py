"""From a configuration to the parts of the loop. Methods differ in these parts only."""

from dataclasses import dataclass
from typing import Any

import torch

from piebridge.core.gate import GATES
from piebridge.core.loader import ImageLoader
from piebridge.core.loop import Parts
from piebridge.core.pet import build_trainable
from piebridge.core.preparation import FILL_BATCH, FrozenPart, caches_features
from piebridge.core.router import FixedRouter
from piebridge.core.sources import ImageSource
from piebridge.core.step import EagerStep, evaluate
from piebridge.core.transforms import Transform


@dataclass
class Workplace:
    """What a method is given to build its parts with."""

    config: Any
    network: Any  # GraphNetwork with a fresh head
    fingerprint: str  # of the original as it was loaded
    dataset: Any
    device: torch.device
    clock: Any
    folder: Any  # RunFolder
    interrupt: Any

    def view_seed(self, epoch):
        """Seed of an epoch's augmented views; None where all epochs show the same view."""
        return None if self.config.loader.augment == "none" else (self.config.seed, epoch)


def build_parts(work):
    """(Parts of the loop, decisions that led to them)."""
    config = work.config
    trainable = build_trainable(work.network, config.pet.kind).to(work.device)
    is_whole = trainable is work.network
    frozen = None if is_whole else FrozenPart(work)
    if is_whole:
        source, router = _images(work), FixedRouter([0] * len(work.dataset.train))
    else:
        source, router = frozen.source_and_router()
    gate = config.gate.kind
    if gate == "auto":  # behind a cache a skipped backward saves microseconds, and costs accuracy (measured, see doc/LOG.md)
        gate = "none" if caches_features(config) else "loss"
    labels = torch.tensor([sample.label for sample in work.dataset.train], device=work.device)
    parts = Parts(source=source, step=EagerStep(trainable, config.optimizer), gate=GATES[gate](config.gate),
                  router=router, labels=labels, validate=Validation(work, frozen), settings=config.optimizer,
                  epochs=config.epochs, batch_size=config.loader.batch_size, seed=config.seed,
                  describe_sample=lambda index: work.dataset.relative_path(work.dataset.train[index]))
    return parts, dict(frozen.decisions.values if frozen else {}, gate=gate)


class Validation:
    """Accuracy on the validation images, always through the original; its frozen features are computed once."""

    def __init__(self, work, frozen):
        self._work, self._frozen = work, frozen
        self._features = None

    def __call__(self, trainable):
        samples = self._work.dataset.val
        labels = torch.tensor([sample.label for sample in samples], device=self._work.device)
        if not samples:
            return None, None
        if self._frozen is None:
            return evaluate(trainable, ((images, labels[indices]) for indices, images in self._images()))
        if self._features is None:
            pieces = [self._frozen.original.segment(images) for _, images in self._images()]
            self._features = torch.cat(pieces).to(self._work.device)
        return evaluate(trainable, [(self._features, labels)])

    def _images(self):
        config = self._work.config
        size = FILL_BATCH if self._frozen else config.loader.eval_batch_size
        loader = ImageLoader(self._work.dataset.val, Transform.for_network(self._work.network.description), config.loader.workers,
                             config.loader.max_megapixels)
        order = list(range(len(self._work.dataset.val)))
        for indices, images in loader.batches([order[start:start + size] for start in range(0, len(order), size)]):
            yield indices, images.to(self._work.device)


def _images(work):
    config = work.config
    transform = Transform.for_network(work.network.description, augment=config.loader.augment)
    loader = ImageLoader(work.dataset.train, transform, config.loader.workers, config.loader.max_megapixels)
    return ImageSource(loader, list(range(len(work.dataset.train))), work.view_seed, work.device, work.clock)
