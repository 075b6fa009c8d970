"""Settings that nothing reads: they belong to another kind of gate, step or PET structure than the chosen one."""

import logging

from piebridge.config_schema import known_keys
from piebridge.core.methods import METHODS

LOG = logging.getLogger(__name__)
# key that decides, its values under which the others are read, those others
_READ_UNDER = (
    ("pet.kind", ("last_k",), ("pet.last_k",)),
    ("pet.kind", ("adapter", "lora", "lst"), ("pet.r",)),
    ("pet.kind", ("adapter", "lora", "lst", "head2toe"), ("pet.blocks",)),
    ("pet.kind", ("lora",), ("pet.alpha", "pet.dropout", "pet.target")),
    ("pet.kind", ("sparse",), ("pet.scheme",)),
    ("pet.kind", ("head2toe",), ("pet.layer_features", "pet.keep", "pet.penalty")),
    ("gate.kind", ("loss", "batch", "unbiased", "auto"), ("gate.momentum",)),
    ("gate.kind", ("batch",), ("gate.factor",)),
    ("gate.kind", ("unbiased", "infobatch"), ("gate.drop", "gate.full_epochs")),
    ("gate.kind", ("selective_backprop",), ("gate.beta", "gate.history")),
    ("optimizer.kind", ("sgd",), ("optimizer.momentum",)),
    ("step", ("prune_train",), ("prune_train.strength", "prune_train.threshold", "prune_train.every")),
    ("step", ("elastic",), ("elastic.rho", "elastic.every")),
    ("pseudo.kind", ("confidence",), ("pseudo.threshold", "pseudo.warmup_epochs")),
    ("router.kind", ("residual",), ("router.predictor",)),
    ("router.kind", ("residual", "random"), ("router.tolerance", "router.delta")),
    ("cache.augment", ("noise", "mixup"), ("cache.augment_strength",)),
    ("cache.shared", (True,), ("cache.folder",)),
)
_CHOSEN_BY_PLAN = ("cache.kind", "cache.views")


def warn_of_unread(config):
    """Log what `unread` finds."""
    for line in unread(config):
        LOG.warning("%s", line)


def unread(config):
    """A line for each setting of a Config that is not its default and has no effect, as another one decides."""
    defaults = {key: field.default for key, field in known_keys().items()}
    for decider, values, keys in _READ_UNDER:
        chosen = _value(config, decider)
        is_open = config.strategy == "auto" and decider == "router.kind"  # some strategies have a router of their own
        for key in keys if chosen not in values and not is_open else ():
            if _value(config, key) != defaults[key]:
                yield f"{key}={_value(config, key)} has no effect: it is read with {decider}={'|'.join(map(str, values))}, not {chosen}"
    for key in _CHOSEN_BY_PLAN if config.strategy == "auto" else ():
        if _value(config, key) != METHODS[config.method].defaults.get(key, defaults[key]):
            yield f"{key}={_value(config, key)} has no effect: strategy=auto chooses it"


def _value(config, key):
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)
