"""A step's graph as a JSON value, and back: calls of known operators on named values, nothing that could run code.

References are texts "%name"; literals that JSON lacks are objects with one key: {"dtype": "float32"}, {"text": "tanh"}, {"float": "inf"}.
"""

import math
import operator
import re

import torch
from torch import fx

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.engine import compat
from piebridge.engine.step_graph import (
    BATCH,
    BUFFER,
    COUNT,
    DRAW,
    FROZEN,
    INDEX,
    LOSSES,
    OUTPUTS,
    RATE,
    STATE,
    TRAINED,
    WEIGHTS,
    StepGraph,
    Value,
)

LARGEST_VALUE_BYTES = 1 << 36
GETITEM = "getitem"
# every ATen operator that a graph may call, whatever its overload: pure functions of their arguments
OPERATORS = frozenset("""
    abs acos acosh add addbmm addcdiv addcmul addmm addmv alias all amax amin any arange argmax argmin argsort as_strided asin asinh
    atan atan2 atanh avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward baddbmm bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm cat ceil celu clamp clamp_max clamp_min clone col2im constant_pad_nd
    convolution convolution_backward copy cos cosh cumprod cumsum detach diagonal diagonal_scatter div dot elu elu_backward embedding
    embedding_dense_backward empty empty_like empty_strided eq erf erfc exp exp2 expand expm1 eye fill flip floor floor_divide fmax
    fmin fmod full full_like gather ge gelu gelu_backward glu glu_backward grid_sampler_2d grid_sampler_2d_backward gt hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward im2col index index_add index_copy index_fill
    index_put index_select isinf isnan le leaky_relu leaky_relu_backward lerp lift_fresh_copy linalg_vector_norm log log10 log1p log2
    log_sigmoid_forward log_sigmoid_backward logical_and logical_not logical_or logical_xor logsumexp lt masked_fill masked_scatter
    max max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward maximum mean
    min minimum mish mish_backward mm mul mv native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
    ne neg new_empty new_full new_ones new_zeros nll_loss_backward nll_loss_forward nll_loss2d_backward nll_loss2d_forward norm ones
    ones_like permute pixel_shuffle pixel_unshuffle pow prod reciprocal reflection_pad1d reflection_pad1d_backward reflection_pad2d
    reflection_pad2d_backward relu remainder repeat replication_pad1d replication_pad2d reshape roll round rsqrt rsub scalar_tensor
    scatter scatter_add scatter_reduce select select_backward select_scatter sgn sigmoid sigmoid_backward sign silu silu_backward sin
    sinh slice slice_backward slice_scatter softplus softplus_backward sort split split_with_sizes sqrt squeeze stack std sub sum t
    tan tanh tanh_backward threshold_backward topk transpose tril triu trunc unfold unfold_backward unsqueeze upsample_bicubic2d
    upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest1d upsample_nearest1d_backward
    upsample_nearest2d upsample_nearest2d_backward var var_mean view where zeros zeros_like _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward _cdist_forward _log_softmax
    _log_softmax_backward_data _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _safe_softmax _softmax
    _softmax_backward_data _to_copy _unsafe_index _unsafe_index_put _unsafe_view _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa_backward
""".split())
INPUT_ROLES = (TRAINED, FROZEN, BUFFER, INDEX, STATE, BATCH, WEIGHTS, RATE, COUNT, DRAW)
OUTPUT_ROLES = (LOSSES, OUTPUTS, TRAINED, STATE, BUFFER)
_TYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
                                                  "bool")}
_LITERALS = {
    "dtype": _TYPES,
    "memory_format": {name: getattr(torch, name) for name in ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")},
    "layout": {"strided": torch.strided},
    "float": {name: float(name) for name in ("inf", "-inf", "nan")},
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,2})?")


