"""Apply each gradient as soon as it exists, so that neither it nor what it was made from waits for the others.

Autograd returns all gradients before the first update; a static graph need not. A new value comes after every reader of the old one,
so that an executor may write it into the old tensor at once. An update that would itself be the peak is put off to the end: where a
layer's weight is larger than its activations, as that of the last layer often is, these are cheaper to keep than the gradient is to make.
"""

from piebridge.engine.lifetime import WRITTEN, Lifetimes
from piebridge.engine.passes.order import Schedule, reorder
from piebridge.engine.step_graph import STATE


def run(step):
    """Moves what only one parameter's update needs right behind the last of the other values that it reads; how many nodes moved."""
    lifetimes = Lifetimes(step)
    schedule = Schedule(step, lifetimes)
    given = schedule.repaired(list(range(len(lifetimes.nodes))))
    owners = _owners(step, lifetimes)
    late = set()
    order = _early_order(schedule, given, owners, late)
    while True:
        peak, position = lifetimes.peak(order)
        large = owners.get(order[position])
        if large is None or large in late:
            break
        candidate = _early_order(schedule, given, owners, late | {large})
        if lifetimes.peak_bytes(candidate) >= peak:
            break
        late, order = late | {large}, candidate
    order = min((order, given), key=lifetimes.peak_bytes)
    reorder(step, [lifetimes.nodes[number] for number in order])
    return sum(position != number for position, number in enumerate(order))


def _early_order(schedule, given, owners, late):
    """The given order, but for the nodes that have owners: they follow right after the last of the others that they wait for, or, where
    their owner is among `late`, at the end.
    """
    rank = {node: place for place, node in enumerate(given)}
    triggers, waiting = {}, {}
    for node in given:
        if node in owners and owners[node] not in late:
            triggers[node] = max((triggers.get(each, rank[each]) for each in schedule.needs[node]), default=-1)
            waiting.setdefault(triggers[node], []).append(node)
    order, done = [], set()

    def emit(node):
        if node not in done:
            done.add(node)
            for each in sorted(schedule.needs[node], key=rank.get):
                emit(each)
            order.append(node)

    for place, node in enumerate(given):
        if node not in owners:
            emit(node)
            for update in waiting.get(place, ()):
                emit(update)
    for node in given:  # the late ones, and what reads inputs alone and nothing has asked for
        emit(node)
    return order


def _owners(step, lifetimes):
    """{number of a node: name of the parameter whose update it leads to}, of the nodes that lead to nothing else."""
    reached = {}
    for node, value in zip(step.results, step.outputs):
        name = value.name.rpartition("/")[0] if value.role == STATE else value.name
        reached.setdefault(node, set()).add(name if value.role in WRITTEN else None)
    for node in reversed(lifetimes.nodes):
        for user in node.users:
            reached.setdefault(node, set()).update(reached.get(user, ()))
    return {lifetimes.number[node]: name for node in lifetimes.nodes if len(reached.get(node, ())) == 1
            for name in reached[node] if name is not None}
