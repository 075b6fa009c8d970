"""How much each channel, head and hidden unit matters: first-order Taylor scores, without labels."""

import torch

from piebridge.core.errors import UserError


def taylor_scores(network, structure, batches, seed=0):
    """{group name: float32 tensor [size]}: by how much, squared, the head's input would change per image without index i.

    batches: iterable of normalised images float32 [B,3,H,W]. To first order, leaving out what a tensor w reads of a channel
    changes an output y by the sum of dy/dw * w over the slice that reads it (Molchanov et al. 2019). The output here is the
    head's input, all D features at once: for v, a random sign per feature and image, the expectation of (d<v,y>/dw * w)^2 is
    the sum of the squared changes of the features, so one backward per batch does. A loss between the network's features and
    its own would not do: at the original its gradient is zero.

    UserError when there are no images, or a gradient is not finite. The network is left as it was.
    """
    reading = {key for group in structure.groups.values() for key, _, _ in group.reading}
    parameters = {key: parameter for key, parameter in network.named_parameters() if key in reading}
    if not parameters:
        raise UserError(f"network {network.description['name']}: nothing inside its blocks can be cut; forge it with widths=0")
    generator = torch.Generator().manual_seed(seed)
    scores = {name: torch.zeros(group.size) for name, group in structure.groups.items()}
    was_training, needed_gradient = network.training, {key: each.requires_grad for key, each in parameters.items()}
    images_seen = 0
    try:
        network.eval()
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        for images in batches:
            effects = _effects(network, structure, parameters, images, generator)
            for name, effect in effects.items():
                scores[name] += effect.square().cpu()
            images_seen += len(images)
    finally:
        network.train(was_training)
        for key, parameter in parameters.items():
            parameter.requires_grad_(needed_gradient[key])
    if not images_seen:
        raise UserError(f"network {network.description['name']}: scores need images, and there are none")
    return {name: score / images_seen for name, score in scores.items()}


def _effects(network, structure, parameters, images, generator):
    """{group: [size]}: to first order, what each index adds to <v, features>, summed over a batch."""
    with torch.enable_grad():
        features = network.features(images.to(next(iter(parameters.values())).device))
        signs = torch.randint(0, 2, features.shape, generator=generator).mul(2).sub(1)
        gradients = torch.autograd.grad((features * signs.to(features)).sum(), list(parameters.values()))
    products = {key: gradient * parameter.detach() for (key, parameter), gradient in zip(parameters.items(), gradients)}
    effects = {}
    for name, group in structure.groups.items():
        effects[name] = sum(_sum_by_index(products[key], number, structure.tensors[key, number], place)
                            for key, number, place in group.reading)
        if not torch.isfinite(effects[name]).all():
            raise UserError(f"network {network.description['name']}: the gradient of group {name!r} is not finite; are the "
                            "weights or the images broken?")
    return effects


def _sum_by_index(product, number, axis, place):
    """Sum of a tensor over all but factor `place` of its axis `number`: [size of the factor]."""
    along = product.transpose(0, number).flatten(1).sum(1)
    factors = along.reshape([factor.size for factor in axis])
    return factors.transpose(0, place).flatten(1).sum(1) if factors.dim() > 1 else factors
