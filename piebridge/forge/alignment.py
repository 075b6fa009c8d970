"""How near a proxy's features are to the original's, tap by tap."""

import numpy as np
import torch

from piebridge.core.errors import UserError
from piebridge.forge.segments import common_taps, device_of


def measure_alignment(original, proxy_network, pairs, bridge=None):
    """{tap: {"cosine", "relative_error"}} of held-out images: for each image cos(f, g) and |f - g| / |g|, then the mean over images.

    f are the proxy's values and g the original's, at the output of each block that both have and at the head's tap, each flattened
    to one vector per image; where the spatial sizes differ, maps [B,C,H,W] are averaged over positions first. pairs: iterable of
    (images at the original's size, images at the proxy's), float [B,3,H,W], normalised; memory is that of one pair. bridge: a
    BridgeMap for the head's tap. UserError where there are no images or values are not finite.
    """
    taps = common_taps(original, proxy_network)
    head = original.description["tap"]
    cosines, errors, count = {tap: 0.0 for _, tap, _ in taps}, {tap: 0.0 for _, tap, _ in taps}, 0
    for images, proxy_images in pairs:
        wanted = _values(original, images, [tap for _, tap, _ in taps])
        found = _values(proxy_network, proxy_images, [tap for _, _, tap in taps])
        for _, tap, proxy_tap in taps:
            f, g = as_vectors(found[proxy_tap], wanted[tap])
            f = _bridged(bridge, f) if bridge is not None and tap == head else f
            cosine, error = cosine_and_error(f.double(), g.double())
            if not (torch.isfinite(cosine).all() and torch.isfinite(error).all()):
                raise UserError(f"network {proxy_network.description['name']}: values at {tap!r} are not finite; are the weights or "
                                "the images broken?")
            cosines[tap] += float(cosine.sum())
            errors[tap] += float(error.sum())
        count += len(images)
    if not count:
        raise UserError(f"network {proxy_network.description['name']}: alignment is measured on images, and there are none")
    return {tap: {"cosine": cosines[tap] / count, "relative_error": errors[tap] / count} for tap in cosines}


def as_vectors(found, wanted):
    """Two values [B, ...] as [B, D]; maps of different size are averaged over positions first."""
    if found.dim() == wanted.dim() == 4 and found.shape[2:] != wanted.shape[2:]:
        found, wanted = found.mean((2, 3)), wanted.mean((2, 3))
    return found.flatten(1), wanted.flatten(1)


def cosine_and_error(f, g):
    """cos(f, g) and |f - g| / |g| of each row, [B] each."""
    norm = g.norm(dim=1).clamp_min(1e-12)
    return (f * g).sum(1) / (f.norm(dim=1).clamp_min(1e-12) * norm), (f - g).norm(dim=1) / norm


def _values(network, images, taps):
    with torch.no_grad():
        return network.values(images.to(device_of(network)), taps)


def _bridged(bridge, features):
    return torch.from_numpy(np.asarray(bridge(features.cpu().numpy()))).to(features.device)
