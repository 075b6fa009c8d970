"""ATen operator -> standard ONNX nodes (opset 17): numbers, comparisons, reductions and products.

A rule is called as `rule(graph, result, *arguments, **keywords)`: graph an OnnxGraph, arguments with Tensors where ATen has tensors,
result a Result, what the operator gives according to PyTorch. It returns a Tensor, or a list of them (None: not used).
"""

import math
from collections import namedtuple

import torch

from piebridge.engine import onnx_convolutions, onnx_layout, onnx_normalisation
from piebridge.engine.onnx_graph import Tensor, axes_of

# shape and dtype of the (first) result; results: [(shape, dtype)]; used: positions of those of several that something reads
Result = namedtuple("Result", "shape dtype results used")


SMALL = (torch.uint8, torch.int8, torch.int16)  # runtimes compute with larger ones only


def _wide(dtype):
    return torch.int32 if dtype in SMALL else dtype


def _arithmetic(operation):
    def rule(graph, result, a, b, alpha=1):
        wide = _wide(result.dtype)
        a, b = graph.operand(a, wide), graph.operand(b, wide)
        if alpha != 1:
            b = graph.node("Mul", [b, graph.number(alpha, wide)], b.shape, wide)
        return graph.cast(graph.node(operation, [a, b], result.shape, wide), result.dtype)
    return rule


def _divided(graph, result, a, b, rounding_mode=None):
    """Of whole numbers, rounded down: what Mod leaves divides without a rest."""
    if rounding_mode is None:
        return _arithmetic("Div")(graph, result, a, b)
    if rounding_mode != "floor" or result.dtype.is_floating_point:
        return None
    wide = _wide(result.dtype)
    a, b = graph.operand(a, wide), graph.operand(b, wide)
    rest = graph.node("Mod", [a, b], result.shape, wide)
    divisible = graph.node("Sub", [a, rest], result.shape, wide)
    return graph.cast(graph.node("Div", [divisible, b], result.shape, wide), result.dtype)


def _reversed_subtraction(graph, result, a, b, alpha=1):
    return _arithmetic("Sub")(graph, result, b, a if alpha == 1 else _arithmetic("Mul")(graph, result, a, alpha))


def _product(graph, result, a, b):
    if result.dtype == torch.bool:
        return graph.node("And", [a, b], result.shape, torch.bool)
    return _arithmetic("Mul")(graph, result, a, b)


def _square_or_power(graph, result, a, b):
    a = graph.operand(a, result.dtype)
    if b == 2:  # a general power costs tens of products
        return graph.node("Mul", [a, a], result.shape, result.dtype)
    return graph.node("Pow", [a, graph.operand(b, result.dtype)], result.shape, result.dtype)


def _common_type(a, b):
    types = [each.dtype for each in (a, b) if isinstance(each, Tensor)]
    common = types[0] if len(types) == 1 else torch.promote_types(*types)
    if any(isinstance(each, float) for each in (a, b)) and not common.is_floating_point:
        common = torch.float32
    return common


def _comparison(operation, is_negated=False):
    def rule(graph, result, a, b):
        common = _common_type(a, b)
        common = torch.int32 if common == torch.bool else _wide(common)
        compared = graph.node(operation, [graph.operand(a, common), graph.operand(b, common)], result.shape, torch.bool)
        return graph.node("Not", [compared], result.shape, torch.bool) if is_negated else compared
    return rule


def _bits(graph, result, a, b):
    """And of truths, or of small numbers with constant powers of two, as packed masks have it: bits as such came with opset 18."""
    if result.dtype == torch.bool:
        return _logic("And")(graph, result, a, b)
    powers = graph.constants.get(b.name) if isinstance(b, Tensor) else None
    if result.dtype not in SMALL or powers is None or any(bin(number).count("1") != 1 for number in powers.flatten().tolist()):
        return None
    a, b = graph.cast(a, torch.int32), graph.cast(b, torch.int32)
    shifted = graph.node("Div", [a, b], result.shape, torch.int32)
    bit = graph.node("Mod", [shifted, graph.number(2, torch.int32)], result.shape, torch.int32)
    return graph.cast(graph.node("Mul", [bit, b], result.shape, torch.int32), result.dtype)


