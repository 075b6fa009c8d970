"""Passes: each edits the graph of a step in place, keeps what it computes, and can be left out by name.

A pass is `run(step, tensors) -> int`, how many nodes it changed. `tensors` {(role, name): tensor} holds the network's own values.
"""

import logging

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.engine.passes import (
    common_subexpressions,
    dead_code,
    fold_batch_norm,
    fold_constants,
    join_selected,
    plain_softmax,
    simplify,
    sparse_channels,
    split_convolution_backward,
)
from piebridge.engine.propagate import propagate

LOG = logging.getLogger(__name__)


def _of_graph(run):
    """For passes that look at the graph alone."""
    return lambda step, tensors: run(step)


# in this order: what is split can be folded, what is folded can be equal, what is selected leaves the rest dead
PASSES = {
    "simplify": _of_graph(simplify.run),
    "plain_softmax": plain_softmax.run,
    "join_selected": join_selected.run,
    "split_convolution_backward": _of_graph(split_convolution_backward.run),
    "fold_batch_norm": fold_batch_norm.run,
    "fold_constants": fold_constants.run,
    "common_subexpressions": _of_graph(common_subexpressions.run),
    "sparse_channels": _of_graph(sparse_channels.run),
    # memory: activation_masks, recompute
    "dead_code": dead_code.run,
    # memory: early_update, order
}


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
