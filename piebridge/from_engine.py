"""What a run takes from the engine, where it asks for it: the tensors and channels that a scheme means, and the compiled step."""

import functools
import logging
import sys

import torch

from piebridge.core.errors import UserError
from piebridge.core.validation import evaluation_batches

LOG = logging.getLogger(__name__)
OLDEST = (3, 10)  # Python
MOST_IMAGES = 64  # that Fisher information is taken of


def take_from_engine(work):
    """Fill in `parts` and `steps` of an `assembly.Workplace`. UserError where the engine does not run here, or the scheme does not fit."""
    if work.config.pet.kind == "sparse":
        with work.clock.phase("setup"):
            work.parts = work.decisions.decide("parts", lambda: _resolved(work))
    if work.config.step == "compiled":
        _check_python("step=compiled", "step=eager")
        from piebridge.compiled_step import CompiledStep

        report = functools.partial(work.decisions.update, "compiled")
        work.steps = {"compiled": lambda tuning, config: CompiledStep(tuning, config, report)}


def _resolved(work):
    """What the scheme means for the network, as JSON: {key: [dimension, channels], or None for the whole tensor}."""
    _check_python("pet.kind=sparse", "pet.kind=last_k")
    from piebridge.engine.scheme import Scheme

    scheme, network = Scheme.read(work.config.pet.scheme), work.network
    like = network.head.weight
    example = torch.zeros([1] + list(network.description["input_size"]), dtype=like.dtype, device=like.device)
    parts = scheme.resolve(network, example, _scores(scheme, work))
    found = {key: None if part.is_whole else [part.dim, part.index.tolist()] for key, part in parts.items()}
    LOG.info("scheme %s: %d tensors, %d of them in part", scheme.name or "given", len(found), len(found) - list(found.values()).count(None))
    work.decisions.update("scheme", {"text": scheme.text(), "tensors": {
        key: "whole" if part is None else f"{len(part[1])} channels of dimension {part[0]}" for key, part in found.items()}})
    return found


def _scores(scheme, work):
    """Fisher information of the weights on some training images, of all classes, where the scheme chooses channels by it."""
    from piebridge.engine.channel_choice import FISHER, fisher_information
    from piebridge.engine.losses import cross_entropy

    if scheme.channels != FISHER:
        return None
    samples = [sample for sample in work.dataset.train if sample.path not in work.dataset.unlabelled]
    chosen = samples[::-(-len(samples) // MOST_IMAGES)]
    return fisher_information(work.network, cross_entropy, evaluation_batches(work, work.network.description, chosen))


def _check_python(setting, cure):
    if sys.version_info < OLDEST:
        found, oldest = ".".join(map(str, sys.version_info[:2])), ".".join(map(str, OLDEST))
        raise UserError(f"{setting}: the engine needs Python {oldest} or newer, and this is {found}; use {cure}")
