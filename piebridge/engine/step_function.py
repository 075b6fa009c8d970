"""The training step as a pure function of a flat list of tensors: forward, backward and update. Its trace is the step's graph."""

from dataclasses import dataclass
from functools import reduce
from typing import Optional

import torch

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.engine import compat
from piebridge.engine.module_call import call_with
from piebridge.engine.step_graph import BATCH, BUFFER, COUNT, FROZEN, INDEX, LOSSES, OUTPUTS, RATE, STATE, TRAINED, WEIGHTS, Part, Value

GRADIENT = "gradient"  # the state that holds what micro-batches have added up
NORM_MARGIN = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class StepSettings:
    """How a step computes, beside module, loss and rule.

    clip: largest norm of all gradients together, None for none (the norm needs every gradient before the first update).
    accumulation: micro-batches per update; above 1 there is an accumulating step beside the updating one.
    is_training: each submodule in the mode that it is in, so that batch norm may stay in eval mode while dropout draws; else all of them
    in eval mode. decomposes, functionalises: whether the trace is lowered to core operators, and freed of in-place ones.
    """

    clip: Optional[float] = None
    accumulation: int = 1
    is_training: bool = False
    decomposes: bool = True
    functionalises: bool = True

    def __post_init__(self):
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"engine: clip={self.clip}: the largest norm of the gradients is above 0, or None")
        if self.accumulation < 1:
            raise UserError(f"engine: accumulation={self.accumulation}: at least 1 batch per update")


