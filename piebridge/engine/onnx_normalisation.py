"""ATen operator -> standard ONNX nodes: variances, layer and group norm. See onnx_operators.py for how a rule is called."""

import math

from piebridge.engine.onnx_graph import axes_of, reduced


def _variance(graph, x, axes, correction):
    """(variance, mean), both with the reduced axes kept."""
    shape, count = reduced(x.shape, axes, True), math.prod(x.shape[axis] for axis in axes)
    mean = graph.node("ReduceMean", [x], shape, x.dtype, axes=axes, keepdims=1)
    deviation = graph.node("Sub", [x, mean], x.shape, x.dtype)
    square = graph.node("Mul", [deviation, deviation], x.shape, x.dtype)
    variance = graph.node("ReduceMean", [square], shape, x.dtype, axes=axes, keepdims=1)
    if correction:
        variance = graph.node("Mul", [variance, graph.number(count / max(count - correction, 0), x.dtype)], shape, x.dtype)
    return variance, mean


def _var_mean(graph, result, x, dims=None, correction=1, keepdim=False):
    moments = _variance(graph, x, axes_of(x, dims), correction)
    return [graph.reshape(moment, result.shape) for moment in moments]


def _var(graph, result, x, dims=None, correction=1, keepdim=False):
    return graph.reshape(_variance(graph, x, axes_of(x, dims), correction)[0], result.shape)


def _normalised(graph, x, axes, epsilon):
    """(x to mean 0 and variance 1 over the axes, mean, 1 / deviation)."""
    variance, mean = _variance(graph, x, axes, 0)
    variance = graph.node("Add", [variance, graph.number(epsilon, x.dtype)], variance.shape, x.dtype)
    root = graph.node("Reciprocal", [graph.node("Sqrt", [variance], variance.shape, x.dtype)], variance.shape, x.dtype)
    deviation = graph.node("Sub", [x, mean], x.shape, x.dtype)
    return graph.node("Mul", [deviation, root], x.shape, x.dtype), mean, root


def _affine(graph, x, weight, bias):
    for operation, operand in (("Mul", weight), ("Add", bias)):
        if operand is not None:
            x = graph.node(operation, [x, operand], x.shape, x.dtype)
    return x


def _layer_norm(graph, result, x, sizes, weight, bias, epsilon):
    """In one node where nothing asks for its moments, as in a frozen part: not every runtime gives them."""
    axes = list(range(len(x.shape) - len(sizes), len(x.shape)))
    if result.used == {0}:
        weight = graph.filled(1.0, sizes, x.dtype) if weight is None else weight
        inputs = [x, weight] + ([] if bias is None else [bias])
        return [graph.node("LayerNormalization", inputs, x.shape, x.dtype, axis=axes[0], epsilon=epsilon), None, None]
    value, mean, root = _normalised(graph, x, axes, epsilon)
    return [_affine(graph, value, weight, bias), mean, root]


def _group_norm(graph, result, x, weight, bias, batch, channels, size, groups, epsilon):
    grouped = graph.reshape(x, (batch, groups, channels // groups * size))
    value, mean, root = _normalised(graph, grouped, [2], epsilon)
    weight, bias = [None if each is None else graph.reshape(each, (channels,) + (1,) * (len(x.shape) - 2)) for each in (weight, bias)]
    return [_affine(graph, graph.reshape(value, x.shape), weight, bias)] + [graph.reshape(each, (batch, groups)) for each in (mean, root)]


RULES = {
    "var_mean.correction": _var_mean, "var.correction": _var, "native_layer_norm.default": _layer_norm,
    "native_group_norm.default": _group_norm,
}
