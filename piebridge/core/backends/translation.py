"""A network description told to an inference library: one rule per operation, in terms of the few primitives of an *emitter*.

An emitter (openvino_emitter.py, onnx_emitter.py) builds the library's own graph. Its primitives take and return opaque values:

    constant(array)                        shape(value) -> tuple of int
    convolution(x, weight, bias, strides, begin, end, dilations, groups, moments)
    matmul(a, b, is_transposed)            attention(query, key, value)
    pad(x, begin, end, mode)               clamp(x, low, high)
    binary(kind, a, b)                     kind: add, sub, mul, div
    unary(kind, x)                         kind: relu, hardswish, hardsigmoid, sigmoid, silu, tanh, gelu
    softmax(x, axis)                       layer_norm(x, axes, weight, bias, eps)
    max_pool(x, kernel, strides, begin, end, dilations)
    average_pool(x, kernel, strides, begin, end, counts_padding)
    mean(x, axes, keepdim)                 reshape(x, shape)
    permute(x, order)                      concatenate(values, axis)
    slice(x, axis, start, stop)

All shapes are static. On the way, a batch norm behind a convolution is folded into it (in double precision) and a zero padding
before one becomes the convolution's own, so that no library has to find these patterns by itself.
"""

from piebridge.core import graph
from piebridge.core.backends.segment import Unsupported
from piebridge.core.backends.translation_rules import RULES


def translate(network, emitter, inputs):
    """Tell the network from its input (value `inputs`, [B,3,H,W]) to its tap to `emitter`; the tap's value, [B,D].

    Raises Unsupported for an operation without a rule.
    """
    description = network.description
    needed = graph.ancestors(description, description["tap"])
    nodes = [node for node in description["nodes"] if node["name"] in needed]
    job = _Translation(emitter, nodes, network.state_dict())
    job.values[graph.INPUT] = inputs
    for node in nodes:
        if node["name"] not in job.values:
            job.values[node["name"]] = job.rule_for(node)(job, node, node["arguments"])
    return job.values[description["tap"]]


class _Translation:
    """What the rules share: the emitter, the values made so far, and who reads what."""

    def __init__(self, emitter, nodes, tensors):
        self.emitter, self.tensors, self.values = emitter, tensors, {}
        self._by_name = {node["name"]: node for node in nodes}
        self._readers = {}
        for node in nodes:
            for name in node["inputs"]:
                self._readers.setdefault(name, []).append(node)

    def rule_for(self, node):
        rule = RULES.get(node["operation"])
        if rule is None:
            raise Unsupported(f"node {node['name']!r}: no rule to translate operation {node['operation']}")
        return rule

    def input(self, node, position=0):
        return self.values[node["inputs"][position]]

    def inputs(self, node):
        return [self.values[name] for name in node["inputs"]]

    def array(self, key):
        """A tensor of the network as float32 numpy, or None where there is none."""
        tensor = self.tensors.get(key)
        return None if tensor is None else tensor.detach().cpu().float().numpy()

    def source(self, node):
        return self._by_name.get(node["inputs"][0])

    def sole_reader(self, node, operation):
        """The only reader of the node's output if it is such an operation, else None."""
        readers = self._readers.get(node["name"], [])
        return readers[0] if len(readers) == 1 and readers[0]["operation"] == operation else None
