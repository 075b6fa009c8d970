"""Proxies that a device can make by itself: lower resolution, dropped blocks, int8; statistics redone, bridged in closed form."""

import torch
from torch import nn

from piebridge.core.costs import network_costs
from piebridge.core.errors import UserError
from piebridge.core.proxy_specs import ProxySpec, parse_spec

__all__ = ["CostModel", "ProxySpec", "batch_norm_moments", "blocks_to_drop", "expected_milliseconds", "make_proxy", "match_batch_norm",
           "parse_spec", "redo_batch_norm"]


def make_proxy(network, spec, images):
    """The proxy network of `spec`: shares the original's weights, has batch-norm statistics of its own (still the original's).

    images: float32 [N, 3, S, S] normalised, unlabelled; they show which blocks can go.
    """
    return network.without_blocks(blocks_to_drop(network, spec.dropped, images)).eval()


def blocks_to_drop(network, count, images):
    """Names of the `count` residual blocks that change their input least, by the relative norm of their residual branch.

    images: float32 [N, 3, S, S]. Raises UserError where the network has fewer such blocks.
    """
    if not count:
        return []
    blocks = [block for block in network.description["blocks"] if block["is_residual"]]
    if len(blocks) < count:
        raise UserError(f"network {network.description['name']}: has {len(blocks)} blocks that can be dropped, a proxy asks for {count}")
    names = {name for block in blocks for name in (block["input"], block["output"])}
    with torch.no_grad():
        values = network.values(images, names)
    changes = {block["name"]: float((values[block["output"]] - values[block["input"]]).norm() / values[block["output"]].norm())
               for block in blocks}
    return sorted(changes, key=changes.get)[:count]


def match_batch_norm(original, proxy, images, proxy_images, channels=None):
    """Redo the proxy's batch-norm statistics so that each layer's output has the mean and deviation that the original's has.

    Both see the same images (float32 [N, 3, S, S], each at its own resolution), in one batch. Statistics taken from these images
    alone would replace those of the pretraining data, which the original keeps: measured, that costs 0.2 of cosine. So only the
    *difference* between the two networks is taken out: with r = deviation of the proxy's layer input over the original's,
    sqrt(var') = r sqrt(var) and mean' = mean of the proxy's input - r (mean of the original's input - mean). Layers are redone in
    order, each on what the layers before it now give. channels: {layer name: positions}, of layers that were cut: which of the
    original's channels the proxy has. Returns the proxy's features of its images, [N, D].
    """
    return redo_batch_norm(proxy, proxy_images, batch_norm_moments(original, images), channels)


def batch_norm_moments(network, images):
    """{batch-norm layer: (mean, variance), [C] each} of each layer's input for a batch float32 [N, 3, S, S]."""
    moments = {}

    def collect(name):
        return lambda layer, inputs: moments.__setitem__(name, _moments(inputs[0]))

    _with_hooks(network, images, collect)
    return moments


def redo_batch_norm(proxy, images, moments, channels=None):
    """`match_batch_norm` with the original's `batch_norm_moments`, which can so serve several proxies."""
    channels = channels or {}

    def redo(name):
        def hook(layer, inputs):
            kept = channels.get(name, slice(None))
            (mean, variance), (original_mean, original_variance) = _moments(inputs[0]), [each[kept] for each in moments[name]]
            ratio = (variance + layer.eps) / (original_variance + layer.eps)
            layer.running_mean.copy_(mean - ratio.sqrt() * (original_mean - layer.running_mean))
            layer.running_var.copy_((layer.running_var + layer.eps) * ratio - layer.eps)
        return hook

    return _with_hooks(proxy, images, redo)


def _with_hooks(network, images, make_hook):
    """Features of one batch, `make_hook(layer's name)` being called before each batch-norm layer."""
    handles = [layer.register_forward_pre_hook(make_hook(name)) for name, layer in network.named_modules()
               if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    try:
        with torch.no_grad():
            return network.features(images)
    finally:
        for handle in handles:
            handle.remove()


def _moments(values):
    """(mean, variance) of each channel, [C]; in one pass, five times as fast as mean() and var()."""
    return torch.batch_norm_update_stats(values, None, None, 0.0)


class CostModel:
    """Cost of a proxy relative to the original before it is made: its MACs, from its pixels and the mean residual block; int8 half."""

    def __init__(self, network):
        self._network = network
        self._native = network.description["input_size"][-1]
        self._block_share = None  # counted when the first proxy with a dropped block asks

    def share(self, spec):
        share = (spec.resolution / self._native) ** 2 * (0.5 if spec.precision == "int8" else 1.0)
        return share * max(0.0, 1 - spec.dropped * self._mean_block()) if spec.dropped else share

    def _mean_block(self):
        if self._block_share is None:
            costs = network_costs(self._network)
            blocks = [costs["blocks"][block["name"]] for block in self._network.description["blocks"] if block["is_residual"]]
            self._block_share = sum(blocks) / len(blocks) / costs["macs"] if blocks else 0.0
        return self._block_share


def expected_milliseconds(costs, shares, original, epochs):
    """Frozen cost of one sample over a run, in ms.

    costs, shares: of each proxy, dearest first: one forward in ms, and the share of samples whose residual it keeps within the
    tolerance. original: one forward of the original. The first pass tries the cheapest level, then dearer ones, until one is
    accepted; in later epochs the level is known.
    """
    first_pass, later, pending = 0.0, 0.0, 1.0
    for cost, share in zip(reversed(costs), reversed(shares)):
        first_pass += pending * cost
        served = max(0.0, share - (1 - pending))  # a cheap level's samples are among those of a dearer one
        later += served * cost
        pending -= served
    return first_pass + pending * original + (epochs - 1) * (later + pending * original)