class StepFunction:
    """What is traced. `inputs` and `examples` describe its arguments, `outputs` (known after a call) its results."""

    def __init__(self, module, loss, rule, parts, batch, settings, is_accumulating=False):
        """See capture.capture; `batch`: (tuple of inputs, tuple of targets)."""
        self.module, self.loss, self.rule, self.parts = module, loss, rule, parts
        self.clip, self.is_accumulating = settings.clip, is_accumulating
        self.accumulates = settings.accumulation > 1
        if is_accumulating and not self.accumulates:
            raise UserError("engine: an accumulating step is one of several per update: set accumulation above 1")
        check_parts(module, parts)
        check_batch(module, batch)
        self.inputs, self.examples, self.outputs = [], [], []
        self._add_tensors()
        self._add_batch(*batch)

    def _add_tensors(self):
        """Parameters, buffers, chosen channels and states."""
        for key, parameter in self.module.named_parameters():
            self._add(TRAINED if key in self.parts else FROZEN, key, parameter)
        for key, buffer in self.module.named_buffers():
            self._add(BUFFER, key, buffer)
        for key, part in self.parts.items():
            if not part.is_whole:
                self._add(INDEX, key, part.index, dim=part.dim)
        for key, part in self.parts.items():
            for slot in self.rule.slots + ((GRADIENT,) if self.accumulates else ()):
                self._add(STATE, f"{key}/{slot}", torch.zeros_like(part.of(self.module.get_parameter(key).detach())))

    def _add_batch(self, inputs, targets):
        self.number_of_inputs, self.batch_size = len(inputs), inputs[0].shape[0]
        for name, tensors in (("inputs", inputs), ("targets", targets)):
            for position, tensor in enumerate(tensors):
                self._add(BATCH, name if len(tensors) == 1 else f"{name}/{position}", tensor)
        like = next(self.module.parameters())
        # a rate in half precision would be off by up to 0.4 %
        scalar = torch.ones((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        self._add(WEIGHTS, "weights", scalar.repeat(self.batch_size))
        self._add(RATE, "rate", scalar)
        self._add(COUNT, "count", scalar.clone())

    def _add(self, role, name, tensor, **facts):
        self.inputs.append(Value(role, name, tuple(tensor.shape), tensor.dtype, facts))
        self.examples.append(tensor.detach())

    def __call__(self, *flat):
        """One tensor per input -> one per output, and `outputs` says what these are."""
        given = {}
        for value, tensor in zip(self.inputs, flat):
            given.setdefault(value.role, {})[value.name] = tensor
        trained = {key: tensor.detach().requires_grad_(True) for key, tensor in given[TRAINED].items()}
        # what the module writes into its buffers is put out, and what it writes into its inputs is its own
        buffers = {key: tensor.clone() for key, tensor in given.get(BUFFER, {}).items()}
        batch = [tensor.clone() for tensor in given[BATCH].values()]
        with compat.exact_attention(), torch.enable_grad():
            outputs, losses = self._forward({**given.get(FROZEN, {}), **trained, **buffers}, batch)
            gradients = self._gradients((losses * given[WEIGHTS]["weights"]).sum(), trained)
        results = [(LOSSES, "losses", losses), (OUTPUTS, "outputs", outputs)]
        with torch.no_grad():
            parts = {key: Part(part.dim, given.get(INDEX, {}).get(key)) for key, part in self.parts.items()}
            values = {key: part.of(trained[key].detach()) for key, part in parts.items()}
            results += self._updates(values, {key: part.of(gradients[key]) for key, part in parts.items()}, given)
        results += [(BUFFER, key, buffer) for key, buffer in buffers.items()]
        self.outputs = [Value(role, name, tuple(tensor.shape), tensor.dtype) for role, name, tensor in results]
        return tuple(tensor.detach() for _, _, tensor in results)

    def _forward(self, tensors, batch):
        """(outputs, losses [B])"""
        inputs, targets = batch[:self.number_of_inputs], batch[self.number_of_inputs:]
        outputs = call_with(self.module, tensors, inputs)
        if not isinstance(outputs, torch.Tensor):
            raise UserError(f"engine: {type(self.module).__name__} puts out a {type(outputs).__name__}, not one tensor; wrap it in a "
                            "module that returns what the loss needs")
        losses = self.loss(outputs, *targets)
        if tuple(losses.shape) != (self.batch_size,):
            raise UserError(f"engine: the loss has shape {list(losses.shape)}, not [{self.batch_size}], one value per sample; give it "
                            "reduction='none', and average over all dimensions but the first")
        return outputs, losses

    def _gradients(self, objective, trained):
        """{key: gradient} of whole tensors."""
        gradients = [None] * len(trained)
        if objective.requires_grad:
            gradients = torch.autograd.grad(objective, list(trained.values()), allow_unused=True)
        for key, gradient in zip(trained, gradients):
            if gradient is None:
                raise UserError(f"engine: the loss does not depend on {key!r}; leave it out of the scheme")
        return dict(zip(trained, gradients))

    def _updates(self, values, gradients, given):
        """[(role, name, new value)] of the trained parts and their states."""
        states, results = given.get(STATE, {}), []
        if self.accumulates:
            gradients = {key: states[f"{key}/{GRADIENT}"] + gradient for key, gradient in gradients.items()}
            if self.is_accumulating:
                return [(STATE, f"{key}/{GRADIENT}", gradient) for key, gradient in gradients.items()]
            results = [(STATE, f"{key}/{GRADIENT}", torch.zeros_like(gradient)) for key, gradient in gradients.items()]
        if self.clip is not None:
            gradients = clipped(gradients, self.clip)
        for key, gradient in gradients.items():
            before = {slot: states[f"{key}/{slot}"] for slot in self.rule.slots}
            value, after = self.rule.new_values(values[key], gradient, before, given[RATE]["rate"], given[COUNT]["count"])
            results.append((TRAINED, key, value))
            results += [(STATE, f"{key}/{slot}", state) for slot, state in after.items()]
        return results


def clipped(gradients, largest):
    """{key: gradient} scaled so that their common norm is at most `largest`, as torch.nn.utils.clip_grad_norm_ does it."""
    norm = torch.sqrt(reduce(torch.add, [(gradient * gradient).sum() for gradient in gradients.values()]))
    scale = torch.clamp(largest / (norm + NORM_MARGIN), max=1.0)
    return {key: gradient * scale for key, gradient in gradients.items()}


def check_parts(module, parts):
    """UserError where there is nothing to train, or a name or channels that the module has not."""
    name, parameters = type(module).__name__, dict(module.named_parameters())
    if not parts:
        raise UserError(f"engine: the scheme trains nothing of {name}; let it name at least one parameter: {_first(parameters)}")
    for key, part in parts.items():
        if key not in parameters:
            tied = dict(module.named_parameters(remove_duplicate=False)).get(key)
            owners = [other for other, parameter in parameters.items() if parameter is tied]
            cure = f": it is tied to {owners[0]!r}, train that" if owners else f"{closest(key, parameters)}; it has {_first(parameters)}"
            raise UserError(f"engine: {name} has no parameter {key!r}{' of its own' if owners else ''}{cure}")
        if not part.is_whole:
            _check_channels(key, tuple(parameters[key].shape), part)


def _check_channels(key, shape, part):
    if not 0 <= part.dim < len(shape):
        raise UserError(f"engine: {key}: channels of dimension {part.dim} of a tensor {list(shape)}; give one of 0..{len(shape) - 1}")
    index, extent = part.index, shape[part.dim]
    is_ascending = index.dim() == 1 and index.dtype == torch.int64 and len(index) > 0 and bool((index[1:] > index[:-1]).all())
    if not is_ascending or index[0] < 0 or index[-1] >= extent:
        raise UserError(f"engine: {key}: channels {index.tolist()} of dimension {part.dim}; give ascending int64 in 0..{extent - 1}")


def _first(names):
    names = list(names)
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def check_batch(module, batch):
    """UserError where an example is no tensor, or has another floating type than the module."""
    types = {parameter.dtype for parameter in module.parameters()}
    for name, tensors in zip(("inputs", "targets"), batch):
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise UserError(f"engine: the example {name} hold a {type(tensor).__name__}; give a tensor or a tuple of tensors")
            if name == "inputs" and tensor.is_floating_point() and tensor.dtype not in types:
                raise UserError(f"engine: the example inputs are {_plain(tensor.dtype)}, {type(module).__name__} is "
                                f"{', '.join(sorted(map(_plain, types)))}; convert one of them with .to(dtype)")


def _plain(dtype):
    return str(dtype).rpartition(".")[2]
