"""The loss that trains a policy: Gumbel-softmax mask, mixed features, the price of the levels chosen."""

import torch


def temperature(progress, first, last):
    """The Gumbel-softmax temperature when the share `progress` (0..1) of the training is done: first * (last / first)^progress."""
    return first * (last / first) ** progress


def gumbel_mask(logits, heat, generator):
    """Logits [B, L] -> mask [B, L]: one-hot at a level drawn with probability softmax(logits), with the gradient of the relaxed mask.

    Straight-through Gumbel-softmax (Jang et al. 2017): s = softmax((logits + g) / heat) with g = -log(-log u), u uniform; the mask
    is one-hot at the largest s, and d mask / d logits is taken to be d s / d logits.
    """
    noise = -torch.empty_like(logits).exponential_(generator=generator).log()  # -log u is exponentially distributed
    relaxed = torch.softmax((logits + noise) / heat, dim=1)
    one_hot = torch.zeros_like(relaxed).scatter(1, relaxed.argmax(1, keepdim=True), 1.0)
    return relaxed + (one_hot - relaxed).detach()


def policy_loss(mask, features, scores, cost_weight, task):
    """task(mixed features) + cost_weight * mean cost of an image, a scalar.

    mask [B, L], one-hot or relaxed, mixes features [B, L, D] into [B, D]; an image costs the sum over the levels of mask * score,
    scores [L] being relative to the original. (The paper's sum is also divided by the number of levels; here that is part of the
    weight, which so means the same for any number.) task: mixed features [B, D] -> scalar.
    """
    mixed = torch.einsum("bl,bld->bd", mask, features)
    return task(mixed) + cost_weight * (mask * scores).sum(dim=1).mean()
