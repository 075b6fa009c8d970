"""From a module, a loss and an update rule to one static ATen graph of forward, backward and update."""

import copy
import logging
from dataclasses import dataclass

import torch
from torch import nn

from piebridge.core.errors import UserError
from piebridge.engine import compat
from piebridge.engine.propagate import propagate
from piebridge.engine.step_graph import (
    BATCH,
    BUFFER,
    COUNT,
    DRAW,
    FROZEN,
    INDEX,
    LOSSES,
    OUTPUTS,
    RATE,
    STATE,
    TRAINED,
    WEIGHTS,
    Part,
    StepGraph,
    Value,
)

LOG = logging.getLogger(__name__)
NOT_DECOMPOSED = ("convolution",)  # has a pass of its own, see passes/


@dataclass(frozen=True)
class StepSettings:
    """How a step computes, beside module, loss and rule.

    clip: largest norm of all gradients together, None for none (the norm needs every gradient before the first update).
    accumulation: micro-batches per update; above 1 there is an accumulating step beside the updating one. is_training: train mode, for
    dropout and for batch norm. decomposes, functionalises: whether the trace is lowered to core operators, and freed of in-place ones.
    """

    clip: float = None
    accumulation: int = 1
    is_training: bool = False
    decomposes: bool = True
    functionalises: bool = True


def capture(module, loss, rule, parts, batch, settings=None, is_accumulating=False):
    """StepGraph of one training step.

    module: any nn.Module; untouched. loss: (outputs, *targets) -> float [B], or the inputs to the module come first in `batch`:
    batch = (inputs, targets), each a tensor or a tuple of tensors, examples with the shapes and types that the step will get.
    rule: see update_rules.py. parts: {state dict key: Part} of what is trained. is_accumulating: the step only adds its gradients
    to the accumulators, states "key/gradient".
    What is minimised is the sum over samples of weight * loss: with weights 1/B, the mean. UserError where the module cannot be traced,
    with the operator or the line that stands in the way.
    """
    settings = settings or StepSettings()
    inputs, targets = [value if isinstance(value, tuple) else (value,) for value in batch]
    plan = _Plan(_in_mode(module, settings), loss, rule, parts, inputs, targets, settings, is_accumulating)
    graph_module = _trace(plan, settings)
    step = StepGraph(graph_module, plan.values, plan.outputs, dict(parts))
    _without_aliases(step)
    _draws_as_inputs(step)
    _outputs_once(step)
    propagate(step)
    return step.finish()


def _in_mode(module, settings):
    """A copy of the module that shares its tensors, in the mode that is traced, without in-place activations.

    Of an in-place ReLU6 autograd keeps a clone from before it, which would be held beside its result.
    """
    memo = {id(tensor): tensor for tensor in list(module.parameters()) + list(module.buffers())}
    module = copy.deepcopy(module, memo)
    if settings.is_training:
        for each in module.modules():
            each.training = getattr(each, "training", True)
    else:
        module.eval()
    for each in module.modules():
        if getattr(each, "inplace", False) is True:
            each.inplace = False
    return module


