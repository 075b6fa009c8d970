"""Convolution and pooling as standard ONNX nodes. See onnx_operators.py for how a rule is called.

A transposed convolution, which is how a convolution's input gradient comes in, goes out as a convolution of y, spread out by the stride,
with the flipped weight, its channels swapped: runtimes tune that far better, and prepack the weight where it is frozen. With a stride and
more than one channel per group it stays ConvTranspose, which spends no products on the zeros between. Weight gradients have become plain
operators before, see passes/standard_convolutions.py.
"""

import math

from piebridge.engine.onnx_graph import reduced


def _convolution(graph, result, x, weight, bias, strides, padding, dilations, is_transposed, output_padding, groups):
    if is_transposed:
        return _added(graph, _transposed(graph, x, weight, result.shape, strides, padding, dilations, groups), bias)
    return _plain(graph, x, weight, bias, strides, padding, padding, dilations, groups)


def _added(graph, x, bias):
    if bias is None:
        return x
    return graph.node("Add", [x, graph.reshape(bias, bias.shape + (1,) * (len(x.shape) - 2))], x.shape, x.dtype)


def _plain(graph, x, weight, bias, strides, begins, ends, dilations, groups):
    """Conv; what pads negatively is cropped before."""
    x = graph.pad(x, [0, 0] + [min(0, begin) for begin in begins], [0, 0] + [min(0, end) for end in ends])
    begins, ends = [max(0, begin) for begin in begins], [max(0, end) for end in ends]
    kernel = weight.shape[2:]
    sizes = tuple((size + begin + end - dilation * (taps - 1) - 1) // stride + 1
                  for size, begin, end, dilation, taps, stride in zip(x.shape[2:], begins, ends, dilations, kernel, strides))
    inputs = [x, weight] + ([] if bias is None else [bias])
    return graph.node("Conv", inputs, (x.shape[0], weight.shape[0]) + sizes, x.dtype, kernel_shape=list(kernel), strides=list(strides),
                      pads=begins + ends, dilations=list(dilations), group=groups)


def _transposed(graph, y, weight, shape, strides, padding, dilations, groups):
    """weight [K, C / groups, ...]; shape: of the result, [B, C, ...]."""
    kernel = weight.shape[2:]
    is_strided = any(stride != 1 for stride in strides)
    if is_strided and weight.shape[1] > 1:
        missing = [size - ((count - 1) * stride - 2 * pad + dilation * (taps - 1) + 1) for size, count, stride, pad, dilation, taps
                   in zip(shape[2:], y.shape[2:], strides, padding, dilations, kernel)]
        return graph.node("ConvTranspose", [y, weight], shape, y.dtype, kernel_shape=list(kernel), strides=list(strides),
                          pads=list(padding) * 2, dilations=list(dilations), group=groups, output_padding=missing)
    begins = [dilation * (taps - 1) - pad for dilation, taps, pad in zip(dilations, kernel, padding)]
    y = _spread(graph, y, strides) if is_strided else y
    ends = [size - count - begin + dilation * (taps - 1)
            for size, count, begin, dilation, taps in zip(shape[2:], y.shape[2:], begins, dilations, kernel)]
    return _plain(graph, y, _swapped_weight(graph, weight, groups), None, [1] * len(kernel), begins, ends, dilations, groups)