def graph_to_json(step):
    """{"inputs", "constants", "calls", "results"} of a StepGraph. UserError where it calls what a program file may not hold."""
    inputs = [dict(_value_to_json(value), node=node.name, stride=_stride(node)) for node, value in zip(step.placeholders, step.inputs)]
    constants = [[node.name, node.target] for node in step.graph.nodes if node.op == "get_attr"]
    calls = [[node.name, _operator_name(node), _to_json(node.args), {key: _to_json(each) for key, each in node.kwargs.items()}]
             for node in step.graph.nodes if node.op == "call_function"]
    results = [dict(_value_to_json(value), node=node.name) for node, value in zip(step.results, step.outputs)]
    return {"inputs": inputs, "constants": constants, "calls": calls, "results": results}


def graph_from_json(content, constants, parts):
    """The StepGraph of a JSON value, not yet propagated. constants: {name: tensor}. parts: {key: Part}.

    UserError, one line, for whatever does not hold: an unknown operator, a reference to what is not there yet, a value too large.
    """
    _expect(isinstance(content, dict) and set(content) == {"inputs", "constants", "calls", "results"}, "its graph has other keys")
    _expect(all(isinstance(part, list) for part in content.values()), "its graph is no object of lists")
    reader = _Reader(constants)
    inputs = [reader.add_input(each) for each in content["inputs"]]
    for each in content["constants"]:
        reader.add_constant(each)
    for number, each in enumerate(content["calls"]):
        reader.add_call(number, each)
    outputs = [_value_from_json(each, OUTPUT_ROLES) for each in content["results"]]
    reader.graph.output(tuple(reader.node(each.get("node"), "its results") for each in content["results"]))
    return StepGraph(fx.GraphModule(reader.root, reader.graph), inputs, outputs, parts)


class _Reader:
    def __init__(self, constants):
        self.constants, self.nodes = constants, {}
        self.root, self.graph = torch.nn.Module(), fx.Graph()

    def _define(self, name, node):
        _expect(isinstance(name, str) and _NAME.fullmatch(name), f"{name!r:.60} is no name of a value")
        _expect(name not in self.nodes, f"it defines {name!r} twice")
        self.nodes[name] = node
        return node

    def node(self, name, where):
        _expect(isinstance(name, str) and name in self.nodes, f"{where} refer to {name!r:.60}, which is not defined before")
        return self.nodes[name]

    def add_input(self, content):
        value = _value_from_json(content, INPUT_ROLES)
        # names from a file go into no code: fx writes a function from them
        node = self._define(content.get("node"), self.graph.placeholder(f"input_{len(self.nodes)}"))
        stride = content.get("stride")
        if stride is not None:
            fits = _are_sizes(stride) and len(stride) == len(value.shape)
            reach = 1 + sum((extent - 1) * each for extent, each in zip(value.shape, stride)) if fits else 0
            _expect(fits and reach * 8 <= LARGEST_VALUE_BYTES, f"input {value.name!r:.60} has the stride {stride!r:.60}")
            with compat.fake_mode():
                node.meta["val"] = torch.empty_strided(value.shape, stride, dtype=value.dtype)
        return value

    def add_constant(self, content):
        is_pair = isinstance(content, list) and len(content) == 2 and all(isinstance(each, str) for each in content)
        _expect(is_pair, f"its constant {content!r:.60} is not [name, tensor]")
        name, key = content
        _expect(key in self.constants, f"its constant {key!r:.60} is missing")
        target = f"constant_{len(self.nodes)}"
        self.root.register_buffer(target, self.constants[key])
        self._define(name, self.graph.get_attr(target))

    def add_call(self, number, content):
        _expect(isinstance(content, list) and len(content) == 4, f"call {number} is not [name, operator, arguments, keywords]")
        name, target, arguments, keywords = content
        _expect(isinstance(name, str) and _NAME.fullmatch(name), f"call {number} has the name {name!r:.60}")
        where = f"the arguments of call {number} ({name:.60})"
        _expect(isinstance(arguments, list) and isinstance(keywords, dict), f"{where} are no list")
        arguments = tuple(self._argument(each, where) for each in arguments)
        keywords = {key: self._argument(each, where) for key, each in keywords.items()}
        _expect(all(_NAME.fullmatch(key) for key in keywords), f"{where} have a keyword that is no name")
        self._define(name, self.graph.create_node("call_function", _operator_of(target), arguments, keywords, name))

    def _argument(self, content, where):
        if content is None or isinstance(content, (bool, float)):
            return content
        if isinstance(content, int):
            _expect(abs(content) < 1 << 63, f"{where} hold the number {str(content)[:24]}...")
            return content
        if isinstance(content, list):
            return [self._argument(each, where) for each in content]
        if isinstance(content, str):
            return self.node(content[1:] if content.startswith("%") else content, where)
        _expect(isinstance(content, dict) and len(content) == 1, f"{where} hold {content!r:.60}")
        (kind, name), = content.items()
        _expect(isinstance(name, str), f"{where} hold {content!r:.60}")
        if kind == "text":
            return name
        if kind == "device":
            _expect(_DEVICE.fullmatch(name), f"{where} hold {content!r:.60}")
            return torch.device(name)
        _expect(name in _LITERALS.get(kind, ()), f"{where} hold {content!r:.60}")
        return _LITERALS[kind][name]


