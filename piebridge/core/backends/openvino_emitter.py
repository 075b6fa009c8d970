"""OpenVINO's graph as an emitter (see core/backends/translation.py). OpenVINO is imported when an emitter is made, not before."""

import numpy as np

from piebridge.core.backends.quiet_imports import import_openvino
from piebridge.core.backends.segment import Unsupported


class OpenVinoEmitter:
    """Builds an `openvino.Model` of static shapes, float32."""

    def __init__(self):
        openvino = import_openvino()
        from openvino import opset1, opset13
        self._openvino, self._ops = openvino, opset13
        self._max_pool = opset1.max_pool  # later ones also return indices
        self._binary = {"add": opset13.add, "sub": opset13.subtract, "mul": opset13.multiply, "div": opset13.divide}
        self._unary = {"relu": opset13.relu, "hardswish": opset13.hswish, "sigmoid": opset13.sigmoid, "silu": opset13.swish,
                       "tanh": opset13.tanh, "gelu": lambda x: opset13.gelu(x, "erf"), "hardsigmoid": opset13.hsigmoid}

    def parameter(self, shape):
        return self._ops.parameter(list(shape), self._openvino.Type.f32, name="images")

    def model(self, parameter, output):
        return self._openvino.Model([self._ops.result(output)], [parameter], "segment")

    def constant(self, array):
        return self._ops.constant(np.asarray(array, order="C"))

    def shape(self, value):
        return tuple(value.get_output_shape(0))

    def convolution(self, x, weight, bias, strides, begin, end, dilations, groups, moments=None):
        y = self._convolve(x, self.constant(_grouped(weight, groups)), strides, begin, end, dilations, groups)
        return y if bias is None else self._ops.add(y, self.constant(bias.reshape(1, -1, 1, 1)))

    def _convolve(self, x, weight, strides, begin, end, dilations, groups):
        function = self._ops.convolution if groups == 1 else self._ops.group_convolution
        return function(x, weight, strides, begin, end, dilations)

    def matmul(self, a, b, is_transposed):
        return self._ops.matmul(a, b, False, is_transposed)

    def pad(self, x, begin, end, mode):
        mode = {"zeros": "constant", "reflect": "reflect", "replicate": "edge"}[mode]
        return self._ops.pad(x, self._indices([0, 0] + begin), self._indices([0, 0] + end), mode)

    def binary(self, kind, a, b):
        return self._binary[kind](a, b)

    def unary(self, kind, x):
        return self._unary[kind](x)

    def clamp(self, x, low, high):
        return self._ops.clamp(x, low, high)

    def softmax(self, x, axis):
        return self._ops.softmax(x, axis)

    def layer_norm(self, x, axes, weight, bias, eps):
        y = self._ops.mvn(x, self._indices(axes), True, eps, "inside_sqrt")
        y = y if weight is None else self._ops.multiply(y, self.constant(weight))
        return y if bias is None else self._ops.add(y, self.constant(bias))

    def attention(self, query, key, value):
        return self._ops.scaled_dot_product_attention(query, key, value)

    def max_pool(self, x, kernel, strides, begin, end, dilations):
        if dilations != [1, 1]:
            raise Unsupported(f"max pooling with dilation {dilations} is not translated")
        return self._max_pool(x, strides, begin, end, kernel, "floor", "explicit")

    def average_pool(self, x, kernel, strides, begin, end, counts_padding):
        return self._ops.avg_pool(x, strides, begin, end, kernel, not counts_padding, "floor", "explicit")

    def mean(self, x, axes, keepdim):
        return self._ops.reduce_mean(x, self._indices(axes), keepdim)

    def reshape(self, x, shape):
        return self._ops.reshape(x, self._indices(shape), False)

    def permute(self, x, order):
        return self._ops.transpose(x, self._indices(order))

    def concatenate(self, values, axis):
        return self._ops.concat(values, axis)

    def slice(self, x, axis, start, stop):
        return self._ops.slice(x, self._indices([start]), self._indices([stop]), self._indices([1]), self._indices([axis]))

    def _indices(self, values):
        return self._ops.constant(np.array(values, dtype=np.int64))


def _grouped(weight, groups):
    """[O,I/G,h,w] -> [G,O/G,I/G,h,w], the layout of a group convolution."""
    return weight if groups == 1 else weight.reshape((groups, weight.shape[0] // groups) + weight.shape[1:])
