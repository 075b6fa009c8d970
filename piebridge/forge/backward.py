"""Forward and backward through a frozen network, as it is timed: what a trainable block in front of it would cost."""

import torch

from piebridge.core.backends.folding import fold_batch_norm
from piebridge.core.device import synchronizer
from piebridge.core.network import GraphNetwork

DIFFERENTIABLE = ("eager", "channels_last", "folded", "bf16")  # the backends with a backward, which is torch's


def forward_and_backward(network, backend, tap, images):
    """A function that computes the features of `images` [N,3,S,S] and returns the gradient of their sum at the node `tap`.

    Nothing before `tap` gets a gradient, and no parameter does. The network is not touched: the function computes on a frozen
    copy, prepared as the named backend (one of DIFFERENTIABLE) does it. It returns when the device is done.
    """
    copy = _frozen_copy(network, backend)
    _keep_inputs_of_readers(copy, tap)
    device = next(network.parameters()).device
    wait, head_tap = synchronizer(device), copy.description["tap"]
    memory_format = torch.contiguous_format if backend == "eager" else torch.channels_last

    def run():
        values = {}

        def note(name, value):
            if name == tap:
                value.requires_grad_(True)  # a leaf, since nothing before it needs a gradient
            if name in (tap, head_tap):
                values[name] = value

        with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, enabled=backend == "bf16"):
            copy.observe(images.to(device).contiguous(memory_format=memory_format), note)
        gradient, = torch.autograd.grad(values[head_tap], values[tap], torch.ones_like(values[head_tap]))
        wait()
        return gradient
    return run


def _frozen_copy(network, backend):
    convert = torch.Tensor.contiguous if backend == "eager" else _channels_last
    if backend in ("folded", "bf16"):
        copy = fold_batch_norm(network, convert)
    else:
        copy = GraphNetwork(network.description, {key: convert(tensor.detach()) for key, tensor in network.state_dict().items()})
    if backend == "bf16":
        for module in copy.modules():
            if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):  # cast once here, not at each call
                module.to(torch.bfloat16)
    return copy.eval().requires_grad_(False)


def _keep_inputs_of_readers(network, tap):
    """Let no reader of `tap` overwrite it: torch refuses that for a value of which a gradient is asked."""
    for node in network.description["nodes"]:
        if tap in node["inputs"] and node["arguments"].get("inplace"):
            network.get_submodule(node["module"]).inplace = False


def _channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