def _operator_name(node):
    if node.target is operator.getitem:
        return GETITEM
    name = str(node.target)
    if not isinstance(node.target, torch._ops.OpOverload) or name.split(".")[0] != "aten" or name.split(".")[1] not in OPERATORS:
        raise UserError(f"engine: {node.name} calls {name}, which a program file cannot hold")
    return name


def _operator_of(name):
    if name == GETITEM:
        return operator.getitem
    pieces = name.split(".") if isinstance(name, str) else []
    _expect(len(pieces) == 3 and pieces[0] == "aten" and pieces[1] in OPERATORS,
            f"it calls the operator {name!r:.60}, which is unknown{closest(name[5:], OPERATORS) if pieces[:1] == ['aten'] else ''}")
    packet = getattr(compat.aten(), pieces[1])
    _expect(pieces[2] in packet.overloads(), f"it calls the operator {name!r:.60}, which this PyTorch does not have")
    found = getattr(packet, pieces[2])
    _expect(not found._schema.is_mutable, f"it calls the operator {name!r:.60}, which writes into its arguments")
    return found


def _to_json(argument):
    if isinstance(argument, fx.Node):
        return "%" + argument.name
    if isinstance(argument, (list, tuple)):
        return [_to_json(each) for each in argument]
    if isinstance(argument, str):
        return {"text": argument}
    if isinstance(argument, torch.device):
        return {"device": str(argument)}
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    if argument is None or isinstance(argument, (bool, int, float)):
        return argument
    for kind, known in _LITERALS.items():
        for name, value in known.items():
            if argument is value:
                return {kind: name}
    raise UserError(f"engine: a program file cannot hold the argument {argument!r:.60} ({type(argument).__name__})")


def _value_to_json(value):
    return {"role": value.role, "name": value.name, "dtype": _type_name(value.dtype), "shape": list(value.shape), "facts": value.facts}


def _type_name(dtype):
    return str(dtype).partition(".")[2]


def _stride(node):
    value = node.meta.get("val")
    return None if value is None or value.is_contiguous() else list(value.stride())


def _value_from_json(content, roles):
    _expect(isinstance(content, dict) and content.get("role") in roles and isinstance(content.get("name"), str),
            f"{content!r:.80} is no input or result")
    name, dtype, shape, facts = (content.get(key) for key in ("name", "dtype", "shape", "facts"))
    _expect(isinstance(dtype, str) and dtype in _TYPES, f"{name!r:.60} has the type {dtype!r:.20}")
    _expect(_are_sizes(shape) and isinstance(facts, dict), f"{name!r:.60} has the shape {shape!r:.60}")
    value = Value(content["role"], name, tuple(shape), _TYPES[dtype], facts)
    _expect(value.bytes <= LARGEST_VALUE_BYTES, f"{name!r:.60} has the shape {shape!r:.60}, more than {LARGEST_VALUE_BYTES >> 30} GiB")
    return value


def _are_sizes(values):
    return isinstance(values, list) and len(values) <= 16 and all(type(each) is int and 0 <= each < 1 << 40 for each in values)


def _expect(holds, problem):
    if not holds:
        raise UserError(problem)