def _swapped_weight(graph, weight, groups):
    """[K, C / g, ...] -> [C, K / g, ...], flipped."""
    outputs, inputs, kernel = weight.shape[0], weight.shape[1], weight.shape[2:]
    grouped = graph.reshape(weight, (groups, outputs // groups, inputs) + kernel)
    swapped = graph.transpose(grouped, [0, 2, 1] + list(range(3, 3 + len(kernel))))
    return graph.flip(graph.reshape(swapped, (groups * inputs, outputs // groups) + kernel), list(range(2, 2 + len(kernel))))


def _spread(graph, y, strides):
    """stride - 1 zeros behind each number."""
    batch, channels, sizes = y.shape[0], y.shape[1], y.shape[2:]
    apart = [batch * channels] + [each for size in sizes for each in (size, 1)]
    ends = [0] + [each for stride in strides for each in (0, stride - 1)]
    padded = graph.pad(graph.reshape(y, apart), [0] * len(apart), ends)
    return graph.reshape(padded, (batch, channels) + tuple(size * stride for size, stride in zip(sizes, strides)))


def _windows(kernel, strides, padding, dilations, rounds_up):
    return {"kernel_shape": list(kernel), "strides": list(strides or kernel), "pads": list(padding) * 2,
            "ceil_mode": int(rounds_up), **({"dilations": list(dilations)} if dilations else {})}


def _pair(value):
    return list(value) * 2 if len(value) == 1 else list(value)


def _max_pool(graph, result, x, kernel, strides=(), padding=(0,), dilations=(1,), rounds_up=False):
    """The indices count within a channel, as PyTorch's do; ONNX counts through the whole tensor."""
    kernel, strides, padding, dilations = [_pair(each) for each in (kernel, strides or kernel, padding, dilations)]
    attributes = _windows(kernel, strides, padding, dilations, rounds_up)
    if result.used == {0}:
        return [graph.node("MaxPool", [x], result.shape, x.dtype, **attributes), None]
    value, index = graph.nodes_results("MaxPool", [x], result.results, **attributes)
    size = graph.number(math.prod(x.shape[2:]), index.dtype)
    return [value, graph.node("Mod", [index, size], index.shape, index.dtype)]


def _max_pool_gradient(graph, result, y, x, kernel, strides, padding, dilations, rounds_up, index):
    rows = math.prod(x.shape[:-2])
    zeros = graph.filled(0.0, (rows, math.prod(x.shape[-2:])), x.dtype)
    y, index = [graph.reshape(each, (rows, math.prod(y.shape[-2:]))) for each in (y, index)]
    summed = graph.node("ScatterElements", [zeros, index, y], zeros.shape, x.dtype, axis=1, reduction="add")
    return graph.reshape(summed, x.shape)


def _average_pool(graph, result, x, kernel, strides=(), padding=(0,), rounds_up=False, counts_padding=True, divisor=None):
    kernel, strides, padding = [_pair(each) for each in (kernel, strides or kernel, padding)]
    if divisor is not None or _has_cut_windows(x.shape, result.shape, kernel, strides, padding):
        return None
    return graph.node("AveragePool", [x], result.shape, x.dtype, count_include_pad=int(counts_padding),
                      **_windows(kernel, strides, padding, None, False))


def _has_cut_windows(shape, counts, kernel, strides, padding):
    """Whether windows reach over the padded edge, as with sizes rounded up; runtimes disagree on what these count."""
    return any((size + 2 * pad - taps) // stride + 1 != count
               for size, count, taps, stride, pad in zip(shape[-2:], counts[-2:], kernel, strides, padding))


def _average_pool_gradient(graph, result, y, x, kernel, strides, padding, rounds_up, counts_padding, divisor):
    """A depthwise transposed convolution with a kernel of equal numbers, where every window counts the same."""
    kernel, strides, padding = [_pair(each) for each in (kernel, strides or kernel, padding)]
    is_even = counts_padding or not any(padding)
    if divisor is not None or not is_even or _has_cut_windows(x.shape, y.shape, kernel, strides, padding):
        return None
    channels = x.shape[-3]
    weight = graph.filled(1.0 / math.prod(kernel), (channels, 1) + tuple(kernel), x.dtype)
    return _transposed(graph, y, weight, x.shape, strides, padding, [1, 1], channels)


def _adaptive_average_pool(graph, result, x, sizes):
    """As an average pool where the sizes divide."""
    kernel = _even_windows(x.shape, sizes)
    if kernel is None:
        return None
    if list(sizes) == [1, 1]:
        return graph.node("ReduceMean", [x], reduced(x.shape, [-2, -1], True), x.dtype, axes=[-2, -1], keepdims=1)
    return graph.node("AveragePool", [x], result.shape, x.dtype, **_windows(kernel, kernel, [0, 0], None, False))


def _adaptive_average_pool_gradient(graph, result, y, x):
    kernel = _even_windows(x.shape, y.shape[-2:])
    if kernel is None:
        return None
    return _average_pool_gradient(graph, result, y, x, kernel, kernel, [0, 0], False, True, None)


def _even_windows(shape, sizes):
    pairs = list(zip(shape[-2:], sizes))
    return None if any(size % count for size, count in pairs) else [size // count for size, count in pairs]


RULES = {
    "convolution.default": _convolution,
    "max_pool2d_with_indices.default": _max_pool, "max_pool2d_with_indices_backward.default": _max_pool_gradient,
    "avg_pool2d.default": _average_pool, "avg_pool2d_backward.default": _average_pool_gradient,
    "_adaptive_avg_pool2d.default": _adaptive_average_pool, "_adaptive_avg_pool2d_backward.default": _adaptive_average_pool_gradient,
}
