"""How long each piece of a step's memory is needed: from the node that makes it to the last one that reads it.

Memory is counted by storage, so that views cost nothing. The rules are those of an executor that runs the nodes in order:
* a value is held until its last reader has run; losses and outputs are held to the end;
* an elementwise node that is the last reader of one of its arguments computes into that argument's memory;
* the new value of a parameter, state or buffer is computed into the old tensor where that is possible, else written there at once, or,
  where the old value has readers left, after the last of them;
* a random draw is made for its first reader.
Parameters, states, buffers and the batch are the caller's and are not counted.
"""

from dataclasses import dataclass, field
from typing import Dict, List

import torch

from piebridge.engine import compat
from piebridge.engine.step_graph import BUFFER, DRAW, LOSSES, OUTPUTS, STATE, TRAINED

WRITTEN = (TRAINED, STATE, BUFFER)  # outputs that go into the tensor of the input with the same role and name


@dataclass
class Storage:
    """bytes; holders: the nodes whose values lie in it, the one that makes it first. `starts`, `ends`: numbers of the nodes that run
    while it is there, the first and last of which decide; is_kept: to the end of the step.
    """

    bytes: int
    holders: List[torch.fx.Node]
    starts: List[int] = field(default_factory=list)
    ends: List[int] = field(default_factory=list)
    is_kept: bool = False


class Lifetimes:
    """Of the storages that a step allocates. `nodes`: the nodes that compute, numbered in the graph's order; an `order` is a
    permutation of these numbers, None for the graph's own.
    """

    def __init__(self, step):
        self.nodes = [node for node in step.graph.nodes if node.op == "call_function"]
        self.number = {node: number for number, node in enumerate(self.nodes)}
        holders = holders_by_storage(step)
        self.writes = self._last_readers(step, holders)
        draws = {node for node, value in zip(step.placeholders, step.inputs) if value.role == DRAW}
        kept = {node for node, value in zip(step.results, step.outputs) if value.role in (LOSSES, OUTPUTS)}
        owned = {key: found for key, found in holders.items()
                 if found[0][0].op == "call_function" or found[0][0] in draws and found[0][0].users}
        self.storages = [self._storage(nodes, size, draws, kept) for nodes, size in owned.values()]
        self.places = dict(zip(owned, range(len(owned))))
        self._old = self._old_values(step)
        self._reuses = self._possible_reuses()

    def _storage(self, holders, size, draws, kept):
        users = [self.number[user] for holder in holders for user in holder.users if user in self.number]
        own = [self.number[holder] for holder in holders if holder in self.number]
        ends = users + own + [reader for holder in holders for reader in self.writes.get(holder, ())]
        starts = users if holders[0] in draws else own[:1]
        return Storage(size, holders, starts, sorted(set(ends)), not kept.isdisjoint(holders))

    def _last_readers(self, step, holders):
        """{new value: numbers of the nodes that read the old one}: it is written after the last of them."""
        placeholders = {(value.role, value.name): node for node, value in zip(step.placeholders, step.inputs)}
        readers = {}
        for node, value in zip(step.results, step.outputs):
            if value.role in WRITTEN:
                old = placeholders[value.role, value.name]
                aliases = holders[compat.storage_key(old.meta["val"])][0]
                readers[node] = sorted({self.number[user] for alias in aliases for user in alias.users if user in self.number})
        return readers

    def _old_values(self, step):
        """{new value: the input that it replaces}, of those that are replaced whole."""
        placeholders = {(value.role, value.name): node for node, value in zip(step.placeholders, step.inputs)}
        return {node: placeholders[value.role, value.name] for node, value in zip(step.results, step.outputs)
                if value.role in WRITTEN and not (value.role == TRAINED and not step.parts[value.name].is_whole)}

    def _possible_reuses(self):
        """[(number of a node, its storage, [(argument, the argument's storage)])] of elementwise nodes: whose memory they could take."""
        found = []
        for number, node in enumerate(self.nodes):
            value = node.meta["val"]
            if not isinstance(value, torch.Tensor) or compat.into(node.target) is None:
                continue
            own = self.places[compat.storage_key(value)]
            arguments = [each for each in node.args if isinstance(each, torch.fx.Node) and _lie_alike(each, node)]
            given = []
            for argument in dict.fromkeys(arguments):
                place = self.places.get(compat.storage_key(argument.meta["val"]))
                if place is not None and self._may_be_overwritten(place) and self.storages[place].bytes == self.storages[own].bytes:
                    given.append((argument, place))
            old = self._old.get(node)
            if old in arguments or old is not None and _lie_alike(old, node) and not _shares(node, old):
                given.insert(0, (old, None))
            if given:
                found.append((number, own, [each for each in given if _is_only_alike(node, each[0])]))
        return found

    def _may_be_overwritten(self, place):
        """Not what is put out or written, and not a draw, which may be the caller's."""
        storage = self.storages[place]
        return not storage.is_kept and storage.holders[0].op == "call_function" and self.writes.keys().isdisjoint(storage.holders)

    def positions(self, order=None):
        """The position at which each node runs."""
        positions = list(range(len(self.nodes)))
        for position, number in enumerate(order or ()):
            positions[number] = position
        return positions

    def spans(self, order=None):
        """[(first, last)] positions, both inclusive, of each storage."""
        at = self.positions(order).__getitem__
        end = len(self.nodes) - 1
        return [(min(map(at, storage.starts)), end if storage.is_kept else max(map(at, storage.ends))) for storage in self.storages]

    def reuses(self, order=None):
        """{storage: (argument, storage)} that its first node computes into; (the old value, None) for new values."""
        positions, spans, found = self.positions(order), self.spans(order), {}
        for number, own, given in self._reuses:
            position = positions[number]
            for argument, place in given:
                if place is None:
                    is_free = max((positions[reader] for reader in self.writes[self.nodes[number]]), default=position) <= position
                else:
                    is_free = spans[place][1] == position
                if is_free:
                    found[own] = argument, place
                    break
        return found

    def live_bytes(self, order=None):
        """Bytes that are allocated while the node at each position runs."""
        changes = [0] * (len(self.nodes) + 1)
        reuses = self.reuses(order)
        for place, (storage, (first, last)) in enumerate(zip(self.storages, self.spans(order))):
            _, given = reuses.get(place, (None, place))
            if given is not None:  # else it lies in the old tensor
                changes[first + (place in reuses)] += storage.bytes
                changes[last + 1] -= storage.bytes
        live, sums = 0, []
        for change in changes[:-1]:
            live += change
            sums.append(live)
        return sums

    def peak_bytes(self, order=None):
        return self.peak(order)[0]

    def peak(self, order=None):
        """(bytes, position) of the first highest point."""
        live = self.live_bytes(order) or [0]
        peak = max(live)
        return peak, live.index(peak)


