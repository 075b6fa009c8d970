"""How each operation of a network description is told to an emitter (see core/backends/translation.py for its primitives).

A rule takes the translation so far, the node and the node's arguments, and returns the node's value.
"""

from collections import namedtuple

import numpy as np

from piebridge.core.backends.folding import batch_norm_scale
from piebridge.core.backends.segment import Unsupported
from piebridge.core.operations import pair

# mean, std: float64 [C], what batch norm says of a convolution's output over the training data
Moments = namedtuple("Moments", "mean std")


def _batch_norm_arrays(job, node):
    arrays = [job.array(node["module"] + "." + name) for name in ("weight", "bias", "running_mean", "running_var")]
    if arrays[2] is None:
        raise Unsupported(f"node {node['name']!r}: a BatchNorm2d without running statistics depends on the batch")
    return arrays


# Modules -----------------------------------------------------------------------------------------------------------------

def _conv(job, node, a):
    """Conv2d, with the zero padding before it and the batch norm behind it, where they are its alone."""
    weight, bias = job.array(node["module"] + ".weight"), job.array(node["module"] + ".bias")
    x, (height, width) = job.input(node), pair(a["padding"])
    begin, end = [height, width], [height, width]
    if a.get("padding_mode", "zeros") != "zeros":
        x, begin, end = job.emitter.pad(x, begin, end, a["padding_mode"]), [0, 0], [0, 0]
    source = job.source(node)
    if source is not None and source["operation"] == "ZeroPad2d" and a.get("padding_mode", "zeros") == "zeros":
        x = job.input(source)
        left, right, top, bottom = _border(source["arguments"])
        begin, end = [begin[0] + top, begin[1] + left], [end[0] + bottom, end[1] + right]
    moments, norm = None, job.sole_reader(node, "BatchNorm2d")
    if norm is not None:
        arrays = _batch_norm_arrays(job, norm)
        scale, shift = batch_norm_scale(arrays, norm["arguments"]["eps"])
        bias = shift if bias is None else bias * scale + shift
        weight = (weight * scale[:, None, None, None]).astype(np.float32)
        bias = bias.astype(np.float32)
        moments = Moments(np.zeros_like(scale) if arrays[1] is None else arrays[1].astype(np.float64),
                          np.ones_like(scale) if arrays[0] is None else np.abs(arrays[0].astype(np.float64)))
    value = job.emitter.convolution(x, weight, bias, pair(a["stride"]), begin, end, pair(a["dilation"]), a["groups"], moments)
    if norm is not None:
        job.values[norm["name"]] = value
    return value


def _batch_norm(job, node, a):
    scale, shift = batch_norm_scale(_batch_norm_arrays(job, node), a["eps"])
    emitter = job.emitter
    scale, shift = [emitter.constant(each.astype(np.float32).reshape(1, -1, 1, 1)) for each in (scale, shift)]
    return emitter.binary("add", emitter.binary("mul", job.input(node), scale), shift)


def _border(a):
    return pair(a["padding"]) * 2 if not isinstance(a["padding"], (list, tuple)) else a["padding"]


def _zero_pad(job, node, a):
    left, right, top, bottom = _border(a)
    return job.emitter.pad(job.input(node), [top, left], [bottom, right], "zeros")


def _layer_norm(job, node, a):
    axes = list(range(-len(a["normalized_shape"]), 0))
    weight, bias = job.array(node["module"] + ".weight"), job.array(node["module"] + ".bias")
    return job.emitter.layer_norm(job.input(node), axes, weight, bias, a["eps"])


