"""What the tests of the ONNX step share: steps of the small networks in float32, functions as graphs, and the comparison."""

import functools

import torch
from engine_networks import batch_of, family, loss_of, parts_of, with_lora
from engine_reference import advance, tensors_of

from piebridge.engine import compat
from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.propagate import propagate
from piebridge.engine.step_graph import BATCH, DRAW, OUTPUTS, TRAINED, StepGraph, Value
from piebridge.engine.update_rules import SGD

RATE = 0.05
COUNT = 4


@functools.lru_cache(maxsize=None)
def step_of(name, scheme, rule=None, is_training=False, module=None):
    """(StepGraph, module, batch) of a family and a scheme of engine_networks.py; captured once, so none of them may be changed."""
    module = family(name, torch.float32) if module is None else module
    if scheme == "lora":
        module = with_lora(module)
    module.train(is_training)
    batch = batch_of(name, COUNT, dtype=torch.float32)
    settings = StepSettings(is_training=is_training)
    return capture(module, loss_of(name), rule or SGD(0.9), parts_of(module, scheme), batch, settings), module, batch


def draws_of(step, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(value.shape, generator=generator).lt(value.facts["keep"]).to(value.dtype) for _, value in step.inputs_of(DRAW)]


def compared(executor_of, step, module, batch, steps=3, tensors=None):
    """(largest error of losses, outputs and live tensors; losses by step) of an executor, beside the graph called as it stands.

    tensors: what to begin with, instead of the module's. Errors are relative to the largest number of all tensors of the same role: some
    gradients are zero but for rounding, such as those of an attention's key bias.
    """
    expected, live = [{key: tensor.clone() for key, tensor in (tensors or tensors_of(step, module)).items()} for _ in range(2)]
    executor = executor_of(step, live)
    flat = [tensor for value in batch for tensor in (value if isinstance(value, tuple) else (value,))]
    weights, errors, curve = torch.full([COUNT], 1 / COUNT), [], []
    for count in range(1, steps + 1):
        draws = draws_of(step, count)
        found = executor.run(flat, weights, RATE, count, draws)
        right = advance(step, expected, batch, weights, RATE, float(count), draws)
        errors += [_error([pair]) for pair in zip(found, right)]
        for role in {role for role, _ in expected}:
            errors.append(_error([(live[key], tensor) for key, tensor in expected.items() if key[0] == role]))
        curve.append((found[0].mean().item(), right[0].mean().item()))
    assert any(not torch.equal(tensor, module.get_parameter(name)) for (role, name), tensor in live.items() if role == TRAINED)
    return max(errors), curve


def _error(pairs):
    """pairs: [(found, expected)]."""
    floats = [(found.double(), expected.double()) for found, expected in pairs if expected.is_floating_point()]
    assert all(torch.equal(found, expected) for found, expected in pairs if not expected.is_floating_point())
    largest = max((expected.abs().max().item() for _, expected in floats), default=1.0)
    return max(((found - expected).abs().max().item() / max(largest, 1e-6) for found, expected in floats), default=0.0)


def graph_of(function, *examples):
    """A function of tensors as a StepGraph with BATCH inputs and OUTPUTS alone, operators as the function calls them."""
    def flat(*tensors):
        results = function(*tensors)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    inputs = [Value(BATCH, f"x{position}", tuple(each.shape), each.dtype) for position, each in enumerate(examples)]
    outputs = [Value(OUTPUTS, f"y{position}", tuple(each.shape), each.dtype) for position, each in enumerate(flat(*examples))]
    return propagate(StepGraph(compat.trace(flat, examples), inputs, outputs, {})).finish()
