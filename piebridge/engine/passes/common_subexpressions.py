"""The same operator on the same operands is computed once."""

from torch import fx

from piebridge.engine.passes import edit
from piebridge.engine.step_graph import TRAINED


def run(step):
    results = set(step.results)
    always_live = _made_of_inputs_alone(step)
    first, changed = {}, 0
    for node in list(step.graph.nodes):
        if node.op not in ("call_function", "get_attr") or edit.is_random(node) or node in results or node in always_live:
            continue
        if not node.all_input_nodes and node.op == "call_function" and node.meta["val"].numel() > 1:
            continue  # a filled tensor is cheaper made than kept
        kept = first.setdefault(_key(node), node)
        if kept is not node:
            changed += edit.replace(step, node, kept)
    return changed


def _made_of_inputs_alone(step):
    """What is computed from trained tensors and from nothing of this step's batch: shared between forward and backward, a scaled weight
    would be a second copy of the weights through the whole step.
    """
    trained = {step.placeholders[position] for position, _ in step.inputs_of(TRAINED)}
    inputs, made = set(step.placeholders), set()
    for node in step.graph.nodes:
        read = set(node.all_input_nodes)
        if node.op == "call_function" and not edit.is_view(node) and read & (trained | made) and read <= (inputs | made):
            made.add(node)
    return made


def _key(node):
    return node.op, node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(value):
    """Hashable, and 1, 1.0 and True are three values."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    if isinstance(value, dict):
        return tuple(sorted((name, _frozen(each)) for name, each in value.items()))
    return type(value).__name__, repr(value)
