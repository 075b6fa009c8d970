"""The head alone, before the other trainable blocks join it, and once more when they are done.

Before (LP-FT: Kumar et al., ICLR 2022, section 3.4): fine-tuning from a random head first distorts good features; from a trained one it
starts where linear probing ends. After (FixRes: Touvron et al., NeurIPS 2019, section 4): random crops show objects larger than they are
in what the network will see; a head that meets unaugmented images at the end makes up for that. Both cost one frozen pass over the
images: while the head is trained alone its inputs can be cached, and come through the proxies that pay.
"""

import copy
import dataclasses
import logging

import torch

from piebridge.core.assembly import build_parts
from piebridge.core.loop import Progress, is_better, run_loop
from piebridge.core.methods import METHODS
from piebridge.core.planner import with_settings

LOG = logging.getLogger(__name__)
# beside what `ours` does with a head: one view of each image, and nothing that moves samples between networks
_SETTINGS = {"pet.kind": "head", "pet.head_first": 0, "pet.head_last": 0, "loader.augment": "none", "cache.views": 0,
             "cache.augment": "none", "proxies.set": None, "router.closing": 0, "router.lowers": False, "router.audit": 0.0,
             "router.skips_proxies": False}


def train_head_first(work):
    """Train the head of `work.network` in place for `pet.head_first` epochs. work: an `assembly.Workplace`.

    It is not checkpointed: what it measured and cached outlives an interruption, and the rest takes a second or two.
    """
    epochs = work.config.pet.head_first
    LOG.info("the head alone first, %d epochs on features that are computed once", epochs)
    _train(work, "head_first", epochs)


def train_head_last(work, tuning, progress):
    """Train the head of what a Tuning gives for `pet.head_last` epochs more, and keep it where it is better on validation.

    progress: a loop.Progress that has come to its end, with the best validation of the epochs before; it takes over what is better.
    """
    network = copy.deepcopy(tuning.bridged())  # which may share the head that is kept where the new one is worse
    epochs = work.config.pet.head_last
    LOG.info("the head alone last, %d epochs on features that are computed once", epochs)
    parts = _train(dataclasses.replace(work, network=network.to(work.device), fingerprint=network.fingerprint()), "head_last", epochs)
    with work.clock.evaluation():
        parts.validate.prepare()
        accuracy, loss = parts.validate(parts.step.trainable)
    if not is_better(accuracy, loss, progress):
        LOG.info("the head stays as it was: %s on validation", _percent(accuracy))
        return
    progress.best_accuracy, progress.best_loss = accuracy, loss
    with torch.no_grad():
        for own, new in zip(tuning.head.parameters(), network.head.parameters()):
            own.copy_(new)


def _train(work, name, epochs):
    """The Parts of a loop over the head of `work.network`, which has run. name: of its section among the decisions."""
    config = with_settings(work.config, dict(METHODS["ours"].defaults, epochs=epochs, **_SETTINGS))
    parts = build_parts(dataclasses.replace(work, config=config, decisions=work.decisions.section(name)))
    unjudged = dataclasses.replace(parts, validate=lambda trainable: (None, None))
    run_loop(unjudged, Progress(), {}, work.clock, _NoCheckpoints(), work.interrupt)
    return parts


def _percent(accuracy):
    return "n/a" if accuracy is None else f"{100 * accuracy:.2f} %"


class _NoCheckpoints:
    def due(self):
        return False

    def save(self, is_epoch_end=False):
        pass
