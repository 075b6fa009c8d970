"""The training steps by name, and what a step is wrapped in where the gate or the router asks for it."""

from piebridge.core.as_released import FreshAdamStep
from piebridge.core.audit import AuditedStep
from piebridge.core.direct_step import DirectStep
from piebridge.core.elastic_trainer import ElasticStep
from piebridge.core.full_batches import FullBatchStep
from piebridge.core.prune_train import PruneTrainStep
from piebridge.core.step import EagerStep

STEPS = {
    "eager": lambda tuning, config: EagerStep(tuning, config.optimizer),
    "direct": lambda tuning, config: DirectStep(tuning, config.optimizer),
    "prune_train": lambda tuning, config: PruneTrainStep(tuning, config.optimizer, config.pet, config.prune_train),
    "elastic": lambda tuning, config: ElasticStep(tuning, config.optimizer, config.elastic),
    "fresh_adam": lambda tuning, config: FreshAdamStep(tuning, config.optimizer),
}


def build_step(config, tuning, source, router, gate, further):
    """The step for a configuration: trains a Tuning on what `source` gives. gate: a key of gate_kinds.GATES. further: {name: builder} of
    steps that lie outside core.
    """
    step = dict(STEPS, **further)[config.step](tuning, config)
    smoothing = config.optimizer.label_smoothing
    if gate == "selective_backprop":
        step = FullBatchStep(step, config.loader.batch_size, smoothing)
    if config.router.audit and source.needs_level_batches:
        step = AuditedStep(step, router, source.original_values, config.router.audit, config.router.audit_floor, smoothing)
    return step
