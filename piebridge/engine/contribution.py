"""What training a part of a network is worth: by Fisher information in one pass, or by short runs as published.

Both give numbers that are added up over the parts of a scheme; they say which of two parts is worth more, not how good the result is.
"""

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from piebridge.core.costs import eval_mode
from piebridge.core.errors import UserError
from piebridge.engine.channel_choice import fisher_information
from piebridge.engine.remembered import batches_hash, name_of
from piebridge.engine.update_rules import SGD

LOG = logging.getLogger(__name__)


def fisher(module, loss, batches, keys=None):
    """{key: tensor of the parameter's shape}: empirical Fisher information, the mean over samples of (d loss / d w)^2.

    TinyTrain (Kwon et al., ICML'24) takes (activation * its gradient)^2 of output channels. Here it is the weights' own: that is
    how fast a gradient step on them lowers the loss, it is there for whatever a part may select (input channels, rows of a Linear, heads,
    biases), and all of it is in one unit, so that it may be added up. Each sample goes through by itself: the squared gradient of a
    batch's mean would be smaller the more its samples disagree, and one sample needs the least memory.

    module: as it will be fine-tuned, in eval mode inside, and left as it was; a fresh head orders layers and channels much as a fitted
    one does, but with samples that a head was fitted on, the few that it still gets wrong decide alone. loss: see losses.py. batches: of
    (inputs, targets), each a tensor or a tuple of tensors. keys: of the parameters, all by default. UserError where a gradient is not
    finite, or there is no sample.
    """
    keys = [key for key, _ in module.named_parameters()] if keys is None else keys
    samples = list(_samples(batches))
    if not samples:
        raise UserError("engine: search: no batches to measure contributions on; give at least one")
    with eval_mode(module):
        totals = fisher_information(module, loss, samples, keys)
    for key, total in totals.items():
        if not torch.isfinite(total).all():
            raise UserError(f"engine: search: the gradient of {key!r} is not finite; check the loss and the inputs' normalisation")
    return {key: total / len(samples) for key, total in totals.items()}


def worth(scores, parts):
    """{key: the summed scores of its part} of `parts` ({key: Part}); scores: {key: tensor of the parameter's shape}, 0 where one lacks."""
    return {key: float(part.of(scores[key]).double().sum()) if key in scores else 0.0 for key, part in parts.items()}


def multi_objective_scores(information, parameter_bytes, macs):
    """TinyTrain's score of layers: information / ((bytes / largest bytes) * (MACs / largest MACs)). All float [layers].

    For a ranking without a search. A knapsack's values are the information itself: there the bytes stand in the budget already.
    """
    information, parameter_bytes, macs = (np.asarray(each, dtype=np.float64) for each in (information, parameter_bytes, macs))
    return information / np.maximum(parameter_bytes / parameter_bytes.max() * (macs / macs.max()), 1e-12)


def is_right(outputs, targets):
    """bool [B], or [B, T]: whether the largest of outputs [..., C] is that of targets."""
    return outputs.argmax(-1) == targets


@dataclass
class ShortRuns:
    """Accuracy on validation after some steps on a part of the network: the published measure of contribution.

    Cai et al. and Lin et al. (NeurIPS'22, section 3.2): a layer at a ratio is worth what tuning it on top of all biases down to its depth
    gains over the biases alone. batches, validation: lists of (inputs, targets); epochs: over `batches`; rule: see update_rules.py;
    rate: constant; judge: (outputs, *targets) -> what is averaged over validation.
    """

    module: Any
    loss: Any
    batches: list
    validation: list
    rate: float = 0.01
    epochs: int = 1
    rule: Any = field(default_factory=lambda: SGD(momentum=0.9))
    judge: Any = is_right

    def identity(self):
        """JSON of what decides the results, the module and the parts apart."""
        return {"loss": name_of(self.loss), "batches": batches_hash(self.batches), "validation": batches_hash(self.validation),
                "rate": self.rate, "epochs": self.epochs, "rule": repr(self.rule), "judge": name_of(self.judge)}

    def accuracy(self, parts):
        """Mean judgement on validation after tuning `parts` ({key: Part}) from where the module stands; it is afterwards as before."""
        with only_trained(self.module, list(parts)) as parameters:
            before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
            states = {key: {slot: torch.zeros_like(parts[key].of(value)) for slot in self.rule.slots} for key, value in before.items()}
            try:
                count = 0
                for _ in range(self.epochs if parts else 0):
                    for batch in self.batches:
                        count += 1
                        self._step(parameters, parts, states, batch, count)
                return self._validated()
            finally:
                with torch.no_grad():
                    for key, parameter in parameters.items():
                        parameter.copy_(before[key])

    def _step(self, parameters, parts, states, batch, count):
        inputs, targets = _tuples(batch)
        gradients = torch.autograd.grad(self.loss(self.module(*inputs), *targets).mean(), list(parameters.values()))
        with torch.no_grad():
            for (key, parameter), gradient in zip(parameters.items(), gradients):
                part = parts[key]
                rate, number = (parameter.new_tensor(value) for value in (self.rate, count))  # rules take tensors, as in a graph
                value, states[key] = self.rule.new_values(part.of(parameter), part.of(gradient), states[key], rate, number)
                if part.is_whole:
                    parameter.copy_(value)
                else:
                    parameter.index_copy_(part.dim, part.index, value)

    def _validated(self):
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in self.validation:
                inputs, targets = _tuples(batch)
                judgements = self.judge(self.module(*inputs), *targets).double()
                total, count = total + float(judgements.sum()), count + judgements.numel()
        return total / count


@contextlib.contextmanager
def only_trained(module, keys):
    """The module in eval mode, with gradients for the parameters `keys` alone; yields {key: parameter}. Restored at the end."""
    parameters = dict(module.named_parameters())
    unknown = [key for key in keys if key not in parameters]
    if unknown:
        raise UserError(f"engine: search: no parameter {unknown[0]!r} in {type(module).__name__}")
    flags = {key: parameter.requires_grad for key, parameter in parameters.items()}
    wanted = {key: parameters[key] for key in keys}
    try:
        for key, parameter in parameters.items():
            parameter.requires_grad_(key in wanted)
        with torch.enable_grad(), eval_mode(module):
            yield wanted
    finally:
        for key, parameter in parameters.items():
            parameter.requires_grad_(flags[key])


def _tuples(batch):
    return [value if isinstance(value, tuple) else (value,) for value in batch]


def _samples(batches):
    """(inputs, targets) of one sample each, tuples of tensors [1, ...]."""
    for batch in batches:
        inputs, targets = _tuples(batch)
        for sample in range(len(inputs[0])):
            yield tuple(tuple(tensor[sample:sample + 1] for tensor in tensors) for tensors in (inputs, targets))
