"""Compute again what is cheap to compute and large to keep, right before the backward pass needs it (Chen et al., 2016).

Only elementwise operators, normalisations, copies and views are computed again, from values that are kept anyway, and only where
the plan's peak falls: the same kernels on the same values give the same bits.
"""

import operator

from torch import fx

from piebridge.engine.lifetime import Lifetimes
from piebridge.engine.propagate import insert

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
        lifetimes = Lifetimes(step)
        peak, at = lifetimes.peak()
        gain = _cheapest_change(step, lifetimes, peak, at, cheap, refused)
        if not gain:
            return added
        added += gain


def _cheapest_change(step, lifetimes, peak, at, cheap, refused):
    """Recompute one value that lies across the peak; the number of nodes that it took, 0 where no value lowers the peak."""
    spans = lifetimes.spans()
    across = {node for storage, (first, last) in zip(lifetimes.storages, spans) if first <= at < last for node in storage.holders}
    candidates = sorted((storage for storage, (first, last) in zip(lifetimes.storages, spans) if first < at < last
                         and not storage.is_kept and storage.bytes > LEAST_GAIN * peak), key=lambda storage: -storage.bytes)
    for storage in candidates:
        maker = storage.holders[0]
        if maker in refused or maker.op == "placeholder":
            continue
        change = _Change(step, lifetimes, storage, at, across, cheap)
        if not change.is_possible:
            continue
        change.make()
        if Lifetimes(step).peak()[0] <= peak * (1 - LEAST_GAIN):
            return len(change.copies)
        change.undo()
        refused.add(maker)
    return 0


class _Change:
    """The readers after position `at` of what lies in `storage` get copies of it, computed before the first of them."""

    def __init__(self, step, lifetimes, storage, at, across, cheap):
        self.step, self.cheap, self.copies = step, cheap, {}
        self.replaced = [(user, holder) for holder in storage.holders for user in holder.users
                         if lifetimes.number.get(user, -1) > at and user not in storage.holders]
        late = [holder for holder in storage.holders if lifetimes.number.get(holder, -1) > at]
        self.replaced = [(user, holder) for user, holder in self.replaced if holder not in late]
        self.replaced += [(view, argument) for view in late for argument in view.all_input_nodes
                          if argument in storage.holders and argument not in late]
        self.replaced = list(dict.fromkeys(self.replaced))
        self.first = min((user for user, _ in self.replaced), key=lifetimes.number.get, default=None)
        self.kept = across - set(storage.holders)
        self.chain = self._chain(lifetimes)

    @property
    def is_possible(self):
        return self.first is not None and self.chain is not None

    def _chain(self, lifetimes):
        """The nodes to compute again, in order; None where one of them is not cheap, or its arguments are gone."""
        chain, pending = set(), [holder for _, holder in self.replaced]
        while pending:
            node = pending.pop()
            if node in chain or node in self.kept or node.op in ("placeholder", "get_attr"):
                continue
            chain.add(node)
            if not self._is_cheap(node) or len(chain) > LONGEST_CHAIN:
                return None
            pending.extend(node.all_input_nodes)
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
