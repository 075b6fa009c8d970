"""What each operation of a description does to dimensions: one small rule for each, run over the graph by `analyse`.

A rule takes the analysis, the node, its inputs' axes and its output's shape (batch of one), and returns its output's axes. On
the way it notes which axes of which tensors the dimensions are (`tensors`), which of those read a value, so that leaving out
their part leaves out the value (`reading`), which arguments follow a dimension's size (`arguments`), and what is multiplied
(`products`).
"""

from piebridge.core import graph, operations
from piebridge.core.dimensions import broadcast, fix, fresh, product, regroup, size_of, unify


class Analysis:
    """The dimensions of a network. Axes are lists of Dimension; see core/graph.py for descriptions."""

    def __init__(self, description):
        self.nodes = graph.nodes_by_name(description)
        self.values = {}  # node name: axes
        self.tensors = {}  # (state dict key, axis): axis
        self.users = {}  # (state dict key, axis): names of the nodes that use it
        self.reading = set()  # (state dict key, axis)
        self.arguments = {}  # node name: {argument: axis, or list of axes}
        self.products = {}  # node name: [(constant, axis)]: the multiply-accumulates are the sum of constant * size
        self.heads = []  # axes that count the heads of an attention

    def attach(self, node, key, number, axis, is_reading=False):
        """Axis `number` of tensor `key` is `axis`; the same tensor may be attached by several nodes."""
        if (key, number) in self.tensors:
            unify(self.tensors[key, number], axis)
        self.tensors.setdefault((key, number), axis)
        self.users.setdefault((key, number), set()).add(node["name"])
        if is_reading:
            self.reading.add((key, number))


def analyse(description, shapes):
    """The Analysis of a description; shapes: {node name: shape} of every value for one image, "x" for the network's input."""
    analysis = Analysis(description)
    analysis.values[graph.INPUT] = [fresh(size, is_fixed=True) for size in shapes[graph.INPUT]]
    for node in description["nodes"]:
        rule = RULES.get(node["operation"], _unknown)
        inputs = [analysis.values[name] for name in node["inputs"]]
        analysis.values[node["name"]] = rule(analysis, node, inputs, shapes[node["name"]])
    return analysis


def _unknown(a, node, inputs, shape):
    """The safe rule: nothing that enters may be cut."""
    if node["operation"] in ("linear", "matmul"):
        a.products[node["name"]] = [(product(shape) * size_of(inputs[0][-1]), [])]
    for axes in inputs:
        fix(*axes)
    return [fresh(size, is_fixed=True) for size in shape]


def _same(a, node, inputs, shape):
    return inputs[0]


