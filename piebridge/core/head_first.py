"""The head alone, before the other trainable blocks join it (LP-FT: Kumar et al., ICLR 2022, section 3.4).

Fine-tuning from a random head first distorts good features; from a trained one it starts where linear probing ends. Here that start
costs one frozen pass over the images: the blocks that will be trained are an identity or unchanged yet, so the head's inputs can be
cached, and come through the proxies that pay.
"""

import dataclasses
import logging

from piebridge.core.assembly import build_parts
from piebridge.core.loop import Progress, run_loop
from piebridge.core.methods import METHODS
from piebridge.core.planner import with_settings

LOG = logging.getLogger(__name__)
# beside what `ours` does with a head: one view of each image, and nothing that moves samples between networks
_SETTINGS = {"pet.kind": "head", "pet.head_first": 0, "loader.augment": "none", "cache.views": 0, "cache.augment": "none",
             "proxies.set": None, "router.closing": 0, "router.lowers": False, "router.audit": 0.0, "router.skips_proxies": False}


def train_head_first(work):
    """Train the head of `work.network` in place for `pet.head_first` epochs. work: an `assembly.Workplace`.

    It is not checkpointed: what it measured and cached outlives an interruption, and the rest takes a second or two.
    """
    epochs = work.config.pet.head_first
    config = with_settings(work.config, dict(METHODS["ours"].defaults, epochs=epochs, **_SETTINGS))
    part = dataclasses.replace(work, config=config, decisions=work.decisions.section("head_first"))
    parts = dataclasses.replace(build_parts(part), validate=lambda trainable: (None, None))
    LOG.info("the head alone first, %d epochs on features that are computed once", epochs)
    run_loop(parts, Progress(), {}, work.clock, _NoCheckpoints(), work.interrupt)


class _NoCheckpoints:
    def due(self):
        return False

    def save(self, is_epoch_end=False):
        pass
