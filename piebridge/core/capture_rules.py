"""How each function and method of PyTorch in a torch.fx trace becomes nodes of a description: one small rule for each.

A rule takes the translator (core/translation.py), the fx node, and the arguments as the function or method takes them.
"""

import operator

import torch
import torch.nn.functional as F
from torch import fx

from piebridge.core import compat, graph


def _binary(operation):
    def rule(t, node, input, other):
        if isinstance(input, fx.Node) and t.is_tensor(input):
            if isinstance(other, fx.Node) and t.is_tensor(other):
                t.emit(node, operation, [t.names[input], t.names[other]], {"value": None})
            else:
                t.emit(node, operation, [t.names[input]], {"value": t.constant(other)})
        elif operation in ("add", "mul"):
            t.emit(node, operation, [t.names[other]], {"value": t.constant(input)})
        else:
            t.refuse(f"{node.name!r}: {operation} of a number and a tensor")
    return rule


def _unary(operation):
    def rule(t, node, input, inplace=False):
        t.emit(node, operation, [t.names[input]])
    return rule


def _attention(t, node, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None or t.constant(dropout_p) != 0.0 or is_causal or scale is not None or enable_gqa:
        t.refuse(f"{node.name!r}: attention with a mask, dropout or its own scale")
    t.emit(node, "attention", [t.names[each] for each in (query, key, value)])


def _reshape(t, node, input, *_, **__):
    t.emit(node, "reshape", [t.names[input]], {"shape": t.batch_free_shape(node)})


def _flatten(t, node, input, start_dim=0, end_dim=-1):
    t.emit(node, "flatten", [t.names[input]], {"start_dim": t.constant(start_dim), "end_dim": t.constant(end_dim)})


def _expand(t, node, input, *_, **__):
    before, after = t.batch_free_shape(input), t.batch_free_shape(node)
    if before == after:
        return _alias(t, node, input)
    if len(before) != len(after) or before[0] != 1 or after[0] != -1 or before[1:] != after[1:]:
        t.refuse(f"{node.name!r}: expand to {after}, other than along the batch")
    t.emit(node, "expand_batch", [t.names[input], graph.INPUT])


def _permute(t, node, input, *dims, **named):
    dims = dims or (named["dims"],)
    t.emit(node, "permute", [t.names[input]], {"dims": t.constant(dims[0] if isinstance(dims[0], (tuple, list)) else dims)})


def _transpose(t, node, input, dim0, dim1):
    t.emit(node, "transpose", [t.names[input]], {"dim0": t.constant(dim0), "dim1": t.constant(dim1)})


def _cat(t, node, tensors, dim=0):
    t.emit(node, "cat", [t.names[each] for each in tensors], {"dim": t.constant(dim)})


def _mean(t, node, input, dim=None, keepdim=False):
    dims = t.constant(dim)
    t.emit(node, "mean", [t.names[input]], {"dims": dims if isinstance(dims, list) else [dims], "keepdim": t.constant(keepdim)})


def _softmax(t, node, input, dim=None, dtype=None, _stacklevel=None):
    if dtype is not None:
        t.refuse(f"{node.name!r}: softmax with a dtype")
    t.emit(node, "softmax", [t.names[input]], {"dim": t.constant(dim)})


def _unbind(t, node, input, dim=0):
    dim = t.constant(dim)
    t.names[node] = tuple(t.emit(node, "select", [t.names[input]], {"dim": dim, "index": each}, f"{node.name}_{each}")
                          for each in range(len(t.runs[0][node])))


def _getitem(t, node, input, key):
    if t.is_several(input):
        t.names[node] = t.names[input][t.constant(key)]
        return
    name, dim = t.names[input], 0
    keys = key if isinstance(key, tuple) else (key,)
    steps = []
    for each in keys:
        if isinstance(each, slice) and each.step in (None, 1):
            if each.start is not None or each.stop is not None:
                steps.append(("slice", {"dim": dim, "start": t.constant(each.start), "stop": t.constant(each.stop)}))
            dim += 1
        elif type(t.constant(each)) is int:
            steps.append(("select", {"dim": dim, "index": t.constant(each)}))
        else:
            t.refuse(f"{node.name!r}: an index other than whole numbers and slices of step 1")
    for position, (operation, arguments) in enumerate(steps):
        is_last = position == len(steps) - 1
        name = t.emit(node, operation, [name], arguments, None if is_last else f"{node.name}_{position}")
    t.names[node] = name


def _adaptive_avg_pool2d(t, node, input, output_size):
    t.emit(node, "adaptive_avg_pool2d", [t.names[input]], {"output_size": t.constant(output_size)})


def _linear(t, node, input, weight, bias=None):
    t.emit(node, "linear", [t.names[each] for each in (input, weight, bias) if each is not None])


def _matmul(t, node, input, other):
    t.emit(node, "matmul", [t.names[input], t.names[other]])


def _alias(t, node, input, *_, **__):
    t.names[node] = t.names[input]


RULES = {
    operator.add: _binary("add"), operator.iadd: _binary("add"), torch.add: _binary("add"), "add": _binary("add"),
    operator.mul: _binary("mul"), operator.imul: _binary("mul"), torch.mul: _binary("mul"), "mul": _binary("mul"),
    operator.sub: _binary("sub"), torch.sub: _binary("sub"), "sub": _binary("sub"),
    operator.truediv: _binary("div"), torch.div: _binary("div"), "div": _binary("div"),
    operator.matmul: _matmul, torch.matmul: _matmul, "matmul": _matmul,
    operator.getitem: _getitem, torch.unbind: _unbind, "unbind": _unbind,
    F.relu: _unary("relu"), torch.relu: _unary("relu"), "relu": _unary("relu"), "relu_": _unary("relu"),
    F.relu6: _unary("relu6"), F.hardswish: _unary("hardswish"), F.hardsigmoid: _unary("hardsigmoid"), F.silu: _unary("silu"),
    torch.sigmoid: _unary("sigmoid"), "sigmoid": _unary("sigmoid"), torch.tanh: _unary("tanh"), "tanh": _unary("tanh"),
    F.gelu: _unary("gelu"), F.softmax: _softmax, torch.softmax: _softmax, "softmax": _softmax,
    torch.flatten: _flatten, "flatten": _flatten, torch.reshape: _reshape, "reshape": _reshape, "view": _reshape,
    "expand": _expand,
    torch.permute: _permute, "permute": _permute, torch.transpose: _transpose, "transpose": _transpose,
    torch.cat: _cat, torch.mean: _mean, "mean": _mean, F.adaptive_avg_pool2d: _adaptive_avg_pool2d, F.linear: _linear,
    "contiguous": _alias, "clone": _alias,
}
if compat.HAS_FUSED_ATTENTION:
    RULES[F.scaled_dot_product_attention] = _attention

# The functions whose result's shape is in their arguments, not in their input's shape alone
RESHAPING = [target for target, rule in RULES.items() if rule in (_reshape, _expand)]