def _lie_alike(one, other):
    """Whether two values have the same shape, type and strides, and each fills its memory."""
    one, other = one.meta["val"], other.meta["val"]
    if not isinstance(one, torch.Tensor) or (one.shape, one.dtype, one.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    return one.untyped_storage().nbytes() == one.numel() * one.element_size()


def _shares(node, old):
    return any(compat.storage_key(tensor) == compat.storage_key(old.meta["val"])
               for each in node.all_input_nodes for tensor in tensors_of(each.meta["val"]))


def _is_only_alike(node, overwritten):
    """Whether all that the node reads of this memory lies as the result does: an element is then read before it is written."""
    key = compat.storage_key(overwritten.meta["val"])
    return all(_lie_alike(each, node) for each in node.all_input_nodes
               if any(compat.storage_key(tensor) == key for tensor in tensors_of(each.meta["val"])))


def holders_by_storage(step):
    """{storage key: ([nodes whose values lie in it], bytes)}, in the graph's order."""
    found = {}
    for node in step.graph.nodes:
        for tensor in tensors_of(node.meta.get("val")):
            nodes, _ = found.setdefault(compat.storage_key(tensor), ([], tensor.untyped_storage().nbytes()))
            if not nodes or nodes[-1] is not node:
                nodes.append(node)
    return found


def tensors_of(value):
    """The tensors of a node's value: one, several, or none."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [each for each in values if isinstance(each, torch.Tensor)]


def peak_bytes(step):
    """Most bytes that the step allocates at one time, beside parameters, states, buffers and batch."""
    return Lifetimes(step).peak_bytes()


def forward_end(step, number):
    """The largest number of a node that the network's outputs depend on; `number`: {node: number}. -1 where there is none."""
    pending = [node for node, value in zip(step.results, step.outputs) if value.role == OUTPUTS]
    seen = set(pending)
    while pending:
        for argument in pending.pop().all_input_nodes:
            if argument not in seen:
                seen.add(argument)
                pending.append(argument)
    return max((number.get(node, -1) for node in seen), default=-1)


def forward_nodes(step):
    """The inputs, and the nodes up to the last one that the network's outputs depend on."""
    nodes = list(step.graph.nodes)
    return set(nodes[:forward_end(step, {node: position for position, node in enumerate(nodes)}) + 1])


@dataclass(frozen=True)
class Frees:
    """What an executor does beside calling the nodes, by the rules of this module. after: {node: [nodes whose values are no longer
    needed once it has run]}; writes: {node: [numbers of the outputs to write into their inputs then]}; into: {node: the node whose
    memory it computes into, by `compat.into`: an input where that makes a write of its own superfluous}.
    """

    after: Dict[torch.fx.Node, List[torch.fx.Node]]
    writes: Dict[torch.fx.Node, List[int]]
    into: Dict[torch.fx.Node, torch.fx.Node]


def frees(step):
    """Frees of a step in the order that its graph has."""
    lifetimes = Lifetimes(step)
    outputs = {node: number for number, node in enumerate(step.results)}
    written = {node for node, value in zip(step.results, step.outputs) if value.role in WRITTEN}
    into = {lifetimes.storages[place].holders[0]: argument for place, (argument, _) in lifetimes.reuses().items()}
    after, writes = {}, {}
    inputs = [node for node, value in zip(step.placeholders, step.inputs) if value.role == DRAW]
    for node in inputs + lifetimes.nodes:
        last = [lifetimes.number[user] for user in node.users if user in lifetimes.number]
        last += [lifetimes.number[node]] if node in lifetimes.number else []
        if node in written:
            at = max(last[-1:] + lifetimes.writes[node])
            last.append(at)
            if into.get(node, node).op != "placeholder":
                writes.setdefault(lifetimes.nodes[at], []).append(outputs[node])
        if (node not in outputs or node in written) and last:
            after.setdefault(lifetimes.nodes[max(last)], []).append(node)
    return Frees(after, writes, into)