class _Plan:
    """The step as a pure function of a flat list of tensors, and what these are."""

    def __init__(self, module, loss, rule, parts, inputs, targets, settings, is_accumulating):
        self.module, self.loss, self.rule, self.parts = module, loss, rule, parts
        self.settings, self.is_accumulating = settings, is_accumulating
        self.counts = len(inputs), len(targets)
        self.values, self.examples = [], []
        parameters = dict(module.named_parameters())
        unknown = [key for key in parts if key not in parameters]
        if unknown:
            raise UserError(f"engine: no parameter {unknown[0]!r} to train in {type(module).__name__}; it has {', '.join(list(parameters)[:4])}, ...")
        for key, parameter in parameters.items():
            self._add(TRAINED if key in parts else FROZEN, key, parameter)
        for key, buffer in module.named_buffers():
            self._add(BUFFER, key, buffer)
        for key, part in parts.items():
            if not part.is_whole:
                self._add(INDEX, key, part.index, dim=part.dim)
        self.slots = rule.slots + (("gradient",) if settings.accumulation > 1 else ())
        for key, part in parts.items():
            for slot in self.slots:
                self._add(STATE, f"{key}/{slot}", torch.zeros_like(part.of(parameters[key].detach())))
        for position, tensor in enumerate(inputs):
            self._add(BATCH, "inputs" if len(inputs) == 1 else f"inputs/{position}", tensor)
        for position, tensor in enumerate(targets):
            self._add(BATCH, "targets" if len(targets) == 1 else f"targets/{position}", tensor)
        like = next(iter(parameters.values()))
        self._add(WEIGHTS, "weights", torch.ones(inputs[0].shape[0], dtype=like.dtype, device=like.device))
        self._add(RATE, "rate", torch.tensor(0.1, dtype=like.dtype, device=like.device))
        self._add(COUNT, "count", torch.tensor(1.0, dtype=like.dtype, device=like.device))
        self.outputs = []

    def _add(self, role, name, tensor, **facts):
        self.values.append(Value(role, name, tuple(tensor.shape), tensor.dtype, facts))
        self.examples.append(tensor.detach())

    def __call__(self, *flat):
        given = {}
        for value, tensor in zip(self.values, flat):
            given.setdefault(value.role, {})[value.name] = tensor
        trained = {key: tensor.detach().requires_grad_(True) for key, tensor in given.get(TRAINED, {}).items()}
        # an own alias: what the module writes into its buffers is put out, not left behind
        buffers = {key: tensor.clone() for key, tensor in given.get(BUFFER, {}).items()}
        batch, (inputs, targets) = list(given[BATCH].values()), self.counts
        with compat.exact_attention(), torch.enable_grad():
            tensors = dict(given.get(FROZEN, {}), **dict(trained, **buffers))
            outputs = torch.func.functional_call(self.module, tensors, tuple(batch[:inputs]), tie_weights=True)
            losses = self.loss(outputs, *batch[inputs:])
            objective = (losses * given[WEIGHTS]["weights"]).sum()
            gradients = dict(zip(trained, torch.autograd.grad(objective, list(trained.values()), allow_unused=True)))
        with torch.no_grad():
            new = self._new_values(trained, gradients, given)
        changed = {key: buffer for key, buffer in buffers.items() if self._is_changed(key)}
        results = [(LOSSES, "losses", losses.detach()), (OUTPUTS, "outputs", outputs.detach())]
        results += [(role, name, tensor.detach()) for role, name, tensor in new]
        results += [(BUFFER, key, buffer.detach()) for key, buffer in changed.items()]
        self.outputs = [Value(role, name, tuple(tensor.shape), tensor.dtype) for role, name, tensor in results]
        return tuple(tensor for _, _, tensor in results)

    def _is_changed(self, key):
        """Batch norm's statistics change in train mode only; other buffers are constants."""
        owner = self.module.get_submodule(key.rpartition(".")[0])
        return isinstance(owner, nn.modules.batchnorm._BatchNorm) and owner.training

    def _new_values(self, trained, gradients, given):
        """[(role, name, new value)] of the trained parts and the states."""
        unused = [key for key, gradient in gradients.items() if gradient is None]
        if unused:
            raise UserError(f"engine: the loss does not depend on {unused[0]!r}; leave it out of the scheme")
        states = given.get(STATE, {})
        parts = {key: Part(part.dim, given.get(INDEX, {}).get(key)) for key, part in self.parts.items()}
        own = {key: parts[key].of(gradient) for key, gradient in gradients.items()}
        results = []
        if self.settings.accumulation > 1:
            own = {key: states[f"{key}/gradient"] + gradient for key, gradient in own.items()}
            sums = {key: gradient if self.is_accumulating else torch.zeros_like(gradient) for key, gradient in own.items()}
            results = [(STATE, f"{key}/gradient", total) for key, total in sums.items()]
            if self.is_accumulating:
                return results
        if self.settings.clip is not None:
            own = _clipped(own, self.settings.clip)
        for key, gradient in own.items():
            before = {slot: states[f"{key}/{slot}"] for slot in self.rule.slots}
            value, after = self.rule.new_values(parts[key].of(trained[key].detach()), gradient, before, given[RATE]["rate"], given[COUNT]["count"])
            results.append((TRAINED, key, value))
            results += [(STATE, f"{key}/{slot}", state) for slot, state in after.items()]
        return results


