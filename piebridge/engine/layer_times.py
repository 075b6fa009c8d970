"""How long each layer's share of a training step takes on this device: measured once, then added up for any scheme."""

import copy
import time
from dataclasses import asdict, dataclass
from typing import Dict

import torch

from piebridge.core.backends import device_profile
from piebridge.core.costs import eval_mode
from piebridge.core.device import describe_device, synchronizer
from piebridge.core.files import sha256_of_json
from piebridge.engine.layer import TRUNK


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds for one batch. forward: of the whole network. propagate: {layer path: of the gradient of its input}, own: {layer path:
    of the gradient of its whole weight}, of the convolutions and linear layers.
    """

    forward: float
    propagate: Dict[str, float]
    own: Dict[str, float]

    def milliseconds(self, layers, parts):
        """Of a step that trains `parts` ({state dict key: Part}): the forward, the error's way down to the earliest trained tensor, and
        each trained weight's gradient, by its trained share.

        layers: [Layer] of the network, in order of execution (see layers.py).
        """
        places = [place for place, layer in enumerate(layers) if layer.weight in parts or layer.bias in parts]
        if not places:
            return self.forward
        passed = sum(self.propagate.get(layer.path, 0.0) for layer in layers[places[0] + 1:])
        own = 0.0
        for layer in layers:
            if layer.weight in parts and layer.path in self.own:
                part = parts[layer.weight]
                own += self.own[layer.path] * (1.0 if part.is_whole else part.index.numel() / layer.shape[part.dim])
        return self.forward + passed + own


def layer_times_of(module, layers, batch, loss):
    """`measure_layer_times`, or what it gave before on this device for the same layers, shapes and versions (see device_profile)."""
    inputs, _ = batch
    shapes = [list(tensor.shape) for tensor in (inputs if isinstance(inputs, tuple) else (inputs,))]
    device = next(module.parameters()).device
    key = {"layer_times": sha256_of_json([asdict(layer) for layer in layers]), "inputs": shapes, "torch": torch.__version__,
           "device": describe_device(device)}
    recalled = device_profile.recall(key)
    if isinstance(recalled, dict) and set(recalled) == {"forward", "propagate", "own"}:
        return LayerTimes(**recalled)
    times = measure_layer_times(module, layers, batch, loss)
    device_profile.remember(key, asdict(times))
    return times


def measure_layer_times(module, layers, batch, loss, repeats=3):
    """The LayerTimes of a module in eval mode, in PyTorch as it is; the least of `repeats`. The module stays as it was.

    Each convolution and linear layer runs backward by itself. What the whole backward takes beyond their sum (activations, norms,
    additions) is spread over the layers' ways of the error, by their share. A layer that is no module with one input (a joint projection)
    counts by its MACs.
    """
    inputs, targets = [value if isinstance(value, tuple) else (value,) for value in batch]
    wait = synchronizer(next(module.parameters()).device)

    def least(function):
        found = float("inf")
        for _ in range(repeats):
            wait()
            started = time.perf_counter()
            function()
            wait()
            found = min(found, 1000 * (time.perf_counter() - started))
        return found

    trunk = [layer for layer in layers if layer.kind in TRUNK]
    propagate, own = {}, {}
    with torch.enable_grad(), eval_mode(module):
        for layer in trunk:
            alone = _alone(module, layer)
            if alone is not None:
                propagate[layer.path], own[layer.path] = (least(each) for each in alone)
        with torch.no_grad():
            forward = least(lambda: module(*inputs))
        whole = least(lambda: _step(module, loss, inputs, targets))
    _by_macs(trunk, propagate, own)
    return _completed(forward, propagate, own, whole)


def _alone(module, layer):
    """Functions that compute the gradients of a layer's input and of its weight, or None where it cannot be run by itself."""
    try:
        owner = copy.deepcopy(module.get_submodule(layer.path)).requires_grad_(True)
        weight = owner.weight
        x = torch.randn(layer.input_shape, dtype=weight.dtype, device=weight.device).requires_grad_(True)
        output = owner(x)
        slope = torch.ones_like(output)
        torch.autograd.grad(output, [x, weight], slope, retain_graph=True)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return [lambda: torch.autograd.grad(output, [x], slope, retain_graph=True),
            lambda: torch.autograd.grad(output, [weight], slope, retain_graph=True)]


def _step(module, loss, inputs, targets):
    parameters = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    flags = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        torch.autograd.grad(loss(module(*inputs), *targets).mean(), parameters, allow_unused=True)
    finally:
        for parameter, flag in zip(parameters, flags):
            parameter.requires_grad_(flag)


def _by_macs(trunk, propagate, own):
    """Give the layers that were not measured what the others take per MAC."""
    macs = sum(layer.macs for layer in trunk if layer.path in own)
    rates = [sum(times.values()) / macs if macs else 0.0 for times in (propagate, own)]
    for layer in trunk:
        if layer.path not in own:
            propagate[layer.path], own[layer.path] = (rate * layer.macs for rate in rates)


def _completed(forward, propagate, own, whole):
    """LayerTimes whose sum is the whole step's time, where that is more than its parts."""
    total = sum(propagate.values())
    rest = max(0.0, whole - forward - total - sum(own.values()))
    factor = 1.0 + rest / total if total else 1.0
    return LayerTimes(forward, {path: factor * each for path, each in propagate.items()}, own)
