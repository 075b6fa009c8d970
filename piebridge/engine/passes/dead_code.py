"""Nodes whose value nobody reads, and frozen inputs that no node reads."""

from piebridge.engine.step_graph import BUFFER, FROZEN


def run(step, tensors):
    """How many nodes and inputs were taken away, the inputs from `tensors` too."""
    before = len(step.graph.nodes)
    step.graph.eliminate_dead_code()
    removed = before - len(step.graph.nodes)
    return removed + _drop_unused_inputs(step, tensors)


def _drop_unused_inputs(step, tensors):
    """Of the frozen ones: what comes anew each step, and what is trained, keeps its place even unread. Returns how many."""
    unused = [(node, value) for node, value in zip(step.placeholders, step.inputs) if value.role in (FROZEN, BUFFER) and not node.users]
    for node, value in unused:
        step.graph.erase_node(node)
        tensors.pop((value.role, value.name), None)
    gone = {id(value) for _, value in unused}
    step.inputs[:] = [value for value in step.inputs if id(value) not in gone]
    return len(unused)
