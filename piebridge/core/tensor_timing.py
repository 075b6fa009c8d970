"""How long each part of a network's backward takes: the profile that ElasticTrainer chooses tensors by."""

import copy
import time
from dataclasses import dataclass

import numpy as np
import torch

from piebridge.core import graph, operations
from piebridge.core.backends import device_profile
from piebridge.core.costs import eval_mode
from piebridge.core.device import describe_device, synchronizer
from piebridge.core.files import sha256_of_json


@dataclass(frozen=True)
class TensorTiming:
    """Seconds of one backward, by state dict key of a tensor, in the order of the forward.

    own: its gradient itself (t_dw). reach: the error's way from the loss down to the node that uses it (the sum of t_dy over all
    nodes behind that one). total: the whole backward, every tensor trained.
    """

    own: dict
    reach: dict
    total: float


class Node:
    """One node of a network with the values that enter it, ready to be run backward by itself.

    parameters: {name of a parameter's node: state dict key}. activations: the entering values that are no parameters. tensors: {state
    dict key: tensor} of the parameters that the node uses, its module's or entering ones.
    """

    def __init__(self, network, node, values, parameters):
        names = node["inputs"]
        self._inputs = [values[name].detach().clone().requires_grad_(True) for name in names]
        self.activations = [tensor for name, tensor in zip(names, self._inputs) if name not in parameters]
        self.tensors = {parameters[name]: tensor for name, tensor in zip(names, self._inputs) if name in parameters}
        if "module" in node:
            module = copy.deepcopy(network.get_submodule(node["module"])).train().requires_grad_(True)
            if getattr(module, "inplace", False):  # would overwrite what the gradient is asked of
                module.inplace = False
            self.tensors = {f"{node['module']}.{name}": tensor for name, tensor in module.named_parameters()}
            self._output = module(*self._inputs)
        else:
            arguments = {name: value for name, value in node["arguments"].items() if value is not None}
            self._output = operations.FUNCTIONS[node["operation"]].run(*self._inputs, **arguments)
        self._slope = torch.ones_like(self._output)

    def backward(self, wanted):
        """The gradients of the `wanted` tensors, given that of the output; may be called again and again."""
        return torch.autograd.grad(self._output, wanted, self._slope, retain_graph=True, allow_unused=True)


def timing_of(network, inputs):
    """`measure_timing`, or what it gave before on this device for the same network, sizes and versions (see device_profile)."""
    key = {"tensor_timing": sha256_of_json(network.description), "inputs": list(inputs.shape), "torch": torch.__version__,
           "device": describe_device(inputs.device)}
    recalled = device_profile.recall(key)
    if _is_timing(recalled, network):
        return TensorTiming(**recalled)
    timing = measure_timing(network, inputs)
    device_profile.remember(key, {"own": timing.own, "reach": timing.reach, "total": timing.total})
    return timing


def _is_timing(recalled, network):
    """Whether a remembered value is what `timing_of` remembers: the profile is a file that anything may have happened to."""
    if not isinstance(recalled, dict) or set(recalled) != {"own", "reach", "total"} or not isinstance(recalled["total"], float):
        return False
    keys = {key for key, _ in network.named_parameters()}
    return all(isinstance(times, dict) and set(times) == keys and all(isinstance(seconds, float) for seconds in times.values())
               for times in (recalled["own"], recalled["reach"]))


def measure_timing(network, inputs, repeats=3):
    """The TensorTiming of a GraphNetwork in train mode, every parameter trained.

    inputs: a batch of images [B, 3, S, S] as it is trained on. Each node runs backward by itself: for its input's gradient alone,
    which is t_dy, and for this and a tensor's, which is that and t_dw; the least of `repeats` is taken. The network stays as it was;
    dropout draws random numbers.
    """
    values = {graph.INPUT: inputs}
    with torch.no_grad(), eval_mode(network):
        network.observe(inputs, lambda name, value: values.update({name: value}))
    return _timing(network, values, repeats, _clock(inputs.device))


def _timing(network, values, repeats, clock):
    parameters = {node["name"]: node["parameter"] for node in network.description["nodes"] if "parameter" in node}
    passing, own, place = [], {}, {}  # seconds of each node; seconds of each tensor, and the number of the first node that uses it
    carries = set()  # nodes whose value depends on a parameter: through these the error has to pass
    for number, node in enumerate(network.description["nodes"]):
        passing.append(0.0)
        if node["name"] in parameters:
            continue
        part = Node(network, node, values, parameters)
        through = part.activations if carries.intersection(node["inputs"]) else []
        if through or part.tensors:
            carries.add(node["name"])
        if through:
            passing[-1] = _seconds(part, through, repeats, clock)
        for key, tensor in part.tensors.items():
            both = _seconds(part, through + [tensor], repeats, clock)
            own[key] = own.get(key, 0.0) + max(both - passing[-1], 0.0)
            place.setdefault(key, number)
    behind = np.append(np.cumsum(passing[::-1])[::-1], 0.0)  # [nodes + 1]: of the node and all after it
    return TensorTiming(own, {key: float(behind[place[key] + 1]) for key in own}, float(sum(own.values()) + behind[0]))


def _seconds(part, wanted, repeats, clock):
    least = float("inf")
    for _ in range(repeats):
        started = clock()
        part.backward(wanted)
        least = min(least, clock() - started)
    return least


def _clock(device):
    wait = synchronizer(device)

    def now():
        wait()
        return time.perf_counter()

    return now
