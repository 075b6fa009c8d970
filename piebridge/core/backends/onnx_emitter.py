"""An ONNX graph as an emitter (see core/backends/translation.py).

The onnx package is imported when an emitter is made, not before.
"""

import math
from collections import namedtuple

import numpy as np

OPSET = 17  # the first with LayerNormalization
IR_VERSION = 8  # its companion; older runtimes refuse newer ones

# A value of the graph; ONNX knows values by name only, so their shapes are kept here
_Tensor = namedtuple("_Tensor", "name shape")


class OnnxEmitter:
    """Builds an ONNX model of static shapes, float32."""

    def __init__(self):
        import onnx
        from onnx import helper, numpy_helper
        self._onnx, self._helper, self._to_tensor = onnx, helper, numpy_helper.from_array
        self._nodes, self._constants = [], []

    def parameter(self, shape):
        return _Tensor("images", tuple(shape))

    def model(self, parameter, output):
        info = [self._helper.make_tensor_value_info(each.name, self._onnx.TensorProto.FLOAT, list(each.shape))
                for each in (parameter, output)]
        graph = self._helper.make_graph(self._nodes, "segment", [info[0]], [info[1]], self._constants)
        return self._helper.make_model(graph, opset_imports=[self._helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)

    def constant(self, array):
        array = np.asarray(array, order="C")
        name = f"c{len(self._constants)}"
        self._constants.append(self._to_tensor(array, name))
        return _Tensor(name, array.shape)

    def shape(self, value):
        return value.shape

    def convolution(self, x, weight, bias, strides, begin, end, dilations, groups, moments=None):
        kernel = list(weight.shape[2:])
        inputs = [x, self.constant(weight)] + ([] if bias is None else [self.constant(bias)])
        shape = (x.shape[0], weight.shape[0]) + _windows(x.shape, kernel, strides, begin, end, dilations)
        return self._node("Conv", inputs, shape, kernel_shape=kernel, strides=strides, pads=begin + end, dilations=dilations,
                          group=groups)

    def matmul(self, a, b, is_transposed):
        if is_transposed:
            rank = len(b.shape)
            b = self.permute(b, list(range(rank - 2)) + [rank - 1, rank - 2])
        shape = _broadcast(a.shape[:-2], b.shape[:-2]) + (a.shape[-2], b.shape[-1])
        return self._node("MatMul", [a, b], shape)

    def pad(self, x, begin, end, mode):
        mode = {"zeros": "constant", "reflect": "reflect", "replicate": "edge"}[mode]
        begin, end = [0, 0] + begin, [0, 0] + end
        shape = tuple(size + before + after for size, before, after in zip(x.shape, begin, end))
        return self._node("Pad", [x, self._indices(begin + end)], shape, mode=mode)

    def binary(self, kind, a, b):
        kind = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}[kind]
        return self._node(kind, [a, b], _broadcast(a.shape, b.shape))

    def unary(self, kind, x):
        if kind == "silu":
            return self.binary("mul", x, self.unary("sigmoid", x))
        if kind == "gelu":  # x/2 (1 + erf(x / sqrt 2)); Gelu itself came with opset 20
            erf = self._node("Erf", [self.binary("mul", x, self._number(math.sqrt(0.5)))], x.shape)
            half = self.binary("mul", x, self._number(0.5))
            return self.binary("mul", half, self.binary("add", erf, self._number(1.0)))
        if kind == "hardsigmoid":
            return self._node("HardSigmoid", [x], x.shape, alpha=1 / 6, beta=0.5)
        return self._node({"relu": "Relu", "hardswish": "HardSwish", "sigmoid": "Sigmoid", "tanh": "Tanh"}[kind], [x], x.shape)

    def clamp(self, x, low, high):
        return self._node("Clip", [x, self._number(low), self._number(high)], x.shape)

    def softmax(self, x, axis):
        return self._node("Softmax", [x], x.shape, axis=axis)

    def layer_norm(self, x, axes, weight, bias, eps):
        weight = np.ones(x.shape[axes[0]:], dtype=np.float32) if weight is None else weight
        inputs = [x, self.constant(weight)] + ([] if bias is None else [self.constant(bias)])
        return self._node("LayerNormalization", inputs, x.shape, axis=axes[0], epsilon=eps)

    def attention(self, query, key, value):
        query = self.binary("mul", query, self._number(query.shape[-1] ** -0.5))
        return self.matmul(self.softmax(self.matmul(query, key, True), -1), value, False)

    def max_pool(self, x, kernel, strides, begin, end, dilations):
        shape = x.shape[:2] + _windows(x.shape, kernel, strides, begin, end, dilations)
        return self._node("MaxPool", [x], shape, kernel_shape=kernel, strides=strides, pads=begin + end, dilations=dilations)

    def average_pool(self, x, kernel, strides, begin, end, counts_padding):
        shape = x.shape[:2] + _windows(x.shape, kernel, strides, begin, end, [1, 1])
        return self._node("AveragePool", [x], shape, kernel_shape=kernel, strides=strides, pads=begin + end,
                          count_include_pad=int(counts_padding))

    def mean(self, x, axes, keepdim):
        gone = [axis % len(x.shape) for axis in axes]
        shape = tuple(1 if axis in gone else size for axis, size in enumerate(x.shape) if keepdim or axis not in gone)
        return self._node("ReduceMean", [x], shape, axes=gone, keepdims=int(keepdim))

    def reshape(self, x, shape):
        known = -int(np.prod([size for size in shape if size > 0])) if -1 in shape else 1
        shape = [int(np.prod(x.shape)) // -known if size == -1 else size for size in shape]
        return self._node("Reshape", [x, self._indices(shape)], tuple(shape))

    def permute(self, x, order):
        return self._node("Transpose", [x], tuple(x.shape[axis] for axis in order), perm=order)

    def concatenate(self, values, axis):
        axis %= len(values[0].shape)
        shape = list(values[0].shape)
        shape[axis] = sum(value.shape[axis] for value in values)
        return self._node("Concat", values, tuple(shape), axis=axis)

    def slice(self, x, axis, start, stop):
        shape = list(x.shape)
        shape[axis] = stop - start
        return self._node("Slice", [x] + [self._indices([number]) for number in (start, stop, axis)], tuple(shape))

    def _node(self, operation, inputs, shape, **attributes):
        name = f"v{len(self._nodes)}"
        self._nodes.append(self._helper.make_node(operation, [each.name for each in inputs], [name], **attributes))
        return _Tensor(name, tuple(shape))

    def _indices(self, values):
        return self.constant(np.array(values, dtype=np.int64))

    def _number(self, value):
        return self.constant(np.array(value, dtype=np.float32))


def _broadcast(first, second):
    return np.broadcast(np.empty(first), np.empty(second)).shape if first or second else ()


def _windows(shape, kernel, strides, begin, end, dilations):
    """(height, width) after a convolution or pooling."""
    return tuple((size + before + after - dilation * (k - 1) - 1) // stride + 1
                 for size, k, stride, before, after, dilation in zip(shape[2:], kernel, strides, begin, end, dilations))
