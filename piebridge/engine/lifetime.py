"""How long each piece of a step's memory is needed: from the node that makes it to the last one that reads it.

Memory is counted by storage, so that views cost nothing. The rules are those of an executor that runs the nodes in order:
a value is held until its last reader has run; losses and outputs are held to the end; the new value of a parameter, state or
buffer is written into the old tensor at once, or, where the old value has readers left, after the last of them; a random draw is
made for its first reader. Parameters, states, buffers and the batch are the caller's and are not counted here.
"""

from dataclasses import dataclass, field
from typing import List

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
        self.storages = [self._storage(nodes, size, draws, kept) for nodes, size in holders.values()
                         if nodes[0].op == "call_function" or nodes[0] in draws and nodes[0].users]

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

    def live_bytes(self, order=None):
        """Bytes that are allocated while the node at each position runs."""
        changes = [0] * (len(self.nodes) + 1)
        for storage, (first, last) in zip(self.storages, self.spans(order)):
            changes[first] += storage.bytes
            changes[last + 1] -= storage.bytes
        live, sums = 0, []
        for change in changes[:-1]:
            live += change
            sums.append(live)
        return sums

    def peak(self, order=None):
        """(bytes, position) of the first highest point."""
        live = self.live_bytes(order) or [0]
        peak = max(live)
        return peak, live.index(peak)


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
    return Lifetimes(step).peak()[0]


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


def release_after(step):
    """{node: [nodes whose values are no longer needed once it has run]}, and {node: [numbers of the outputs to write then]}.

    For executors: they follow the rules of this module.
    """
    lifetimes = Lifetimes(step)
    outputs = {node: number for number, node in enumerate(step.results)}
    written = {node for node, value in zip(step.results, step.outputs) if value.role in WRITTEN}
    releases, writes = {}, {}
    inputs = [node for node, value in zip(step.placeholders, step.inputs) if value.role == DRAW]
    for node in inputs + lifetimes.nodes:
        readers = [lifetimes.number[user] for user in node.users if user in lifetimes.number]
        own = [lifetimes.number[node]] if node in lifetimes.number else []
        if node in written:
            at = max(own + lifetimes.writes[node])
            writes.setdefault(lifetimes.nodes[at], []).append(outputs[node])
            readers.append(at)
        if (node not in outputs or node in written) and readers + own:
            releases.setdefault(lifetimes.nodes[max(readers + own)], []).append(node)
    return releases, writes