def _logic(operation):
    def rule(graph, result, *operands):
        if result.dtype != torch.bool:
            return None
        return graph.node(operation, [graph.operand(each, torch.bool) for each in operands], result.shape, torch.bool)
    return rule


def _unary(operation, **attributes):
    def rule(graph, result, x):
        return graph.node(operation, [graph.cast(x, result.dtype)], result.shape, result.dtype, **attributes)
    return rule


def _reciprocal_root(graph, result, x):
    root = graph.node("Sqrt", [graph.cast(x, result.dtype)], result.shape, result.dtype)
    return graph.node("Reciprocal", [root], result.shape, result.dtype)


def _identity(graph, result, x, *arguments, **keywords):
    """Layouts in memory mean nothing to ONNX."""
    return graph.cast(x, result.dtype)


def _copy(graph, result, x, source, *arguments):
    return graph.expand(graph.cast(source, result.dtype), result.shape)


def _clamp(graph, result, x, low=None, high=None):
    x = graph.cast(x, result.dtype)
    for operation, bound in (("Max", low), ("Min", high)):
        if bound is not None and (isinstance(bound, Tensor) or not result.dtype.is_floating_point):
            x = graph.node(operation, [x, graph.operand(bound, result.dtype)], result.shape, result.dtype)
    if result.dtype.is_floating_point and not any(isinstance(bound, Tensor) for bound in (low, high)):
        bounds = [None if bound is None else graph.number(bound, result.dtype) for bound in (low, high)]
        x = graph.node("Clip", [x] + bounds, result.shape, result.dtype)
    return x


def _hardtanh(graph, result, x, low=-1.0, high=1.0):
    return _clamp(graph, result, x, float(low), float(high))


def _gelu(graph, result, x, approximate="none"):
    def scaled(value, number):
        return graph.node("Mul", [value, graph.number(number, x.dtype)], x.shape, x.dtype)
    if approximate == "tanh":  # sqrt(2 / pi) (x + 0.044715 x^3)
        cube = graph.node("Mul", [graph.node("Mul", [x, x], x.shape, x.dtype), x], x.shape, x.dtype)
        inner = graph.node("Add", [x, scaled(cube, 0.044715)], x.shape, x.dtype)
        curve = graph.node("Tanh", [scaled(inner, math.sqrt(2 / math.pi))], x.shape, x.dtype)
    else:
        curve = graph.node("Erf", [scaled(x, math.sqrt(0.5))], x.shape, x.dtype)
    return graph.node("Mul", [scaled(x, 0.5), graph.node("Add", [curve, graph.number(1.0, x.dtype)], x.shape, x.dtype)], x.shape, x.dtype)


def _where(graph, result, condition, a, b):
    operands = [graph.operand(each, result.dtype) for each in (a, b)]
    return graph.node("Where", [condition] + operands, result.shape, result.dtype)


def _softmax(operation):
    def rule(graph, result, x, dim, is_half_to_float=False):
        return graph.node(operation, [graph.cast(x, result.dtype)], result.shape, result.dtype, axis=dim % max(1, len(x.shape)))
    return rule


def _sum(graph, result, x, dims=None, keepdim=False, dtype=None):
    return graph.cast(graph.reduce_sum(graph.cast(x, _wide(result.dtype)), axes_of(x, dims), keepdim), result.dtype)


def _reduction(operation):
    def rule(graph, result, x, dims=None, keepdim=False, dtype=None):
        axes = axes_of(x, dims)
        x = graph.cast(x, result.dtype)
        return graph.node(operation, [x], result.shape, result.dtype, axes=axes, keepdims=int(keepdim)) if axes else x
    return rule


def _any(graph, result, x, dims=None, keepdim=False):
    truth, axes = graph.cast(x, torch.bool), axes_of(x, dims)
    if not axes:
        return truth
    return graph.cast(graph.node("ReduceMax", [graph.cast(truth, torch.int32)], result.shape, torch.int32, axes=axes,
                                 keepdims=int(keepdim)), torch.bool)


