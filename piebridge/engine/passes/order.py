"""An order of the nodes with a low peak of memory.

Finding the best order is NP-hard (Sethi, 1975), so: a list schedule that runs whatever frees memory first, then moves of single
nodes around the peak, as long as they lower it. The plan decides; an order that is no better than the given one is not taken.
"""

from piebridge.engine.lifetime import Lifetimes

MOST_MOVES = 200
MOST_TRIED = 24  # storages at the peak, the largest first


def run(step):
    """Reorders the graph for a lower peak; how many nodes moved. New values come after every reader of the old ones."""
    lifetimes = Lifetimes(step)
    schedule = Schedule(step, lifetimes)
    given = schedule.repaired(list(range(len(lifetimes.nodes))))
    best = min((given, schedule.shrinking_first(given)), key=lifetimes.peak_bytes)
    best = _improved(schedule, best)
    if given == sorted(given) and lifetimes.peak_bytes(best) >= lifetimes.peak_bytes(given):
        return 0
    reorder(step, [lifetimes.nodes[number] for number in best])
    return sum(position != number for position, number in enumerate(best))


def reorder(step, nodes):
    """Puts the computing nodes into this order."""
    computing = [node for node in step.graph.nodes if node.op == "call_function"]
    if len(nodes) != len(computing) or set(nodes) != set(computing):
        raise ValueError("the order does not hold each node once")
    last = [node for node in step.graph.nodes if node.op in ("placeholder", "get_attr")][-1]
    for node in nodes:
        last.append(node)
        last = node


class Schedule:
    """needs, needed_by: numbers of the nodes that must run before and after each node."""

    def __init__(self, step, lifetimes):
        self.lifetimes = lifetimes
        number = lifetimes.number
        self.needs = [{number[argument] for argument in node.all_input_nodes if argument in number} for node in lifetimes.nodes]
        for node, readers in lifetimes.writes.items():
            later = self._descendants(number[node])
            self.needs[number[node]].update(reader for reader in readers if reader not in later)
        self.needed_by = [set() for _ in self.needs]
        for node, needs in enumerate(self.needs):
            for other in needs:
                self.needed_by[other].add(node)
        self.ends, self.starts = [[] for _ in self.needs], [[] for _ in self.needs]
        for index, storage in enumerate(lifetimes.storages):
            for node in storage.ends:
                self.ends[node].append(index)
            for node in set(storage.starts):
                self.starts[node].append(index)

    def _descendants(self, node):
        """Itself and what follows from it, with the restrictions that are known so far."""
        found, pending = set(), [node]
        while pending:
            each = pending.pop()
            if each not in found:
                found.add(each)
                pending.extend(other for other, needs in enumerate(self.needs) if each in needs)
        return found

    def repaired(self, order):
        """The order, each node moved behind what it must wait for."""
        done, result = set(), []

        def emit(node):
            pending = [node]
            while pending:
                each = pending[-1]
                missing = [other for other in sorted(self.needs[each]) if other not in done]
                if each in done or not missing:
                    pending.pop()
                    if each not in done:
                        done.add(each)
                        result.append(each)
                else:
                    pending.extend(reversed(missing))

        for node in order:
            emit(node)
        return result

    def shrinking_first(self, order):
        """At each step the ready node that frees most beyond what it allocates; where none frees, the first of the given order."""
        rank = {node: position for position, node in enumerate(order)}
        waiting = [len(needs) for needs in self.needs]
        remaining = [len(storage.ends) for storage in self.lifetimes.storages]
        is_live = [False] * len(remaining)
        ready = {node for node in order if not waiting[node]}
        result = []
        while ready:
            growth = {node: self._growth(node, remaining, is_live) for node in ready}
            node = min(ready, key=lambda node: (min(growth[node], 0), rank[node]))
            ready.remove(node)
            result.append(node)
            for index in self.starts[node]:
                is_live[index] = True
            for index in self.ends[node]:
                remaining[index] -= 1
            for other in self.needed_by[node]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.add(other)
        return result

    def _growth(self, node, remaining, is_live):
        """Bytes that are allocated after the node has run, less those before."""
        storages = self.lifetimes.storages
        growth = sum(storages[index].bytes for index in self.starts[node] if not is_live[index])
        return growth - sum(storages[index].bytes for index in self.ends[node] if remaining[index] == 1 and not storages[index].is_kept)

    def later(self, order, storage, takes_makers):
        """What lies in the storage, moved right before its first reader, with all that is made for it alone, or without.

        None where it stands there already.
        """
        position = {node: place for place, node in enumerate(order)}
        own = {self.lifetimes.number[holder] for holder in storage.holders if holder in self.lifetimes.number}
        readers = {user for node in own for user in self.needed_by[node]} - own
        first = min((position[user] for user in readers), default=len(order))
        moved = {node for node in own if position[node] < first}
        if takes_makers:
            for node in reversed(order[:first]):
                users = self.needed_by[node]
                if users and not users.isdisjoint(moved) and all(user in moved or position[user] >= first for user in users):
                    moved.add(node)
        return _moved_to(order, moved, first)

    def sooner(self, order, storage, at):
        """The storage's last reader, and all that it waits for, moved before position `at`."""
        position = {node: place for place, node in enumerate(order)}
        moved, pending = set(), [max(storage.ends, key=position.__getitem__)]
        while pending:
            node = pending.pop()
            if node not in moved and position[node] >= at:
                moved.add(node)
                pending.extend(self.needs[node])
        return None if order[at] in moved else _moved_to(order, moved, at)


def _moved_to(order, moved, place):
    """The order with these nodes right before the one at `place`, or None where that is the order given."""
    result = ([node for node in order[:place] if node not in moved] + [node for node in order if node in moved]
              + [node for node in order[place:] if node not in moved])
    return None if result == order else result


def _improved(schedule, order):
    """Moves at the peak that lower it, until none does."""
    lifetimes = schedule.lifetimes
    for _ in range(MOST_MOVES):
        better = _one_move(schedule, order, *lifetimes.peak(order))
        if better is None:
            return order
        order = better
    return order


def _one_move(schedule, order, peak, at):
    storages = schedule.lifetimes.storages
    live = [index for index, (first, last) in enumerate(schedule.lifetimes.spans(order)) if first <= at <= last]
    for index in sorted(live, key=lambda index: -storages[index].bytes)[:MOST_TRIED]:
        candidates = (schedule.later(order, storages[index], False), schedule.sooner(order, storages[index], at),
                      schedule.later(order, storages[index], True))
        for candidate in candidates:
            if candidate is not None and schedule.lifetimes.peak_bytes(candidate) < peak:
                return candidate
    return None
