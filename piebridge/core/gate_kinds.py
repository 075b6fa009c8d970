"""The gates by name, each with the pruner that goes with it."""

from piebridge.core.gate import LossGate, OpenGate, WholeBatchGate
from piebridge.core.random_gates import InfoBatch, SelectiveBackprop, UnbiasedGate, first_full_epoch
from piebridge.core.sampler import EverySample


def build_gate(kind, settings, epochs, samples, seed):
    """(gate, pruner) for the section `gate` of a configuration; `samples` is how many training images there are."""
    return GATES[kind](settings, first_full_epoch(epochs, settings.full_epochs), samples, seed)


def _unbiased(settings, full_from, samples, seed):
    gate = UnbiasedGate(settings.momentum, settings.drop, full_from, seed)
    return gate, gate


def _infobatch(settings, full_from, samples, seed):
    pruner = InfoBatch(samples, settings.drop, full_from, seed)
    return pruner.gate, pruner


GATES = {
    "none": lambda settings, *_: (OpenGate(), EverySample()),
    "loss": lambda settings, *_: (LossGate(settings.momentum), EverySample()),
    "batch": lambda settings, *_: (WholeBatchGate(settings.factor, settings.momentum), EverySample()),
    "unbiased": _unbiased,
    "selective_backprop": lambda settings, full_from, samples, seed: (
        SelectiveBackprop(settings.beta, settings.history, seed), EverySample()),
    "infobatch": _infobatch,
}
