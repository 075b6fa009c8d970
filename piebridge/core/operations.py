"""The allow-list: every operation that a network description may name, with the arguments it takes and how to run it.

A description can come from an untrusted file. So an operation is looked up here by name and never imported by name, each of its
arguments passes a check before a constructor sees it, and the shapes of a module's tensors are computed from checked numbers,
so that they can be compared with the file before anything is allocated. Everything here exists in torch 1.10.
"""

from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn

from piebridge.core import compat
from piebridge.core.argument_checks import (
    border,
    flag,
    fraction,
    index,
    index_list,
    index_or_none,
    number,
    number_or_none,
    one_of,
    positive,
    positive_sizes,
    shape_list,
    sizes,
)
from piebridge.core.errors import UserError
from piebridge.core.names import closest

# `module` is the torch.nn class; `checks` maps argument -> check; `shapes(arguments)` -> {tensor name: shape, None: absent}
ModuleOperation = namedtuple("ModuleOperation", "module checks shapes")
# `run(*inputs, **arguments)`; `inputs` is the (least, most) number of inputs
FunctionOperation = namedtuple("FunctionOperation", "run checks inputs")


# Modules -----------------------------------------------------------------------------------------------------------------

def pair(value):
    """[height, width] of an argument that is one number for both image axes, or one for each."""
    return list(value) if isinstance(value, (list, tuple)) else [value, value]


def _conv_shapes(a):
    weight = (a["out_channels"], a["in_channels"] // a["groups"]) + tuple(pair(a["kernel_size"]))
    return {"weight": weight, "bias": (a["out_channels"],) if a["bias"] else None}


def _batch_norm_shapes(a):
    channels = (a["num_features"],)
    is_affine, is_tracked = a["affine"], a["track_running_stats"]
    return {"weight": channels if is_affine else None, "bias": channels if is_affine else None,
            "running_mean": channels if is_tracked else None, "running_var": channels if is_tracked else None,
            "num_batches_tracked": () if is_tracked else None}


def _layer_norm_shapes(a):
    shape = tuple(a["normalized_shape"]) if a["elementwise_affine"] else None
    return {"weight": shape, "bias": shape}


def _group_norm_shapes(a):
    shape = (a["num_channels"],) if a["affine"] else None
    return {"weight": shape, "bias": shape}


def _linear_shapes(a):
    return {"weight": (a["out_features"], a["in_features"]), "bias": (a["out_features"],) if a["bias"] else None}


def _no_shapes(_):
    return {}


_INPLACE = {"inplace": flag}
_POOL = {"kernel_size": positive_sizes, "stride": positive_sizes, "padding": sizes, "ceil_mode": flag}

MODULES = {
    "Conv2d": ModuleOperation(nn.Conv2d, {
        "in_channels": positive, "out_channels": positive, "kernel_size": positive_sizes, "stride": positive_sizes,
        "padding": sizes, "dilation": positive_sizes, "groups": positive, "bias": flag,
        "padding_mode": one_of("zeros", "reflect", "replicate")},
        _conv_shapes),
    "BatchNorm2d": ModuleOperation(nn.BatchNorm2d, {
        "num_features": positive, "eps": number, "momentum": number_or_none, "affine": flag, "track_running_stats": flag},
        _batch_norm_shapes),
    "LayerNorm": ModuleOperation(nn.LayerNorm, {
        "normalized_shape": shape_list, "eps": number, "elementwise_affine": flag}, _layer_norm_shapes),
    "GroupNorm": ModuleOperation(nn.GroupNorm, {
        "num_groups": positive, "num_channels": positive, "eps": number, "affine": flag}, _group_norm_shapes),
    "Linear": ModuleOperation(nn.Linear, {"in_features": positive, "out_features": positive, "bias": flag}, _linear_shapes),
    "ReLU": ModuleOperation(nn.ReLU, _INPLACE, _no_shapes),
    "ReLU6": ModuleOperation(nn.ReLU6, _INPLACE, _no_shapes),
    "Hardswish": ModuleOperation(nn.Hardswish, _INPLACE, _no_shapes),
    "Hardsigmoid": ModuleOperation(nn.Hardsigmoid, _INPLACE, _no_shapes),
    "SiLU": ModuleOperation(nn.SiLU, _INPLACE, _no_shapes),
    "Sigmoid": ModuleOperation(nn.Sigmoid, {}, _no_shapes),
    "Tanh": ModuleOperation(nn.Tanh, {}, _no_shapes),
    "GELU": ModuleOperation(nn.GELU, {}, _no_shapes),  # exact; its tanh form came after torch 1.10
    "Softmax": ModuleOperation(nn.Softmax, {"dim": index}, _no_shapes),
    "Identity": ModuleOperation(nn.Identity, {}, _no_shapes),
    "Dropout": ModuleOperation(nn.Dropout, {"p": fraction, "inplace": flag}, _no_shapes),
    "ZeroPad2d": ModuleOperation(nn.ZeroPad2d, {"padding": border}, _no_shapes),
    "MaxPool2d": ModuleOperation(nn.MaxPool2d, dict(_POOL, dilation=positive_sizes), _no_shapes),
    "AvgPool2d": ModuleOperation(nn.AvgPool2d, dict(_POOL, count_include_pad=flag), _no_shapes),
    "AdaptiveAvgPool2d": ModuleOperation(nn.AdaptiveAvgPool2d, {"output_size": positive_sizes}, _no_shapes),
    "Flatten": ModuleOperation(nn.Flatten, {"start_dim": index, "end_dim": index}, _no_shapes),
}


# Functions ---------------------------------------------------------------------------------------------------------------

def _binary(function):
    """A function of two tensors, or of one and the number `value`."""
    def run(x, y=None, value=None):
        return function(x, value if y is None else y)
    return run


def expand_batch(parameter, reference):
    """[1, ...] -> [N, ...], N being the batch of `reference`."""
    return parameter.expand([reference.shape[0]] + list(parameter.shape[1:]))


def attention(query, key, value):
    """softmax(q k^T / sqrt(D)) v, all [N,heads,tokens,D]; the fused kernel where this torch has it."""
    if compat.HAS_FUSED_ATTENTION:
        return F.scaled_dot_product_attention(query, key, value)
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1))
    return torch.matmul(torch.softmax(scores, dim=-1), value)


