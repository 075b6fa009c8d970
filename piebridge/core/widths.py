"""Trainable tensors across pruned widths: sliced into a proxy to be trained there, and scattered back into the original.

Biases, norm weights and LoRA factors belong to channels. A proxy that keeps some of the channels trains the part of these tensors
that belongs to them; what it learns goes back to exactly those channels, and the others stay as they were (LoRAM, arXiv
2502.13533, does so for LoRA).
"""

import torch

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.core.slices import cut, scatter


def lora_cuts(cuts, factors):
    """Cuts of LoRA factors that follow from the cuts of the weights they add to.

    cuts: of the proxy. factors: {key of a weight [out, in, ...]: (key of A [r, in, ...], key of B [out, r, ...])}, where the layer
    computes (W + B A) x: a Linear or a 1x1 convolution. A is cut as the weight's inputs are, B as its outputs; the rank r is whole.
    """
    found = {}
    for weight, (down, up) in factors.items():
        slices = dict(cuts.get(weight, ()))
        if not set(slices) <= {0, 1}:
            raise UserError(f"LoRA of {weight!r}: cut along axis {max(slices)}, and only its outputs and inputs have factors")
        found.update({key: [(axis, slices[axis])] for key, axis in ((down, 1), (up, 0)) if axis in slices})
    return found


def narrow(tensors, cuts):
    """{key: the part that a proxy with these cuts has}, copied, for the trainable tensors {key: tensor} of the original."""
    return {key: cut(tensor.detach(), cuts.get(key, [])).clone() for key, tensor in tensors.items()}


def widen(tensors, parts, cuts):
    """Write what a proxy trained back into the original's tensors, in place.

    tensors: {key: tensor} of the original; parts: {key: tensor} of the proxy, of some of these keys. What is kept of a tensor
    takes the part's values, exactly; the rest keeps its bits. UserError for a key or a shape that does not fit; then nothing is
    written.
    """
    wholes = {}
    for key, part in parts.items():
        if key not in tensors:
            raise UserError(f"trained tensor {key!r} is none of the original's{closest(key, list(tensors))}")
        whole, slices = tensors[key].detach(), cuts.get(key, [])
        wanted = cut(whole, slices).shape
        if part.shape != wanted:
            raise UserError(f"trained tensor {key!r} has shape {list(part.shape)} where the original's part has {list(wanted)}")
        wholes[key] = scatter(part.detach().to(whole.device, whole.dtype), slices, whole)
    with torch.no_grad():
        for key, whole in wholes.items():
            tensors[key].copy_(whole)
