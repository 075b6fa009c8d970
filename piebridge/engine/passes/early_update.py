"""Apply each gradient as soon as it exists, so that neither it nor what it was made from waits for the others.

Autograd returns all gradients before the first update; a static graph need not. A new value comes after every reader of the old one,
so that an executor may write it into the old tensor at once.
"""

from piebridge.engine.lifetime import WRITTEN, Lifetimes
from piebridge.engine.passes.order import reorder


def run(step):
    """Moves what only one parameter's update needs right behind the last of the other values that it reads; how many nodes moved."""
    lifetimes = Lifetimes(step)
    before = lifetimes.nodes
    after = _early_order(step, lifetimes)
    reorder(step, after)
    return sum(old is not new for old, new in zip(before, after))


def _early_order(step, lifetimes):
    own = _updates(step, lifetimes)
    readers = {node: [lifetimes.nodes[number] for number in lifetimes.writes[node] if lifetimes.nodes[number] is not node]
               for node in lifetimes.writes}
    triggers, waiting = {}, {}
    for node in lifetimes.nodes:
        if node in own:
            needed = [argument for argument in node.all_input_nodes if argument in lifetimes.number] + readers.get(node, [])
            positions = [triggers.get(each, -1) if each in own else lifetimes.number[each] for each in needed]
            triggers[node] = max(positions, default=-1)
            if triggers[node] >= 0:
                waiting.setdefault(triggers[node], []).append(node)
    order, done = [], set()

    def emit(node):
        if node in done or node not in lifetimes.number:
            return
        done.add(node)
        for argument in node.all_input_nodes + [reader for reader in readers.get(node, ()) if reader in own]:
            emit(argument)
        order.append(node)

    for node in lifetimes.nodes:
        if node not in own:
            emit(node)
            for update in waiting.get(lifetimes.number[node], ()):
                emit(update)
    for node in lifetimes.nodes:  # what reads inputs alone, such as the decay of an accumulator
        emit(node)
    return order


def _updates(step, lifetimes):
    """The nodes that lead to the new values of one parameter and to nothing else."""
    reached = {}
    for node, value in zip(step.results, step.outputs):
        name = value.name.rpartition("/")[0] if value.role == "state" else value.name
        reached.setdefault(node, set()).add(name if value.role in WRITTEN else None)
    for node in reversed(lifetimes.nodes):
        for user in node.users:
            reached.setdefault(node, set()).update(reached.get(user, ()))
    return {node for node in lifetimes.nodes if len(reached.get(node, ())) == 1 and None not in reached[node]}