def _slice(x, dim, start=None, stop=None):
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, stop),)]


_BINARY = {"value": number_or_none}
_ONE, _TWO = (1, 1), (2, 2)

FUNCTIONS = {
    # of two tensors, or of one and the number `value` (else null)
    "add": FunctionOperation(_binary(torch.add), _BINARY, (1, 2)),
    "sub": FunctionOperation(_binary(torch.sub), _BINARY, (1, 2)),
    "mul": FunctionOperation(_binary(torch.mul), _BINARY, (1, 2)),
    "div": FunctionOperation(_binary(torch.div), _BINARY, (1, 2)),
    "matmul": FunctionOperation(torch.matmul, {}, _TWO),
    "linear": FunctionOperation(F.linear, {}, (2, 3)),  # x [..., in], weight [out, in], bias [out]
    "attention": FunctionOperation(attention, {}, (3, 3)),
    "expand_batch": FunctionOperation(expand_batch, {}, _TWO),
    "cat": FunctionOperation(lambda *inputs, dim: torch.cat(inputs, dim), {"dim": index}, (1, 64)),
    "flatten": FunctionOperation(torch.flatten, {"start_dim": index, "end_dim": index}, _ONE),
    "reshape": FunctionOperation(lambda x, shape: x.reshape(shape), {"shape": shape_list}, _ONE),
    "permute": FunctionOperation(lambda x, dims: x.permute(dims), {"dims": index_list}, _ONE),
    "transpose": FunctionOperation(torch.transpose, {"dim0": index, "dim1": index}, _ONE),
    "select": FunctionOperation(lambda x, dim, index: x.select(dim, index), {"dim": index, "index": index}, _ONE),
    "slice": FunctionOperation(_slice, {"dim": index, "start": index_or_none, "stop": index_or_none}, _ONE),
    "mean": FunctionOperation(lambda x, dims, keepdim: x.mean(dims, keepdim), {"dims": index_list, "keepdim": flag}, _ONE),
    "softmax": FunctionOperation(torch.softmax, {"dim": index}, _ONE),
    "relu": FunctionOperation(torch.relu, {}, _ONE),
    "relu6": FunctionOperation(F.relu6, {}, _ONE),
    "hardswish": FunctionOperation(F.hardswish, {}, _ONE),
    "hardsigmoid": FunctionOperation(F.hardsigmoid, {}, _ONE),
    "sigmoid": FunctionOperation(torch.sigmoid, {}, _ONE),
    "silu": FunctionOperation(F.silu, {}, _ONE),
    "tanh": FunctionOperation(torch.tanh, {}, _ONE),
    "gelu": FunctionOperation(F.gelu, {}, _ONE),
    "adaptive_avg_pool2d": FunctionOperation(F.adaptive_avg_pool2d, {"output_size": positive_sizes}, _ONE),
}

