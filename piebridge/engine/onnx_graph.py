"""An ONNX graph that grows node by node: values with known shapes and types, constants kept once, and the few operators that every
rule needs. The onnx package is imported when a graph is made, not before.
"""

import math
from collections import namedtuple

import numpy as np
import torch

from piebridge.core.errors import UserError

OPSET = 17  # the first with LayerNormalization
IR_VERSION = 8  # its companion; older runtimes refuse newer ones
INLINE_NUMBERS = 64  # constants of at most so many numbers are compared, and kept once
LEAST_INT64 = -2 ** 63
ELEMENT_TYPES = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16",
                 torch.int64: "INT64", torch.int32: "INT32", torch.int16: "INT16", torch.int8: "INT8", torch.uint8: "UINT8",
                 torch.bool: "BOOL"}

# A value: ONNX knows it by name only, so shape (tuple) and torch type are kept here
Tensor = namedtuple("Tensor", "name shape dtype")


class OnnxGraph:
    """nodes and initializers so far, as protobuf messages; constants: {name: torch tensor} of the latter."""

    def __init__(self):
        try:
            import onnx
            from onnx import helper, numpy_helper
        except ImportError:
            raise UserError("engine: writing ONNX needs the package onnx; pip install 'piebridge[engine]', or use backend=eager") from None
        self._onnx, self._helper, self._to_tensor = onnx, helper, numpy_helper.from_array
        self.nodes, self.initializers, self.constants, self._count = [], [], {}, 0
        self._known, self._unshaped = {}, {}  # small constants by content; what a reshaped value was before

    def node(self, operation, inputs, shape, dtype, **attributes):
        """The one result of a further node."""
        return self.nodes_results(operation, inputs, [(shape, dtype)], **attributes)[0]

    def nodes_results(self, operation, inputs, results, **attributes):
        """A further node's results, [(shape, dtype)] -> [Tensor]."""
        outputs = [Tensor(self._name(), tuple(shape), dtype) for shape, dtype in results]
        names = ["" if each is None else each.name for each in inputs]
        self.nodes.append(self._helper.make_node(operation, names, [each.name for each in outputs], **attributes))
        return outputs

    def declared(self, name, shape, dtype):
        """An input of the graph."""
        return Tensor(name, tuple(shape), dtype)

    def named(self, name, value):
        """The same value under a name of its own: an output of the graph."""
        self.nodes.append(self._helper.make_node("Identity", [value.name], [name]))
        return Tensor(name, value.shape, value.dtype)

    def _name(self):
        self._count += 1
        return f"v{self._count}"

    def constant(self, tensor, name=None):
        """A torch tensor as an initializer; small ones without a name of their own are kept once."""
        tensor = tensor.detach().cpu().contiguous()
        key = None
        if name is None and tensor.numel() <= INLINE_NUMBERS:
            key = (tuple(tensor.shape), tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            if key in self._known:
                return self._known[key]
        name = self._name() if name is None else name
        if tensor.dtype == torch.bfloat16:
            bits = tensor.view(torch.int16).numpy().tobytes()
            self.initializers.append(self._helper.make_tensor(name, self._onnx.TensorProto.BFLOAT16, list(tensor.shape), bits, raw=True))
        else:
            self.initializers.append(self._to_tensor(tensor.numpy(), name))
        value = Tensor(name, tuple(tensor.shape), tensor.dtype)
        self.constants[name] = tensor
        if key is not None:
            self._known[key] = value
        return value

    def number(self, value, dtype):
        return self.constant(torch.tensor(value, dtype=dtype))

    def indices(self, values):
        return self.constant(torch.tensor(list(values), dtype=torch.int64))

    def cast(self, x, dtype):
        if x.dtype == dtype:
            return x
        return self.node("Cast", [x], x.shape, dtype, to=self.element_type(dtype))

    def operand(self, x, dtype):
        """A tensor or a number as a tensor of this type."""
        return self.cast(x, dtype) if isinstance(x, Tensor) else self.number(x, dtype)

    def element_type(self, dtype):
        return getattr(self._onnx.TensorProto, ELEMENT_TYPES[dtype])

    def reshape(self, x, shape):
        shape = tuple(shape)
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(math.prod(x.shape) // known if size == -1 else size for size in shape)
        x = self._unshaped.get(x.name, x)
        if shape == x.shape:
            return x
        known = self.constants.get(x.name)
        if known is not None and known.numel() <= INLINE_NUMBERS:
            return self.constant(known.reshape(shape))
        reshaped = self.node("Reshape", [x, self.indices(shape)], shape, x.dtype)
        self._unshaped[reshaped.name] = x
        return reshaped

    def transpose(self, x, order):
        order = [axis % len(x.shape) for axis in order]
        shape, moved = [x.shape[axis] for axis in order], [axis for axis in order if x.shape[axis] > 1]
        if moved == sorted(moved):  # nothing moves in memory
            return self.reshape(x, shape)
        return self.node("Transpose", [x], shape, x.dtype, perm=order)

    def expand(self, x, shape):
        shape = tuple(shape)
        return x if shape == x.shape else self.node("Expand", [x, self.indices(shape)], shape, x.dtype)

    def slice(self, x, axes, starts, stops, steps=None):
        """starts and stops within the sizes; a step of -1 goes from start down to, and without, stop (-1: to the very first)."""
        steps = steps or [1] * len(axes)
        shape = list(x.shape)
        for axis, start, stop, step in zip(axes, starts, stops, steps):
            shape[axis] = max(0, -((start - stop) // step))
        if tuple(shape) == x.shape and all(step == 1 for step in steps):
            return x
        stops = [LEAST_INT64 if step < 0 and stop < 0 else stop for stop, step in zip(stops, steps)]
        return self.node("Slice", [x] + [self.indices(each) for each in (starts, stops, axes, steps)], shape, x.dtype)

    def flip(self, x, axes):
        axes = [axis for axis in axes if x.shape[axis] > 1]
        if not axes:
            return x
        return self.slice(x, axes, [x.shape[axis] - 1 for axis in axes], [-1] * len(axes), [-1] * len(axes))

    def pad(self, x, begins, ends, value=0.0):
        """Constant padding; negative ones crop."""
        axes = list(range(len(x.shape)))
        x = self.slice(x, axes, [max(0, -begin) for begin in begins], [size - max(0, -end) for size, end in zip(x.shape, ends)])
        begins, ends = [max(0, begin) for begin in begins], [max(0, end) for end in ends]
        if not any(begins + ends):
            return x
        shape = [size + begin + end for size, begin, end in zip(x.shape, begins, ends)]
        return self.node("Pad", [x, self.indices(begins + ends), self.number(value, x.dtype)], shape, x.dtype, mode="constant")

    def concatenate(self, values, axis):
        if len(values) == 1:
            return values[0]
        shape = list(values[0].shape)
        shape[axis] = sum(value.shape[axis] for value in values)
        return self.node("Concat", values, shape, values[0].dtype, axis=axis)

    def reduce_sum(self, x, axes, keepdim=False):
        shape = reduced(x.shape, axes, keepdim)
        return self.node("ReduceSum", [x, self.indices(axes)], shape, x.dtype, keepdims=int(keepdim)) if axes else x

    def matmul(self, a, b):
        shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2], b.shape[-1])
        return self.node("MatMul", [a, b], shape, a.dtype)

    def filled(self, value, shape, dtype):
        """`value` everywhere; not stored at full size."""
        if math.prod(shape) <= INLINE_NUMBERS:
            return self.constant(torch.full(tuple(shape), value, dtype=dtype))
        return self.expand(self.number(value, dtype), shape)

    def model(self, inputs, outputs, facts):
        """ModelProto of what the outputs need. inputs, outputs: [Tensor]; facts: {str: str}, kept in the file."""
        nodes, needed = [], {each.name for each in outputs}
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                nodes.append(node)
                needed.update(node.input)
        nodes.reverse()
        initializers = [each for each in self.initializers if each.name in needed]
        declared = [[self._helper.make_tensor_value_info(each.name, self.element_type(each.dtype), list(each.shape)) for each in group]
                    for group in (inputs, outputs)]
        graph = self._helper.make_graph(nodes, "step", declared[0], declared[1], initializers)
        model = self._helper.make_model(graph, opset_imports=[self._helper.make_opsetid("", OPSET)], ir_version=IR_VERSION,
                                        producer_name="piebridge")
        self._helper.set_model_props(model, facts)
        return model


def reduced(shape, axes, keepdim):
    """The shape after a reduction over `axes`."""
    axes = {axis % len(shape) for axis in axes}
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keepdim or axis not in axes)


def axes_of(x, dims):
    """The axes that a reduction of PyTorch's goes over, ascending: `dims` is an int, a list, or empty for all."""
    dims = [dims] if isinstance(dims, int) else list(dims or range(len(x.shape)))
    return sorted(dim % len(x.shape) for dim in dims) if x.shape else []
