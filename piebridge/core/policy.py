"""The policy on the device: a tiny network looks at a small image and names the level that is to serve it (PieBridge, difficulty)."""

import numpy as np
import torch
import torch.nn.functional as F

from piebridge.core.errors import UserError


class PolicyRouter:
    """Gives each image the level of the largest output of a policy network; no noise, so the same image has the same level always.

    network: a GraphNetwork with a square input and one output per level, the original's first, the cheapest proxy's last.
    level_count: the levels that there are, the original included. UserError where the policy was trained for another number.
    segment: images [N, 3, S, S] -> the policy's features, from core/backends; None: the network itself.
    """

    def __init__(self, network, level_count, segment=None):
        description = network.description
        height, width = description["input_size"][-2:]
        if height != width:
            raise UserError(f"policy {description['name']}: its input of {height} x {width} pixels is not square; train it anew")
        if network.head.out_features != level_count:
            raise UserError(f"policy {description['name']}: it tells {network.head.out_features} levels apart, and there are "
                            f"{level_count} (the original and {level_count - 1} proxies); train it for this set")
        self.network, self.size = network.eval(), height
        self._segment = segment or network.features

    def __call__(self, images, indices=None):
        """Images float32 [N, 3, H, W], normalised as the policy's description says -> levels int64 [N], on the CPU.

        Images larger than `size` are averaged down to it; best is a loader at `size`, which is what the training saw. Which samples
        they are (`indices`) changes nothing.
        """
        return self.logits(images).argmax(dim=1).cpu().numpy().astype(np.int64)

    def logits(self, images):
        """Images as above -> what the policy says of each level, float [N, L]."""
        if tuple(images.shape[-2:]) != (self.size, self.size):
            images = F.adaptive_avg_pool2d(images, self.size)
        with torch.no_grad():
            logits = self.network.head(self._segment(images))
        if not bool(torch.isfinite(logits).all()):
            raise UserError(f"policy {self.network.description['name']}: gives values that are not finite; is its file whole?")
        return logits