PARAMETER = "parameter"  # a tensor of the network by itself (a class token); its node has the key `parameter`
_PARAMETER_CHECKS = {"shape": shape_list}


def module_operation(module):
    """Name of the operation that `module` (or the torch.nn class it derives from) is, or None."""
    for ancestor in type(module).__mro__:
        known = MODULES.get(ancestor.__name__)
        if known is not None and known.module is ancestor:
            return ancestor.__name__
    return None


def check_operation(where, operation):
    """Refuse an unknown operation by name, with the closest that is known. `where` begins the sentence."""
    known = list(MODULES) + list(FUNCTIONS) + [PARAMETER]
    if not isinstance(operation, str) or operation not in known:
        raise UserError(f"{where}: unknown operation {operation!r:.60}{closest(operation, known)}; a network file may only use "
                        "the operations that this version knows")


def check_arguments(where, operation, arguments, inputs):
    """Check the `arguments` (dict) and the number of `inputs` of a known operation against the allow-list."""
    if operation in MODULES:
        checks, (least, most) = MODULES[operation].checks, _ONE
    elif operation in FUNCTIONS:
        checks, (least, most) = FUNCTIONS[operation].checks, FUNCTIONS[operation].inputs
    else:
        checks, (least, most) = _PARAMETER_CHECKS, (0, 0)
    if not least <= inputs <= most:
        raise UserError(f"{where}: {operation} takes {least if least == most else f'{least} to {most}'} inputs and has {inputs}")
    for name in arguments:
        if name not in checks:
            raise UserError(f"{where}: {operation} takes no argument {name!r:.60}{closest(name, list(checks))}")
    for name, check in checks.items():
        if name not in arguments:
            raise UserError(f"{where}: {operation} lacks its argument {name!r}")
        wanted = check(arguments[name])
        if wanted:
            raise UserError(f"{where}: argument {name}={arguments[name]!r:.60} of {operation} must be {wanted}")
    _check_together(where, operation, arguments)


def _check_together(where, operation, arguments):
    """What single arguments cannot show; without it the constructors would raise their own errors."""
    if operation == "Conv2d" and any(arguments[name] % arguments["groups"] for name in ("in_channels", "out_channels")):
        raise UserError(f"{where}: the channels of Conv2d must be divisible by groups={arguments['groups']}")
    if operation == "GroupNorm" and arguments["num_channels"] % arguments["num_groups"]:
        raise UserError(f"{where}: the channels of GroupNorm must be divisible by num_groups={arguments['num_groups']}")


def tensor_shapes(operation, arguments):
    """{tensor name below the module: shape} of a checked module operation; functions have none."""
    if operation not in MODULES:
        return {}
    return {name: shape for name, shape in MODULES[operation].shapes(arguments).items() if shape is not None}


def arguments_of(operation, module):
    """The constructor arguments of `module` as JSON values: the inverse of `build_module`."""
    arguments = {}
    for name in MODULES[operation].checks:
        value = getattr(module, name)
        if name == "bias":
            value = value is not None
        arguments[name] = list(value) if isinstance(value, tuple) else value
    if operation == "LayerNorm":
        arguments["elementwise_affine"] = module.weight is not None
    return arguments


def build_module(operation, arguments):
    """A module whose tensors are not there yet: on the meta device where it has any, to be filled by the caller."""
    known = MODULES[operation]
    values = {name: tuple(value) if type(value) is list else value for name, value in arguments.items()}
    if tensor_shapes(operation, arguments):
        values["device"] = "meta"
    return known.module(**values)
