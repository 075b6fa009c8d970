"""Backends of torch itself: as published, channels last, folded, bfloat16, and traced (for torch before 2)."""

import warnings

import torch

from piebridge.core.backends.folding import fold_batch_norm
from piebridge.core.backends.segment import Segment
from piebridge.core.network import GraphNetwork


def build_eager(network, input_size, batch_size):
    """The network itself, unchanged: contiguous NCHW, float32, one torch call per node."""
    def run(images):
        if network.training:  # batch statistics would make the features depend on the batch
            network.eval()
        return network.features(images)
    return _segment("eager", run, network, input_size, batch_size)


def build_channels_last(network, input_size, batch_size):
    """A copy of the weights in NHWC order, which oneDNN and cuDNN compute faster for small batches of large images."""
    tensors = {key: _channels_last(tensor.detach().clone()) for key, tensor in network.state_dict().items()}
    copy = GraphNetwork(network.description, tensors).eval().requires_grad_(False)
    return _segment("channels_last", lambda images: copy.features(_channels_last(images)), network, input_size, batch_size)


def build_folded(network, input_size, batch_size):
    """channels_last with batch norm folded into the convolutions."""
    copy = fold_batch_norm(network, _channels_last)
    return _segment("folded", lambda images: copy.features(_channels_last(images)), network, input_size, batch_size)


def build_bf16(network, input_size, batch_size):
    """folded under autocast to bfloat16: 8 bits of mantissa, so features differ by about 1 %."""
    copy = fold_batch_norm(network, _channels_last)
    for module in copy.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):  # cast once here, not at each call
            module.to(torch.bfloat16)
    device = next(network.parameters()).device.type

    def run(images):
        with torch.autocast(device, dtype=torch.bfloat16):
            return copy.features(_channels_last(images))
    return _segment("bf16", run, network, input_size, batch_size)


def build_torchscript(network, input_size, batch_size):
    """folded, traced and frozen: saves the interpreter's time on boards with slow cores."""
    copy = fold_batch_norm(network, _channels_last)
    device = next(network.parameters()).device
    example = _channels_last(torch.zeros(batch_size, 3, input_size, input_size, device=device))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch deprecates tracing; it is offered for the older ones
        traced = torch.jit.freeze(torch.jit.trace(_Features(copy).eval(), example, check_trace=False))
    return _segment("torchscript", lambda images: traced(_channels_last(images)), network, input_size, batch_size)


class _Features(torch.nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return self.network.features(images)


def _segment(name, run, network, input_size, batch_size):
    device = next(network.parameters()).device

    def features(images):
        with torch.no_grad():
            return run(images.to(device)).float().cpu()
    return Segment(name, features, input_size, batch_size)


def _channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
