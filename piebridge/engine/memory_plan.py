"""The memory of a step before it runs: its peak and where it is, what is kept for the backward pass by layer, an arena."""

from dataclasses import dataclass, replace
from typing import Dict, List, Tuple

import torch

from piebridge.engine.arena import Arena, plan_arena
from piebridge.engine.lifetime import Lifetimes, forward_end, holders_by_storage, tensors_of
from piebridge.engine.step_graph import BATCH, BUFFER, FROZEN, INDEX, STATE, TRAINED, WEIGHTS


@dataclass(frozen=True)
class KeptValue:
    """A value that the backward pass needs of the forward pass. node: its name in the graph; layer: the one that reads it first."""

    node: str
    layer: str
    shape: Tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. peak_bytes: the most that the step allocates at one time, while `peak_node` runs, number `peak_position` of the nodes
    that compute; beside it lie weights_bytes {"frozen", "trained", "buffer"}, state_bytes of the update rule and batch_bytes.
    timeline: [(node, bytes allocated while it runs)]. forward_end: position of the last node of the forward pass. kept: what is
    live then and used later, largest first. arena: offsets in the order of `values`, the nodes that make what lies there.
    """

    peak_bytes: int
    peak_node: str
    peak_position: int
    weights_bytes: Dict[str, int]
    state_bytes: int
    batch_bytes: int
    timeline: List[Tuple[str, int]]
    forward_end: int
    kept: List[KeptValue]
    values: List[str]
    arena: Arena

    @property
    def arena_bytes(self):
        return self.arena.bytes

    @property
    def kept_bytes(self):
        return sum(value.bytes for value in self.kept)

    @property
    def total_bytes(self):
        """Everything together, the program and the libraries apart."""
        return self.peak_bytes + sum(self.weights_bytes.values()) + self.state_bytes + self.batch_bytes

    def kept_by_layer(self):
        """{layer: bytes kept for the backward pass}, in the order of the forward pass."""
        order = {name: position for position, (name, _) in enumerate(self.timeline)}
        sums = {}
        for value in sorted(self.kept, key=lambda value: order.get(value.node, -1)):
            sums[value.layer] = sums.get(value.layer, 0) + value.bytes
        return sums


def plan_memory(step):
    """MemoryPlan of a StepGraph whose values are propagated (see propagate.py)."""
    lifetimes = Lifetimes(step)
    live, spans, reuses = lifetimes.live_bytes(), lifetimes.spans(), lifetimes.reuses()
    peak, position = lifetimes.peak()
    last = forward_end(step, lifetimes.number)
    return MemoryPlan(
        peak_bytes=peak,
        peak_node=lifetimes.nodes[position].name if lifetimes.nodes else "",
        peak_position=position,
        weights_bytes={"frozen": _input_bytes(step, FROZEN), "trained": _input_bytes(step, TRAINED),
                       "buffer": _input_bytes(step, BUFFER) + _constant_bytes(step)},
        state_bytes=_input_bytes(step, STATE),
        batch_bytes=_input_bytes(step, BATCH, WEIGHTS, INDEX),
        timeline=[(node.name, size) for node, size in zip(lifetimes.nodes, live)],
        forward_end=last,
        kept=_kept(step, lifetimes, spans, reuses, last),
        **_arena(lifetimes, spans, reuses),
    )


def _arena(lifetimes, spans, reuses):
    """What computes into another value's memory lies where that one lies; what is computed into an input is not in the arena."""
    roots, merged = {}, {}
    for place in sorted(range(len(spans)), key=lambda place: spans[place][0]):
        _, given = reuses.get(place, (None, place))
        if given is not None:
            roots[place] = root = roots.get(given, place)
            first, last = merged.get(root, spans[place])
            merged[root] = min(first, spans[place][0]), max(last, spans[place][1])
    arena = plan_arena([lifetimes.storages[root].bytes for root in merged], list(merged.values()))
    offsets = dict(zip(merged, arena.offsets))
    return {"values": [lifetimes.storages[place].holders[0].name for place in roots],
            "arena": replace(arena, offsets=tuple(offsets[root] for root in roots.values()))}


def _input_bytes(step, *roles):
    return sum(value.bytes for _, value in step.inputs_of(*roles))


def _constant_bytes(step):
    names = {node.target for node in step.graph.nodes if node.op == "get_attr"}
    return sum(getattr(step.graph_module, name).untyped_storage().nbytes() for name in names)


def _kept(step, lifetimes, spans, reuses, boundary):
    layers = _Layers(step)
    kept = []
    for place, (storage, (first, last)) in enumerate(zip(lifetimes.storages, spans)):
        is_in_place = reuses.get(place, (None, place))[1] is None
        if first <= boundary < last and not storage.is_kept and not is_in_place:
            holder = next((each for each in storage.holders if isinstance(each.meta["val"], torch.Tensor)), storage.holders[0])
            value = tensors_of(holder.meta["val"])[0]
            dtype = str(value.dtype).rpartition(".")[2]
            kept.append(KeptValue(holder.name, layers.of(storage.holders), tuple(value.shape), dtype, storage.bytes))
    return sorted(kept, key=lambda value: -value.bytes)


class _Layers:
    """Names values by the parameters they meet: the graph itself no longer knows modules."""

    def __init__(self, step):
        keys = {node: value.name for node, value in zip(step.placeholders, step.inputs) if value.role in (TRAINED, FROZEN)}
        self.keys = {}
        for holders, _ in holders_by_storage(step).values():
            if holders[0] in keys:
                self.keys.update(dict.fromkeys(holders, keys[holders[0]]))

    def of(self, holders):
        """The layer of the next parameter downstream, else upstream, else ""."""
        return self._nearest(holders, lambda node: node.users) or self._nearest(holders, lambda node: node.all_input_nodes) or ""

    def _nearest(self, start, neighbours):
        seen, level = set(start), list(start)
        while level:
            following = []
            for node in level:
                for each in neighbours(node):
                    key = next((self.keys[other] for other in each.all_input_nodes if other in self.keys), None)
                    if key is not None and each not in self.keys:
                        return key.rpartition(".")[0]
                    if each not in seen:
                        seen.add(each)
                        following.append(each)
            level = following
        return None
