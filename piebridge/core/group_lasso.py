"""Group lasso over the channels of a network: what it is, its gradient, and which channels it has emptied."""

import torch

EPSILON = 1e-8  # added under the root, as in the authors' program: smooth where a group is zero


class GroupLasso:
    """The sum over all weights, and over each one's output and its input channels, of the norm of the channel's part of the weight.

    PruneTrain (Lym et al., 2019), equation 2, with one coefficient for all groups, which it is to be multiplied with. Left out are
    depthwise weights, the images' channels and the logits, as there; and what cannot be removed (see core/channel_groups.py).

    network: GraphNetwork; its parameters are looked up now. groups: {name: tuple of Slices}.
    """

    def __init__(self, network, groups):
        parameters = dict(network.named_parameters())
        self._groups = {name: [(parameters[each.key], each.shape) for each in slices] for name, slices in groups.items()}

    @torch.no_grad()
    def value(self):
        return sum(float(_norms(weight.reshape(shape)).sum()) for slices in self._groups.values() for weight, shape in slices)

    @torch.no_grad()
    def add_gradient(self, strength):
        """Add `strength` times the gradient to the `.grad` of each weight that has one: weight / norm, for each of its groups."""
        for slices in self._groups.values():
            for weight, shape in slices:
                if weight.grad is not None:
                    parts = weight.reshape(shape)  # a copy where the weight lies otherwise in memory, as ported ones do
                    weight.grad.add_((parts / _norms(parts)).reshape(weight.shape), alpha=strength)

    @torch.no_grad()
    def dense(self, threshold):
        """{group: int64 tensor of the channels to keep}, of the groups that have others.

        A channel can go when no number of any weight that writes or reads it is as large as `threshold`: what one layer still uses
        stays in all (the paper's channel union). The largest channel of a group stays in any case.
        """
        kept = {}
        for name, slices in self._groups.items():
            largest = torch.stack([weight.reshape(shape).abs().amax((0, 2)) for weight, shape in slices]).amax(0)
            is_dense = largest >= min(threshold, float(largest.max()))
            if not bool(is_dense.all()):
                kept[name] = torch.nonzero(is_dense).flatten().cpu()
        return kept


def _norms(weight):
    """Norms along the middle of a weight [before, size, after]: [1, size, 1]."""
    return (weight * weight).sum((0, 2), keepdim=True).add_(EPSILON).sqrt_()
