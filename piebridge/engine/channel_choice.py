"""Which channels of a weight are trained, where not all are: the first, those of the largest weights, or those with the most to gain."""

import math

import torch

from piebridge.core.errors import UserError

FIRST, MAGNITUDE, MAGNITUDE_L1, FISHER = CHOICES = ("first", "magnitude", "magnitude_l1", "fisher")
MULTIPLE = 8  # channels that vector units and layouts take at a time
SLACK = 1 / 8  # what rounding up to a multiple may add


def channel_count(channels, ratio):
    """How many of `channels` a ratio in (0, 1] means: rounded up, and on to a multiple of 8 where that adds an eighth at most."""
    count = max(1, math.ceil(channels * ratio))
    rounded = -(-count // MULTIPLE) * MULTIPLE
    return rounded if rounded <= min(channels, count * (1 + SLACK)) else count


def chosen(count, scores):
    """int64 [count], ascending: the places of the largest of `scores` (float [n]); of equal ones the first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return torch.sort(order[:count]).values


def unit_scores(importance, dim, units):
    """importance, of a weight's shape -> float [units]: its sum over each unit of channels along `dim`; a unit is a channel or a group."""
    per_channel = importance.transpose(0, dim).flatten(1).sum(1) if importance.dim() > 1 else importance
    return per_channel.view(units, -1).sum(1)


def channels_of_units(units, size):
    """Places of units of `size` neighbouring channels -> int64 [units * size], the channels' places."""
    return (units[:, None] * size + torch.arange(size, device=units.device)).flatten()


def importance_of(choice, key, weight, scores=None):
    """What `choice` (one of CHOICES) sums up to a channel's score, of the weight's shape: its squares (so channels order as by their L2
    norm), its magnitudes (L1), Fisher information from `scores` ({key: tensor}), or None for the first channels.

    UserError where `scores` lack the key.
    """
    if choice == FIRST:
        return None
    if choice == FISHER:
        if key not in (scores or {}):
            raise UserError(f"scheme: channels=fisher: no scores for {key}; give scores=fisher_information(module, loss, batches), or use "
                        "channels=magnitude")
        return scores[key].to(weight.device)
    weight = weight.detach().float()
    return weight.abs() if choice == MAGNITUDE_L1 else weight * weight


def fisher_information(module, loss, batches, keys=None):
    """{key: tensor of the weight's shape}: the sum over batches of the squared gradient of the batch's mean loss.

    Summed over a channel's slice: what a small gradient step on that slice gains, per unit of learning rate. With one sample in a batch
    it is Fisher information proper. batches: iterable of (inputs, targets), each a tensor or a tuple of tensors. loss: (outputs,
    *targets) -> [B]. keys: of parameters, by default all of two or more dimensions. The module's mode, gradients and flags are left as
    they were. UserError where there are no batches.
    """
    return _summed(module, loss, batches, keys, lambda key, weight, gradient: gradient.square())


def channel_information(module, loss, batches, dims):
    """{key: float [channels]}, TinyTrain's measure (Kwon et al., ICML'24, eq. 2), for the channels along dimension dims[key] of a weight.

    Half the sum over samples of the squared sum of activation times gradient of a channel; for a whole channel that sum equals the
    weight's times its own gradient. batches: as above, of one sample each.
    """
    def measure(key, weight, gradient):
        return unit_scores(weight * gradient, dims[key], weight.shape[dims[key]]).square() / 2
    return _summed(module, loss, batches, list(dims), measure)


def _summed(module, loss, batches, keys, measure):
    everything = dict(module.named_parameters())
    wanted = {key: parameter for key, parameter in everything.items() if (parameter.dim() > 1 if keys is None else key in keys)}
    flags = {key: parameter.requires_grad for key, parameter in everything.items()}
    totals = {}
    try:
        for key, parameter in everything.items():
            parameter.requires_grad_(key in wanted)
        for inputs, targets in batches:
            inputs, targets = [value if isinstance(value, tuple) else (value,) for value in (inputs, targets)]
            with torch.enable_grad():
                mean = loss(module(*inputs), *targets).mean()
                gradients = torch.autograd.grad(mean, list(wanted.values()), allow_unused=True)
            for (key, weight), gradient in zip(wanted.items(), gradients):
                if gradient is not None:
                    totals[key] = totals.get(key, 0) + measure(key, weight.detach(), gradient)
    finally:
        for key, parameter in everything.items():
            parameter.requires_grad_(flags[key])
    if not totals:
        raise UserError("fisher information: no batches, or none of the wanted parameters has a part in the loss")
    return totals
