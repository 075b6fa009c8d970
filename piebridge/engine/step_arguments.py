"""What the caller of a step gives at each run, checked, for executors that take their inputs by name."""

import torch

from piebridge.core.errors import UserError
from piebridge.engine.step_graph import BATCH, COUNT, DRAW, RATE, WEIGHTS

GIVEN = (BATCH, WEIGHTS, RATE, COUNT, DRAW)  # in the order in which a run gets them


def given_values(step):
    """The step's inputs (Values) that each run brings, in the order in which a run gets them."""
    return [value for role in GIVEN for _, value in step.inputs_of(role)]


def given_tensors(step, batch, weights=None, rate=None, count=None, draws=()):
    """One contiguous tensor for each of `given_values(step)`.

    batch, draws: tensors in the order of the step's BATCH and DRAW inputs; weights: float [B]; rate, count: numbers; None for what the
    step does not take, as a frozen prefix. UserError for a tensor that is missing, left over, or of another shape.
    """
    values = given_values(step)
    given = [*batch, *[each for each in (weights, rate, count) if each is not None], *draws]
    if len(given) != len(values):
        raise UserError(f"step: takes {len(values)} values at each run ({', '.join(value.name for value in values)}), {len(given)} given")
    tensors = [torch.as_tensor(each, dtype=value.dtype).contiguous() for value, each in zip(values, given)]
    for value, tensor in zip(values, tensors):
        if tuple(tensor.shape) != value.shape:
            raise UserError(f"step: {value.name} must be of shape {list(value.shape)}, not {list(tensor.shape)}; compile the step for it")
    return tensors
