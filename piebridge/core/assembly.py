"""From a configuration to the parts of the loop. Methods differ in these parts only."""

from dataclasses import dataclass, field
from typing import Any, Callable, Dict

import torch

from piebridge.core.as_released import released_batches
from piebridge.core.errors import UserError
from piebridge.core.gate_kinds import build_gate
from piebridge.core.head2toe import select_features
from piebridge.core.labels import Labels, PseudoLabels
from piebridge.core.loop import Parts
from piebridge.core.planning import planned
from piebridge.core.preparation import AUTO, FrozenPart, caches_features
from piebridge.core.router import ClosingRouter, FixedRouter
from piebridge.core.sampler import OriginalOnly, epoch_batches
from piebridge.core.step_kinds import build_step
from piebridge.core.stream import Stream, StreamSource, arrivals_from, arrivals_of
from piebridge.core.tuning import tuning_of
from piebridge.core.validation import build_validation

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
    parts: Any = None  # of pet.kind=sparse: what is trained, see core/pet_sparse.py
    steps: Dict[str, Callable] = field(default_factory=dict)  # {name: builder} of training steps beside those of core/step_kinds.py

    def view_seed(self, epoch):
        """Seed of an epoch's augmented views, the same every `cache.views` epochs; None where all epochs show the same view."""
        views = self.config.cache.views
        return None if self.config.loader.augment == "none" else (self.config.seed, epoch % views if views else epoch)


def build_parts(work):
    """The Parts of the loop; what led to them is in `work.decisions`."""
    tuning, measured = tuning_of(work.network, work.config, work.parts), None
    if work.config.strategy == AUTO:
        work, measured = planned(work, tuning)
    config, frozen = work.config, FrozenPart(work, tuning, measured)
    source, router = frozen.source_and_router()
    gate = config.gate.kind
    if gate == "auto":  # behind a cache a skipped backward saves microseconds, and costs accuracy (measured, see doc/LOG.md)
        gate = "none" if config.step == "compiled" or caches_features(config, tuning) else "loss"
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
    parts = Parts(source=source, step=build_step(config, tuning, source, router, gate, work.steps), gate=selection, pruner=pruner,
                  router=router, labels=labels, validate=build_validation(work, frozen), settings=config.optimizer,
                  epochs=config.epochs, batch_size=config.loader.batch_size, seed=config.seed,
                  describe_sample=describe_sample,
                  batches=released_batches if config.as_released else epoch_batches)
    work.decisions.decide("gate", lambda: gate)
    return parts


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
    router = ClosingRouter(FixedRouter([level] * stream.size), config.epochs, config.router.closing)
    return StreamSource(source, stream), router, stream