def _clipped(gradients, largest):
    """Scaled so that their common norm is at most `largest`, as torch.nn.utils.clip_grad_norm_ does it."""
    norm = torch.sqrt(sum((gradient * gradient).sum() for gradient in gradients.values()))
    scale = torch.clamp(largest / (norm + 1e-6), max=1.0)
    return {key: gradient * scale for key, gradient in gradients.items()}


def _trace(plan, settings):
    table = {}
    if settings.decomposes:
        table = {operator: rule for operator, rule in compat.core_decompositions().items()
                 if operator._schema.name.partition("::")[2] not in NOT_DECOMPOSED}
        table.update(compat.batch_norm_decompositions())
    trace = compat.make_fx()
    try:
        with torch.no_grad():
            traced = trace(plan, decomposition_table=table, tracing_mode="fake")(*plan.examples)
            # autograd cannot run inside functionalize, so that is a second trace: of the calls, not of the module
            if settings.functionalises and any(_is_in_place(node) for node in traced.graph.nodes):
                traced = trace(compat.functionalised(traced), tracing_mode="fake")(*plan.examples)
    except UserError:
        raise
    except Exception as error:  # whatever a foreign module does while it is traced
        name, reason = type(plan.module).__name__, str(error).strip().splitlines()
        raise UserError(f"engine: {name} cannot be traced: {type(error).__name__}: {reason[0][:160] if reason else ''}") from error
    return traced


def _is_in_place(node):
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _without_aliases(step):
    """Autograd's own bookkeeping: the same tensor under another name."""
    aten = compat.aten()
    for node in list(step.graph.nodes):
        if node.target in (aten.alias.default, aten.detach.default):
            node.replace_all_uses_with(node.args[0])
            step.graph.erase_node(node)
    step.graph.eliminate_dead_code()


def _draws_as_inputs(step):
    """Turn random operators into inputs: a static graph that drew by itself would not be repeatable, nor the same elsewhere."""
    aten = compat.aten()
    for node in list(step.graph.nodes):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        if node.target is aten.bernoulli.p:
            keep, like = node.args[1], node.meta["val"]
        elif node.target is aten.bernoulli.default and node.args[0].target in (aten.full.default, aten.full_like.default):
            keep, like = node.args[0].args[1], node.meta["val"]
        else:
            raise UserError(f"engine: random operator {node.target} ({node.name}): only dropout and stochastic depth are known; "
                            "put the network into eval mode, or draw outside and pass it in")
        number = len(step.inputs_of(DRAW))
        value = Value(DRAW, f"draw/{number}", tuple(like.shape), like.dtype, {"kind": "bernoulli", "keep": float(keep)})
        node.replace_all_uses_with(step.add_input(value, like))
        step.graph.erase_node(node)
    step.graph.eliminate_dead_code()


def _outputs_once(step):
    """An input that is put out as it came, or a value that is put out twice, gets a node of its own: each output is written once."""
    output = next(iter(reversed(step.graph.nodes)))
    seen, results = set(), []
    for node in output.args[0]:
        if node in seen or node.op == "placeholder":
            with step.graph.inserting_before(output):
                node = step.graph.call_function(compat.aten().clone.default, (node,))
        seen.add(node)
        results.append(node)
    output.args = (tuple(results),)