def _group_norm(job, node, a):
    """[N,C,H,W] -> [N,groups,C/groups,H,W], normalised over all but the first two axes, and back; then the affine part."""
    emitter, x = job.emitter, job.input(node)
    shape = list(emitter.shape(x))
    grouped = emitter.reshape(x, [shape[0], a["num_groups"], shape[1] // a["num_groups"]] + shape[2:])
    y = emitter.reshape(emitter.layer_norm(grouped, list(range(-len(shape) + 1, 0)), None, None, a["eps"]), shape)
    for name, kind in (("weight", "mul"), ("bias", "add")):
        array = job.array(node["module"] + "." + name)
        if array is not None:
            y = emitter.binary(kind, y, emitter.constant(array.reshape([1, -1] + [1] * (len(shape) - 2))))
    return y


def _linear(job, node, a):
    return _product(job, job.input(node), job.emitter.constant(job.array(node["module"] + ".weight")),
                    job.array(node["module"] + ".bias"))


def _product(job, x, weight, bias):
    y = job.emitter.matmul(x, weight, True)
    if bias is None:
        return y
    return job.emitter.binary("add", y, job.emitter.constant(bias) if isinstance(bias, np.ndarray) else bias)


def _max_pool(job, node, a):
    kernel, strides, begin, dilations = [pair(a[name]) for name in ("kernel_size", "stride", "padding", "dilation")]
    end = list(begin)
    if a["ceil_mode"]:  # libraries differ in what they round up; more padding, which a maximum ignores, is the same everywhere
        for axis, size in enumerate(job.emitter.shape(job.input(node))[2:]):
            room = size + 2 * begin[axis] - dilations[axis] * (kernel[axis] - 1) - 1
            steps = -(-room // strides[axis])
            if steps * strides[axis] >= size + begin[axis]:  # torch: a window begins inside the image or the border before it
                steps -= 1
            end[axis] += max(0, steps * strides[axis] - room)
    return job.emitter.max_pool(job.input(node), kernel, strides, begin, end, dilations)


def _average_pool(job, node, a):
    if a["ceil_mode"]:
        raise Unsupported(f"node {node['name']!r}: average pooling with ceil_mode is not translated")
    kernel, strides, padding = [pair(a[name]) for name in ("kernel_size", "stride", "padding")]
    return job.emitter.average_pool(job.input(node), kernel, strides, padding, padding, a["count_include_pad"])


def _adaptive_pool(job, node, a):
    wanted, shape = pair(a["output_size"]), job.emitter.shape(job.input(node))
    if wanted == [1, 1]:
        return job.emitter.mean(job.input(node), [2, 3], True)
    if shape[2] % wanted[0] or shape[3] % wanted[1]:
        raise Unsupported(f"node {node['name']!r}: adaptive pooling of {shape[2]}x{shape[3]} to {wanted[0]}x{wanted[1]} has windows "
                          "of unequal size")
    kernel = [shape[2] // wanted[0], shape[3] // wanted[1]]
    return job.emitter.average_pool(job.input(node), kernel, kernel, [0, 0], [0, 0], True)


# Functions ---------------------------------------------------------------------------------------------------------------

def _same(job, node, _):
    return job.input(node)


def _unary(kind):
    return lambda job, node, _: job.emitter.unary(kind, job.input(node))


def _clamp(job, node, _):
    return job.emitter.clamp(job.input(node), 0.0, 6.0)


def _binary(kind):
    def rule(job, node, a):
        values = job.inputs(node)
        if len(values) == 1:
            values.append(job.emitter.constant(np.array(a["value"], dtype=np.float32)))
        return job.emitter.binary(kind, *values)
    return rule


def _parameter(job, node, _):
    return job.emitter.constant(job.array(node["parameter"]))


def _expand_batch(job, node, _):
    """[1, ...] -> [N, ...] by adding zeros of the batch's size, which every library can do."""
    parameter, reference = job.inputs(node)
    batch, rank = job.emitter.shape(reference)[0], len(job.emitter.shape(parameter))
    zeros = np.zeros([batch] + [1] * (rank - 1), dtype=np.float32)
    return job.emitter.binary("add", parameter, job.emitter.constant(zeros))


def _flatten(job, node, a):
    shape = list(job.emitter.shape(job.input(node)))
    start, end = a["start_dim"] % len(shape), a["end_dim"] % len(shape)
    flat = int(np.prod(shape[start:end + 1]))
    return job.emitter.reshape(job.input(node), shape[:start] + [flat] + shape[end + 1:])


def _transpose(job, node, a):
    rank = len(job.emitter.shape(job.input(node)))
    order = list(range(rank))
    first, second = a["dim0"] % rank, a["dim1"] % rank
    order[first], order[second] = second, first
    return job.emitter.permute(job.input(node), order)


def _permute(job, node, a):
    rank = len(job.emitter.shape(job.input(node)))
    return job.emitter.permute(job.input(node), [axis % rank for axis in a["dims"]])


def _slice_of(job, node, dim, start, stop):
    shape = job.emitter.shape(job.input(node))
    axis = dim % len(shape)
    start, stop, _ = slice(start, stop).indices(shape[axis])
    return job.emitter.slice(job.input(node), axis, start, stop), axis


def _slice(job, node, a):
    return _slice_of(job, node, a["dim"], a["start"], a["stop"])[0]


def _select(job, node, a):
    stop = a["index"] + 1 or None  # index -1 ends at the end
    value, axis = _slice_of(job, node, a["dim"], a["index"], stop)
    shape = list(job.emitter.shape(value))
    return job.emitter.reshape(value, shape[:axis] + shape[axis + 1:])


RULES = {
    "Conv2d": _conv, "BatchNorm2d": _batch_norm, "ZeroPad2d": _zero_pad, "LayerNorm": _layer_norm, "GroupNorm": _group_norm,
    "Linear": _linear, "MaxPool2d": _max_pool, "AvgPool2d": _average_pool, "AdaptiveAvgPool2d": _adaptive_pool,
    "adaptive_avg_pool2d": _adaptive_pool, "Identity": _same, "Dropout": _same, "Flatten": _flatten, "flatten": _flatten,
    "ReLU": _unary("relu"), "relu": _unary("relu"), "ReLU6": _clamp, "relu6": _clamp,
    "Hardswish": _unary("hardswish"), "hardswish": _unary("hardswish"), "Hardsigmoid": _unary("hardsigmoid"),
    "hardsigmoid": _unary("hardsigmoid"), "SiLU": _unary("silu"), "silu": _unary("silu"), "Sigmoid": _unary("sigmoid"),
    "sigmoid": _unary("sigmoid"), "Tanh": _unary("tanh"), "tanh": _unary("tanh"), "GELU": _unary("gelu"), "gelu": _unary("gelu"),
    "Softmax": lambda job, node, a: job.emitter.softmax(job.input(node), a["dim"]),
    "softmax": lambda job, node, a: job.emitter.softmax(job.input(node), a["dim"]),
    "add": _binary("add"), "sub": _binary("sub"), "mul": _binary("mul"), "div": _binary("div"),
    "matmul": lambda job, node, a: job.emitter.matmul(job.input(node, 0), job.input(node, 1), False),
    "linear": lambda job, node, a: _product(job, *(job.inputs(node) + [None])[:3]),
    "attention": lambda job, node, a: job.emitter.attention(*job.inputs(node)),
    "cat": lambda job, node, a: job.emitter.concatenate(job.inputs(node), a["dim"]),
    "reshape": lambda job, node, a: job.emitter.reshape(job.input(node), a["shape"]),
    "mean": lambda job, node, a: job.emitter.mean(job.input(node), a["dims"], a["keepdim"]),
    "permute": _permute, "transpose": _transpose, "slice": _slice, "select": _select,
    "parameter": _parameter, "expand_batch": _expand_batch,
}
