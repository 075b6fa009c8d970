"""Which residual blocks to drop: those of whose absence the least is left after a recovery.

PRACTISE (arXiv 2202.07861, section 3) drops the blocks that are the easiest to recover by feature mimicking, and not those
that change their input least: a block that scales its input changes it much, and the layers behind it can make up for all of it. The
recovery there is trained; here it is the closed form that a forge-made proxy gets in any case, a second per block.
"""

import logging
from collections import namedtuple

import torch

from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.costs import network_costs
from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.core.progress_bar import progress_bar
from piebridge.core.proxies import batch_norm_moments, redo_batch_norm

LOG = logging.getLogger(__name__)
LEAST_IMAGES = 8

# block: dropped after those before it in the order; residual: relative error at the head's tap with all of them dropped (root mean
# square over the images, each left out of the fit); saved: what its dropping saves, in the unit of the caller's savings
Drop = namedtuple("Drop", "block residual saved")
Recovery = namedtuple("Recovery", "network bridge residuals")


def drop_order(network, images, most, savings=None):
    """The residual blocks to drop, one after the other, as a list of `most` Drops: a proxy without k blocks lacks the first k.

    Each is the block whose absence, after the recovery, adds least to the squared residual for what it saves.

    images: float32 [N, 3, S, S] normalised, unlabelled, at the original's size. savings: {block: MACs, ms, ...}, all above 0; None:
    MACs. UserError: fewer than `most` blocks that can be dropped, fewer than LEAST_IMAGES images, features that are not finite.
    """
    savings = _savings(network, most, savings)
    recovery = _Recovery(network, images)
    drops, before = [], 0.0
    trials = sum(len(savings) - number for number in range(most))
    with progress_bar(total=trials, desc="dropping blocks", unit="trial") as bar:
        for _ in range(most):
            names = [drop.block for drop in drops]
            left = {}
            for block in savings:
                if block not in names:
                    left[block] = float((recovery(names + [block]).residuals ** 2).mean())
                    bar.update()
            best = min(left, key=lambda block: (max(left[block] - before, 0.0) / savings[block], left[block]))
            LOG.debug("after %s: %s", names, left)
            drops.append(Drop(best, left[best] ** 0.5, savings[best]))
            before = left[best]
    return drops


def recover(network, blocks, images):
    """The proxy without the named residual blocks, recovered in closed form: Recovery(network, bridge, residuals [N]).

    Batch-norm statistics are redone relative to the original's (`core.proxies.match_batch_norm`), then a ridge map is fitted at the
    head's tap (`core.bridge_map`). residuals: relative errors of the images, each left out of the map's fit. Parameters are
    the original's own. UserError as in `drop_order`.
    """
    return _Recovery(network, images)(blocks)


class _Recovery:
    """Recovers one choice of blocks after the other; what the original gives is computed once."""

    def __init__(self, network, images):
        name = network.description["name"]
        if len(images) < LEAST_IMAGES:
            raise UserError(f"network {name}: {len(images)} images show too little of what a block does; give {LEAST_IMAGES} or more")
        self.network = network
        self.images = images.contiguous(memory_format=torch.channels_last)  # twice as fast on a processor
        self.moments = batch_norm_moments(network, self.images)
        with torch.no_grad():
            self.features = network.features(self.images).cpu().numpy()
        if not torch.isfinite(torch.from_numpy(self.features)).all():
            raise UserError(f"network {name}: features that are not finite; are the weights or the images broken?")

    def __call__(self, blocks):
        proxy = self.network.without_blocks(blocks).eval()
        features = redo_batch_norm(proxy, self.images, self.moments).cpu().numpy()
        if not torch.isfinite(torch.from_numpy(features)).all():
            raise UserError(f"network {self.network.description['name']}: without {', '.join(blocks)} its features are not finite")
        bridge, residuals = fit_bridge_map(features, self.features)
        return Recovery(proxy, bridge, residuals)


def _savings(network, most, savings):
    """{block that can be dropped: what that saves}."""
    name = network.description["name"]
    blocks = [block["name"] for block in network.description["blocks"] if block["is_residual"]]
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise UserError(f"network {name}: most={most!r} blocks to drop: give a whole number of at least 1")
    if len(blocks) < most:
        raise UserError(f"network {name}: has {len(blocks)} blocks that can be dropped, {most} are asked for")
    savings = network_costs(network)["blocks"] if savings is None else savings
    for block in blocks:
        if block not in savings:
            raise UserError(f"network {name}: savings lack block {block!r}{closest(block, list(savings))}")
        if not 0 < savings[block] < float("inf"):
            raise UserError(f"network {name}: savings[{block!r}]={savings[block]!r}: give a number above 0")
    return {block: savings[block] for block in blocks}
