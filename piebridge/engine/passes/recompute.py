"""Compute again what is cheap to compute and large to keep, right before the backward pass needs it (Chen et al., 2016).

Only elementwise operators, normalisations, copies and views are computed again, from values that are kept anyway, and only where
the plan's peak falls: the same kernels on the same values give the same bits.
"""

import operator

from torch import fx

from piebridge.engine import compat
from piebridge.engine.lifetime import Lifetimes, tensors_of
from piebridge.engine.passes.edit import insert

CHEAP = frozenset("""
    abs add bitwise_and bitwise_not bitwise_or bitwise_xor cat clamp clamp_max clamp_min clone constant_pad_nd copy cos div elu eq erf exp
    expand full full_like ge gelu gt hardsigmoid hardswish hardtanh index_select le leaky_relu log log1p logical_and logical_not
    logical_or lt maximum minimum mul native_layer_norm ne neg permute pow reciprocal relu remainder rsqrt rsub scalar_tensor select
    sigmoid sign silu sin slice slice_copy softplus split_with_sizes sqrt squeeze sub t tanh transpose unsqueeze var_mean view where
    _softmax _to_copy _unsafe_view embedding reshape
""".split())
LONGEST_CHAIN = 24  # nodes that one value may cost
LEAST_GAIN = 0.001  # of the peak


def run(step, cheap=CHEAP):
    """How many nodes were added. cheap: names of the ATen operators that may run again."""
    added, refused = 0, set()
    while True:
        taken = _one_round(step, cheap, refused)
        if not taken:
            return added
        added += taken


def _one_round(step, cheap, refused):
    """Recompute what lies across the peak, root by root, as long as that lowers it; the number of nodes that it took.

    A root is a value that is kept anyway, or one that is cheaper to keep than the values that it gives: of a batch norm's input, the
    normalised value and the activation, only the input need stay.
    """
    lifetimes, added = Lifetimes(step), 0
    peak, at = lifetimes.peak()
    across = _across(lifetimes, at)
    for root, storages in _candidates(step, lifetimes, peak, at, cheap):
        if root in refused:
            continue
        holders = {holder for storage in storages for holder in storage.holders}
        changes = [_Change(step, lifetimes, storage, at, across - holders, cheap) for storage in storages]
        if any(change.chain is None for change in changes):
            continue
        for change in changes:
            change.make()
        lower = Lifetimes(step).peak_bytes()
        if lower > peak * (1 - LEAST_GAIN):
            for change in reversed(changes):
                change.undo()
            if added:
                break  # the peak is elsewhere by now
            refused.add(root)
        else:
            added += sum(len(change.copies) for change in changes)
            peak, across = lower, across - holders
    return added


def _candidates(step, lifetimes, peak, at, cheap):
    """[(root, storages that can be made from it and from what is kept)], the largest saving first."""
    across, least = _across(lifetimes, at), LEAST_GAIN * peak
    groups, saved = {}, {}
    for storage, (first, last) in zip(lifetimes.storages, lifetimes.spans()):
        if not first < at < last or storage.is_kept or storage.bytes <= least or storage.holders[0].op == "placeholder":
            continue
        change = _Change(step, lifetimes, storage, at, across - set(storage.holders), cheap)
        if change.chain is None or not change.replaced:
            continue
        missing = {lifetimes.places.get(compat.storage_key(tensor)) for node in change.missing for tensor in tensors_of(node.meta["val"])}
        missing = {place for place in missing if place is not None and lifetimes.storages[place].bytes > least}
        if len(missing) > 1:
            continue
        root = lifetimes.storages[missing.pop()] if missing else None
        key = root.holders[0] if root else storage.holders[0]
        groups.setdefault(key, []).append(storage)
        saved[key] = saved.get(key, -root.bytes if root else 0) + storage.bytes
    return [(key, groups[key]) for key in sorted(groups, key=lambda key: -saved[key]) if saved[key] > least]


def _across(lifetimes, at):
    """The nodes whose values are there when the node at this position runs, and after it."""
    return {holder for storage, (first, last) in zip(lifetimes.storages, lifetimes.spans()) if first <= at < last
            for holder in storage.holders}


class _Change:
    """The readers after position `at` of what lies in `storage` get copies of it, computed before the first of them.

    chain: the nodes to compute again, in order; None where there are too many. missing: what they read that is not in `kept`.
    """

    def __init__(self, step, lifetimes, storage, at, kept, cheap):
        self.step, self.kept, self.cheap, self.copies, self.missing = step, kept, cheap, {}, set()
        late = {holder for holder in storage.holders if lifetimes.number.get(holder, -1) > at}
        early = [holder for holder in storage.holders if holder not in late]
        self.replaced = [(user, holder) for holder in early for user in holder.users if lifetimes.number.get(user, -1) > at]
        self.first = min((user for user, _ in self.replaced), key=lifetimes.number.get, default=None)
        self.chain = self._chain(lifetimes)

    def _chain(self, lifetimes):
        chain, pending = set(), [holder for _, holder in self.replaced]
        while pending:
            node = pending.pop()
            if node in chain or node in self.kept or node.op in ("placeholder", "get_attr"):
                continue
            if not self._is_cheap(node):
                self.missing.add(node)
                continue
            chain.add(node)
            if len(chain) > LONGEST_CHAIN:
                return None
            pending.extend(node.all_input_nodes)
        if any(holder not in chain for _, holder in self.replaced):
            return None
        return sorted(chain, key=lifetimes.number.get)

    def _is_cheap(self, node):
        if node.target is operator.getitem:
            return True
        schema = getattr(node.target, "_schema", None)
        return schema is not None and schema.name.partition("::")[2] in self.cheap

    def make(self):
        with self.step.graph.inserting_before(self.first):
            for node in self.chain:
                arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda argument: self.copies.get(argument, argument))
                self.copies[node] = insert(self.step, node.target, *arguments, **keywords)
        for user, holder in self.replaced:
            user.replace_input_with(holder, self.copies[holder])

    def undo(self):
        for user, holder in self.replaced:
            user.replace_input_with(self.copies[holder], holder)
        for node in reversed(self.chain):
            self.step.graph.erase_node(self.copies[node])