def _convolution(a, node, inputs, shape):
    """Channels in and out; with groups, whole groups: their inner widths are fixed. Depthwise: the output is as its input."""
    given, channels = node["arguments"], inputs[0][1]
    groups = given["groups"]
    within, outside = channels, fresh(given["out_channels"])
    arguments = a.arguments[node["name"]] = {"in_channels": channels, "out_channels": outside}
    if groups > 1:
        outer, within = regroup([channels], [groups, given["in_channels"] // groups])
        inner = fresh(given["out_channels"] // groups)
        fix(within, inner)
        outside = outer + inner
        arguments.update(groups=outer, out_channels=outside)
    _attach_weight(a, node, outside, within)
    kernel = product(operations.pair(given["kernel_size"]))
    a.products[node["name"]] = [(kernel * shape[2] * shape[3], outside + within)]
    return [inputs[0][0], outside] + [fresh(size, is_fixed=True) for size in shape[2:]]


def _linear_module(a, node, inputs, shape):
    *before, within = inputs[0]
    outside = fresh(node["arguments"]["out_features"])
    a.arguments[node["name"]] = {"in_features": within, "out_features": outside}
    _attach_weight(a, node, outside, within)
    a.products[node["name"]] = [(1, sum(before, []) + outside + within)]
    return before + [outside]


def _attach_weight(a, node, outside, within):
    a.attach(node, node["module"] + ".weight", 0, outside)
    a.attach(node, node["module"] + ".weight", 1, within, is_reading=True)
    if node["arguments"]["bias"]:
        a.attach(node, node["module"] + ".bias", 0, outside)


def _batch_norm(a, node, inputs, shape):
    a.arguments[node["name"]] = {"num_features": inputs[0][1]}
    return _attach_norm(a, node, inputs)


def _group_norm(a, node, inputs, shape):
    """Its groups are normalised by themselves, so whole groups may be cut."""
    given = node["arguments"]
    outer, inner = regroup([inputs[0][1]], [given["num_groups"], given["num_channels"] // given["num_groups"]])
    fix(inner)
    a.arguments[node["name"]] = {"num_channels": inputs[0][1], "num_groups": outer}
    return _attach_norm(a, node, inputs)


def _attach_norm(a, node, inputs):
    for name, shape in operations.tensor_shapes(node["operation"], node["arguments"]).items():
        if shape:
            a.attach(node, node["module"] + "." + name, 0, inputs[0][1])
    return inputs[0]


def _layer_norm(a, node, inputs, shape):
    """Its statistics are those of all channels together, which cutting one would change."""
    fix(*inputs[0][-len(node["arguments"]["normalized_shape"]):])
    return inputs[0]


def _parameter(a, node, inputs, shape):
    axes = [fresh(size) for size in shape]
    a.arguments[node["name"]] = {"shape": axes}
    for number, axis in enumerate(axes):
        a.attach(node, node["parameter"], number, axis)
    return axes


def _linear(a, node, inputs, shape):
    """linear(x [..., in], weight [out, in], bias [out])."""
    weight = a.nodes[node["inputs"][1]]
    if weight["operation"] != operations.PARAMETER:
        return _unknown(a, node, inputs, shape)
    *before, within = inputs[0]
    outside = inputs[1][0]
    a.attach(node, weight["parameter"], 1, within, is_reading=True)
    if len(inputs) == 3:
        unify(inputs[2][0], outside)
    a.products[node["name"]] = [(1, sum(before, []) + outside + within)]
    return before + [outside]


def _matmul(a, node, inputs, shape):
    """[..., n, k] x [..., k, m]: what is summed over and what it gives are fixed, so that heads are cut as wholes."""
    first, second = inputs
    if min(len(first), len(second)) < 2:
        return _unknown(a, node, inputs, shape)
    unify(first[-1], second[-2])
    fix(first[-2], first[-1], second[-1])
    outer = broadcast(first[:-2], second[:-2])
    a.heads += outer[1:]
    a.products[node["name"]] = [(1, sum(outer, []) + first[-2] + first[-1] + second[-1])]
    return outer + [first[-2], second[-1]]


def _attention(a, node, inputs, shape):
    """Query, key and value [N, heads, tokens, D]; its scale depends on D."""
    query, key, value = inputs
    outer = broadcast(broadcast(query[:-2], key[:-2]), value[:-2])
    unify(query[-1], key[-1])
    unify(key[-2], value[-2])
    fix(query[-2], query[-1], key[-2], value[-1])
    a.heads += outer[1:]
    pairs = sum(outer, []) + query[-2] + key[-2]
    a.products[node["name"]] = [(1, pairs + query[-1]), (1, pairs + value[-1])]
    return outer + [query[-2], value[-1]]


def _elementwise(a, node, inputs, shape):
    return broadcast(*inputs) if len(inputs) == 2 else inputs[0]


def _per_channel(a, node, inputs, shape):
    """Pooling and padding: each channel by itself."""
    return inputs[0][:-2] + [fresh(size, is_fixed=True) for size in shape[-2:]]


def _softmax(a, node, inputs, shape):
    fix(inputs[0][node["arguments"]["dim"]])
    return inputs[0]


def _cat(a, node, inputs, shape):
    dim = node["arguments"]["dim"] % len(shape)
    axes = list(inputs[0])
    for number in range(len(shape)):
        for other in inputs[1:]:
            if number != dim:
                unify(axes[number], other[number])
    fix(*[each[dim] for each in inputs])
    axes[dim] = fresh(shape[dim], is_fixed=True)
    return axes


def _flatten(a, node, inputs, shape):
    rank = len(inputs[0])
    start, end = node["arguments"]["start_dim"] % rank, node["arguments"]["end_dim"] % rank
    return inputs[0][:start] + [sum(inputs[0][start:end + 1], [])] + inputs[0][end + 1:]


def _reshape(a, node, inputs, shape):
    axes = regroup(inputs[0], shape)
    a.arguments[node["name"]] = {"shape": axes}
    return axes


def _permute(a, node, inputs, shape):
    return [inputs[0][dim] for dim in node["arguments"]["dims"]]


def _transpose(a, node, inputs, shape):
    axes = list(inputs[0])
    one, other = node["arguments"]["dim0"], node["arguments"]["dim1"]
    axes[one], axes[other] = axes[other], axes[one]
    return axes


def _select(a, node, inputs, shape):
    dim = node["arguments"]["dim"] % len(inputs[0])
    fix(inputs[0][dim])
    return inputs[0][:dim] + inputs[0][dim + 1:]


def _slice(a, node, inputs, shape):
    dim = node["arguments"]["dim"] % len(shape)
    fix(inputs[0][dim])
    return inputs[0][:dim] + [fresh(shape[dim], is_fixed=True)] + inputs[0][dim + 1:]


def _mean(a, node, inputs, shape):
    dims = {dim % len(inputs[0]) for dim in node["arguments"]["dims"]}
    fix(*[inputs[0][dim] for dim in dims])
    axes = [[] if number in dims else axis for number, axis in enumerate(inputs[0])]
    return axes if node["arguments"]["keepdim"] else [axis for number, axis in enumerate(axes) if number not in dims]


_SAME = ("ReLU", "ReLU6", "Hardswish", "Hardsigmoid", "SiLU", "Sigmoid", "Tanh", "GELU", "Identity", "Dropout", "relu", "relu6",
         "hardswish", "hardsigmoid", "sigmoid", "silu", "tanh", "gelu", "expand_batch")
_POOLS = ("ZeroPad2d", "MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "adaptive_avg_pool2d")

RULES = dict(
    {name: _same for name in _SAME}, **{name: _per_channel for name in _POOLS}, **{
        "Conv2d": _convolution, "Linear": _linear_module, "BatchNorm2d": _batch_norm, "GroupNorm": _group_norm,
        "LayerNorm": _layer_norm, "parameter": _parameter, "linear": _linear, "matmul": _matmul, "attention": _attention,
        "add": _elementwise, "sub": _elementwise, "mul": _elementwise, "div": _elementwise,
        "Softmax": _softmax, "softmax": _softmax, "cat": _cat, "flatten": _flatten, "Flatten": _flatten, "reshape": _reshape,
        "permute": _permute, "transpose": _transpose, "select": _select, "slice": _slice, "mean": _mean})
