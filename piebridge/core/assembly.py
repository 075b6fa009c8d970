"""From a configuration to the parts of the loop. Methods differ in these parts only."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from piebridge.core.audit import AuditedStep
from piebridge.core.direct_step import DirectStep
from piebridge.core.full_batches import FullBatchStep
from piebridge.core.gate_kinds import build_gate
from piebridge.core.head2toe import select_features
from piebridge.core.loader import ImageLoader, in_batches
from piebridge.core.loop import Parts
from piebridge.core.preparation import FrozenPart, caches_features
from piebridge.core.progress_bar import progress_bar
from piebridge.core.step import EagerStep, evaluate
from piebridge.core.transforms import Transform
from piebridge.core.tuning import BODIES, Tuning

STEPS = {"eager": EagerStep, "direct": DirectStep}
PREPARATIONS = {"head2toe": select_features}  # of PET kinds that look at the training images before the loop


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
    prepare = PREPARATIONS.get(config.pet.kind)
    if prepare is not None:
        prepare(tuning, source, labels, config, work.decisions.decide, work.interrupt.check)
    selection, pruner = build_gate(gate, config.gate, config.epochs, len(work.dataset.train), config.seed)
    parts = Parts(source=source, step=_step(config, tuning, source, router, gate), gate=selection, pruner=pruner,
                  router=router, labels=labels, validate=Validation(work, frozen), settings=config.optimizer,
                  epochs=config.epochs, batch_size=config.loader.batch_size, seed=config.seed,
                  describe_sample=lambda index: work.dataset.relative_path(work.dataset.train[index]))
    work.decisions.decide("gate", lambda: gate)
    return parts


def _step(config, tuning, source, router, gate):
    step = STEPS[config.step](tuning, config.optimizer)
    smoothing = config.optimizer.label_smoothing
    if gate == "selective_backprop":
        step = FullBatchStep(step, config.loader.batch_size, smoothing)
    if config.router.audit and source.needs_level_batches:
        step = AuditedStep(step, router, source.original_values, config.router.audit, config.router.audit_floor, smoothing)
    return step


class Validation:
    """Accuracy on the validation images, always through the original. What a frozen network makes of them is computed once, by
    `prepare`, where it is feature vectors, which are small."""

    def __init__(self, work, frozen):
        self._work, self._frozen = work, frozen
        self._features = None

    def prepare(self):
        if self._frozen.is_at_head:
            self._features = list(self._values())

    def __call__(self, trainable):
        """(accuracy, mean loss), or (None, None) without validation images."""
        return evaluate(trainable, self._values() if self._features is None else self._features)

    def _values(self):
        for images, labels in self._images():
            yield self._frozen.original.features(images).to(self._work.device), labels

    def _images(self):
        return evaluation_batches(self._work, self._work.network.description, self._work.dataset.val)


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

