"""Passes: each edits the graph of a step in place, keeps what it computes, and can be left out by name.

A pass is `run(step, tensors) -> int`, how many nodes it changed. `tensors` {(role, name): tensor} holds the network's own values.
"""

import logging

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.engine.passes import (
    activation_masks,
    batch_norm_gradients,
    common_subexpressions,
    dead_code,
    early_update,
    fold_batch_norm,
    fold_constants,
    join_selected,
    order,
    plain_softmax,
    recompute,
    shape_only,
    simplify,
    sparse_channels,
    split_convolution_backward,
)
from piebridge.engine.propagate import propagate

LOG = logging.getLogger(__name__)


def _of_graph(run):
    """For passes that look at the graph alone."""
    return lambda step, tensors: run(step)


# in this order: what is split can be folded, what is folded can be equal, what is selected leaves the rest dead;
# masks before recomputation, which then works on the schedule that early updates leave; the order is found for what there is in the end
PASSES = {
    "simplify": _of_graph(simplify.run),
    "plain_softmax": plain_softmax.run,
    "join_selected": join_selected.run,
    "split_convolution_backward": _of_graph(split_convolution_backward.run),
    "batch_norm_gradients": batch_norm_gradients.run,
    "fold_batch_norm": fold_batch_norm.run,
    "fold_constants": fold_constants.run,
    "common_subexpressions": _of_graph(common_subexpressions.run),
    "sparse_channels": _of_graph(sparse_channels.run),
    "shape_only": _of_graph(shape_only.run),
    "activation_masks": _of_graph(activation_masks.run),
    "dead_code": dead_code.run,
    "early_update": _of_graph(early_update.run),
    "recompute": _of_graph(recompute.run),
    "order": _of_graph(order.run),
}

TRADING_TIME = ("activation_masks", "recompute")  # for memory; only the reference executor, which follows the plan, gains by them


def run_passes(step, tensors, off=()):
    """Run all passes but those named in `off` -> {name: how many nodes it changed}.

    tensors: {(FROZEN or BUFFER, name): tensor}, of the network. Edited together with the step: values that stay the same over a run are
    computed here, once, and come in as FROZEN "folded/<n>"; inputs that nothing reads any more leave both. So give a copy of the
    dictionary, and compile anew when a frozen tensor changes. UserError for an unknown name, and for a step with in-place operators.
    """
    for name in off:
        if name not in PASSES:
            raise UserError(f"engine: no pass {name!r}; there are {', '.join(PASSES)}{closest(name, PASSES)}")
    chosen = [name for name in PASSES if name not in off]
    in_place = next((node for node in step.graph.nodes if _is_in_place(node)), None)
    if chosen and in_place is not None:
        raise UserError(f"engine: {in_place.name} = {in_place.target} writes in place, passes need pure operators: capture with "
                        "functionalises=True, or switch all passes off")
    changes = {}
    for name in chosen:
        changes[name] = PASSES[name](step, tensors)
        if changes[name]:
            propagate(step)
            step.finish()
    LOG.debug("passes: %s", ", ".join(f"{name} {count}" for name, count in changes.items()))
    return changes


def _is_in_place(node):
    return getattr(getattr(node.target, "_schema", None), "is_mutable", False)
