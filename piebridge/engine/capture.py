"""From a module, a loss and an update rule to one static ATen graph of forward, backward and update."""

import copy
import logging
import os
import traceback
from pathlib import Path

import torch

from piebridge.core.errors import UserError
from piebridge.engine import compat
from piebridge.engine.functionalise import functionalise, is_functional
from piebridge.engine.propagate import propagate
from piebridge.engine.step_function import StepFunction, StepSettings
from piebridge.engine.step_graph import BUFFER, DRAW, StepGraph, Value

LOG = logging.getLogger(__name__)
NOT_DECOMPOSED = ("aten::convolution",)  # has a pass of its own, see passes/
FOREIGN = tuple(f"{Path(path).parent}{os.sep}" for path in (torch.__file__, __file__))  # folders whose lines are not the user's


def capture(module, loss, rule, parts, batch, settings=None, is_accumulating=False):
    """StepGraph of one training step.

    module: any nn.Module that puts out one tensor; it is left as it is. loss: function (outputs, *targets) -> float [B], one per sample.
    rule: see update_rules.py. parts: {state dict key: Part} of what is trained; of tied parameters, the first key. batch: (inputs,
    targets), each a tensor or a tuple of tensors, with the shapes and types that the step will get. settings: StepSettings.
    is_accumulating: the step only adds its gradients to the states "key/gradient".
    What is minimised is the sum over samples of weight * loss: with weights 1/B, the mean.
    Errors: UserError in one line for a part, a batch, a mode or a loss that does not fit, and where the module cannot be traced, with
    the operator or the line that stands in the way.
    """
    settings = settings or StepSettings()
    batch = tuple(value if isinstance(value, tuple) else (value,) for value in batch)
    function = StepFunction(_in_mode(module, settings), loss, rule, parts, batch, settings, is_accumulating)
    step = StepGraph(_trace(function, settings), function.inputs, function.outputs, dict(parts))
    _without_other_names(step)
    _without_constant_buffers(step)
    _draws_as_inputs(step)
    _outputs_once(step)
    propagate(step)
    LOG.debug("%s: a step of %d nodes, %d trained tensors", type(module).__name__, len(step.graph.nodes), len(parts))
    return step.finish()


def _in_mode(module, settings):
    """A copy of the module that shares its tensors, in the mode that is traced, without in-place activations.

    Of an in-place ReLU6 autograd keeps a clone from before it, which would be held beside its result.
    """
    if settings.is_training and not any(each.training for each in module.modules()):
        raise UserError(f"engine: is_training, and {type(module).__name__} is in eval mode; call .train() on it or on those of its modules "
                        "that shall train so, or leave is_training out")
    memo = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    module = copy.deepcopy(module, memo)
    if not settings.is_training:
        module.eval()
    for each in module.modules():
        if getattr(each, "inplace", False) is True:
            each.inplace = False
    return module


def _trace(function, settings):
    table = compat.batch_norm_decompositions()  # always: as one call it writes into the statistics without saying so
    if settings.decomposes:
        table.update({operator: rule for operator, rule in compat.core_decompositions().items()
                      if operator not in table and operator._schema.name not in NOT_DECOMPOSED})
    try:
        traced = compat.trace(function, function.examples, table)
        if settings.functionalises:
            traced = functionalise(traced, function.examples, table)
    except UserError:
        raise
    except Exception as error:  # whatever a foreign module does while it is traced
        raise UserError(f"engine: {type(function.module).__name__} cannot be traced{_place(error)}: {_reason(error)}") from error
    return traced


def _place(error):
    """' at FILE:LINE' of the last line that is neither PyTorch's nor the engine's, or ''."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(FOREIGN + ("<",))]
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} `{frames[-1].line}`" if frames else ""


def _reason(error):
    if compat.is_data_dependent(error):
        return ("what it does, or the shape of what it computes, depends on a tensor's values, and a step is one fixed list of operators; "
                "compute it outside and pass it in, or choose with torch.where")
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _without_other_names(step):
    """The same tensor under another name: autograd's own bookkeeping, and without in-place operators clones too."""
    aten = compat.aten()
    position = {aten.alias.default: 0, aten.detach.default: 0}
    if is_functional(step.graph):
        position.update({aten.clone.default: 0, aten.lift_fresh_copy.default: 0, aten.copy.default: 1})
    for node in list(step.graph.nodes):
        source = node.args[position[node.target]] if node.target in position else None
        if source is not None and _is_laid_out_alike(node, source):
            node.replace_all_uses_with(source)
            step.graph.erase_node(node)
    step.graph.eliminate_dead_code()


def _is_laid_out_alike(node, source):
    """Constants, which have no fake tensor yet, are only lifted, never laid out anew."""
    if source.op == "get_attr":
        return True
    before, after = source.meta["val"], node.meta["val"]
    return before.dtype == after.dtype and before.shape == after.shape and before.stride() == after.stride()


def _without_constant_buffers(step):
    """Put out only the buffers that the step changes: in eval mode, none of batch norm's."""
    clone = compat.aten().clone.default
    kept = []
    for value, node in zip(step.outputs, step.results):
        source = node.args[0] if node.target is clone else node
        if value.role != BUFFER or source.op != "placeholder":
            kept.append((value, node))
    step.outputs[:] = [value for value, _ in kept]
    step.output.args = (tuple(node for _, node in kept),)
    step.graph.eliminate_dead_code()


def _draws_as_inputs(step):
    """Turn random operators into inputs: a static graph that drew by itself would not be repeatable, nor the same elsewhere."""
    for node in list(step.graph.nodes):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        like, number = node.meta["val"], len(step.inputs_of(DRAW))
        facts = {"kind": "bernoulli", "keep": _kept_share(node)}
        node.replace_all_uses_with(step.add_input(Value(DRAW, f"draw/{number}", tuple(like.shape), like.dtype, facts), like))
        step.graph.erase_node(node)
    step.graph.eliminate_dead_code()


def _kept_share(node):
    """Of a Bernoulli draw, the probability of a one."""
    aten = compat.aten()
    if node.target in (aten.bernoulli.p, aten.bernoulli_.float):
        return float(node.args[1])
    if node.target is aten.bernoulli.default and node.args[0].target in (aten.full.default, aten.full_like.default):
        return float(node.args[0].args[1])
    raise UserError(f"engine: random operator {node.target} ({node.name}): only dropout and stochastic depth are known; put the network "
                    "into eval mode, or draw outside and pass it in")


def _outputs_once(step):
    """An input that is put out as it came, or a value that is put out twice, gets a node of its own: each output is written once."""
    results = []
    for node in step.results:
        if node in results or node.op == "placeholder":
            with step.graph.inserting_before(step.output):
                node = step.graph.call_function(compat.aten().clone.default, (node,))
        results.append(node)
    step.output.args = (tuple(results),)