def _matmul(graph, result, a, b):
    return graph.matmul(a, b)


def _matmul_added(graph, result, bias, a, b, beta=1, alpha=1):
    value = _scaled(graph, graph.matmul(a, b), alpha)
    return graph.node("Add", [value, _scaled(graph, bias, beta)], result.shape, result.dtype)


def _scaled(graph, x, number):
    return x if number == 1 else graph.node("Mul", [x, graph.number(number, x.dtype)], x.shape, x.dtype)


def _cumulated(graph, result, x, dim, dtype=None):
    return graph.node("CumSum", [graph.cast(x, result.dtype), graph.number(dim % len(x.shape), torch.int64)], result.shape, result.dtype)


def _filled(graph, result, shape_or_like, value, **keywords):
    return graph.filled(value, result.shape, result.dtype)


def _arange(graph, result, start, stop, step=1, **keywords):
    return graph.constant(torch.arange(start, stop, step, dtype=result.dtype))


def _scalar(graph, result, value, **keywords):
    return graph.number(value, result.dtype)


def _with_both(names, rule):
    return {f"{name}.{kind}": rule for name in names.split() for kind in ("Tensor", "Scalar")}


RULES = {
    **_with_both("add", _arithmetic("Add")), **_with_both("sub", _arithmetic("Sub")), **_with_both("div", _divided),
    **_with_both("mul", _product), **_with_both("rsub", _reversed_subtraction),
    "div.Tensor_mode": _divided,
    "pow.Tensor_Scalar": _square_or_power, "pow.Tensor_Tensor": _arithmetic("Pow"), "pow.Scalar": _arithmetic("Pow"),
    "maximum.default": _arithmetic("Max"), "minimum.default": _arithmetic("Min"),
    **_with_both("eq", _comparison("Equal")), **_with_both("ne", _comparison("Equal", is_negated=True)),
    **_with_both("lt", _comparison("Less")), **_with_both("le", _comparison("LessOrEqual")),
    **_with_both("gt", _comparison("Greater")), **_with_both("ge", _comparison("GreaterOrEqual")),
    "logical_and.default": _logic("And"), "logical_or.default": _logic("Or"), "logical_xor.default": _logic("Xor"),
    "logical_not.default": _logic("Not"), "bitwise_not.default": _logic("Not"),
    "bitwise_and.Tensor": _bits, "bitwise_or.Tensor": _logic("Or"), "bitwise_xor.Tensor": _logic("Xor"),
    **{f"{name}.default": _unary(operation) for name, operation in {
        "relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "neg": "Neg", "abs": "Abs",
        "erf": "Erf", "sin": "Sin", "cos": "Cos", "reciprocal": "Reciprocal", "sign": "Sign", "floor": "Floor", "ceil": "Ceil",
        "round": "Round", "isnan": "IsNaN"}.items()},
    "rsqrt.default": _reciprocal_root, "clamp.default": _clamp, "clamp.Tensor": _clamp, "hardtanh.default": _hardtanh,
    "gelu.default": _gelu, "where.self": _where, "_softmax.default": _softmax("Softmax"), "_log_softmax.default": _softmax("LogSoftmax"),
    "sum.dim_IntList": _sum, "sum.default": _sum, "mean.dim": _reduction("ReduceMean"), "mean.default": _reduction("ReduceMean"),
    "amax.default": _reduction("ReduceMax"), "amin.default": _reduction("ReduceMin"),
    "any.dim": _any, "any.dims": _any, "any.default": _any,
    "cumsum.default": _cumulated,
    "mm.default": _matmul, "bmm.default": _matmul, "addmm.default": _matmul_added, "baddbmm.default": _matmul_added,
    "clone.default": _identity, "alias.default": _identity, "detach.default": _identity, "_to_copy.default": _identity,
    "lift_fresh_copy.default": _identity, "contiguous.default": _identity, "copy.default": _copy,
    "full.default": _filled, "full_like.default": _filled, "arange.start_step": _arange, "scalar_tensor.default": _scalar,
    **onnx_layout.RULES, **onnx_normalisation.RULES, **onnx_convolutions.RULES,
}
