"""From a configuration to the parts of the loop. Methods differ in these parts only."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from piebridge.core.as_released import CountedValidation, FreshAdamStep, counted_images, released_batches
from piebridge.core.audit import AuditedStep
from piebridge.core.direct_step import DirectStep
from piebridge.core.elastic_trainer import ElasticStep
from piebridge.core.errors import UserError
from piebridge.core.full_batches import FullBatchStep
from piebridge.core.gate_kinds import build_gate
from piebridge.core.head2toe import select_features
from piebridge.core.labels import Labels, PseudoLabels
from piebridge.core.loader import ImageLoader, in_batches
from piebridge.core.loop import Parts
from piebridge.core.preparation import FrozenPart, caches_features
from piebridge.core.progress_bar import progress_bar
from piebridge.core.prune_train import PruneTrainStep
from piebridge.core.router import FixedRouter
from piebridge.core.sampler import OriginalOnly, epoch_batches
from piebridge.core.step import EagerStep, evaluate
from piebridge.core.stream import Stream, StreamSource, arrivals_from, arrivals_of
from piebridge.core.transforms import Transform
from piebridge.core.tuning import BODIES, Tuning

STEPS = {
    "eager": lambda tuning, config: EagerStep(tuning, config.optimizer),
    "direct": lambda tuning, config: DirectStep(tuning, config.optimizer),
    "prune_train": lambda tuning, config: PruneTrainStep(tuning, config.optimizer, config.pet, config.prune_train),
    "elastic": lambda tuning, config: ElasticStep(tuning, config.optimizer, config.elastic),
    "fresh_adam": lambda tuning, config: FreshAdamStep(tuning, config.optimizer),
}
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
    images: Any = None  # an iterable of (image, label) to train on in place of the data set's images, see core/stream.py

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
    labels, describe_sample = _labels(work), lambda index: work.dataset.relative_path(work.dataset.train[index])
    if config.stream.samples:
        source, router, labels = _from_stream(work, source, router)
        describe_sample = "arrival {} of the epoch".format
    prepare = PREPARATIONS.get(config.pet.kind)
    if prepare is not None:
        prepare(tuning, source, labels, config, work.decisions.decide, work.interrupt.check)
    selection, pruner = build_gate(gate, config.gate, config.epochs, len(work.dataset.train), config.seed)
    if config.router.skips_proxies:
        pruner = OriginalOnly(router, pruner)
    parts = Parts(source=source, step=_step(config, tuning, source, router, gate), gate=selection, pruner=pruner,
                  router=router, labels=labels, validate=_validation(work, frozen), settings=config.optimizer,
                  epochs=config.epochs, batch_size=config.loader.batch_size, seed=config.seed,
                  describe_sample=describe_sample,
                  batches=released_batches if config.as_released else epoch_batches)
    work.decisions.decide("gate", lambda: gate)
    return parts


def _step(config, tuning, source, router, gate):
    step = STEPS[config.step](tuning, config)
    smoothing = config.optimizer.label_smoothing
    if gate == "selective_backprop":
        step = FullBatchStep(step, config.loader.batch_size, smoothing)
    if config.router.audit and source.needs_level_batches:
        step = AuditedStep(step, router, source.original_values, config.router.audit, config.router.audit_floor, smoothing)
    return step


def _labels(work):
    dataset = work.dataset
    labels = torch.tensor([sample.label for sample in dataset.train], device=work.device)
    if work.config.pseudo.kind == "none":
        return Labels(labels)
    is_labelled = torch.tensor([sample.path not in dataset.unlabelled for sample in dataset.train], device=work.device)
    return PseudoLabels(labels, is_labelled, work.config.pseudo, work.clock, work.interrupt)


def _from_stream(work, source, router):
    """(source, router, labels) of a stream in the place of the data set that `source` reads: all of it through the level of its router."""
    config = work.config
    if work.images is None and config.loader.augment != "crop_flip":
        raise UserError(f"stream.samples={config.stream.samples}: with loader.augment={config.loader.augment} a data set shows the same "
                        "views again; use loader.augment=crop_flip, or a stream of your own: piebridge.train(..., images=...)")
    arrivals = arrivals_of(work.dataset, config.seed) if work.images is None else arrivals_from(work.images)
    stream, level = Stream(arrivals, config.stream.samples, work.dataset.classes, work.device), int(router.levels[0])
    work.decisions.update("levels_used", {each.name: stream.size * (number == level) for number, each in enumerate(source.levels)})
    return StreamSource(source, stream), FixedRouter([level] * stream.size), stream


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

