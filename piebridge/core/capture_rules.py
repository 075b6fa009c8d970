"""How each node of a torch.fx trace becomes nodes of a description. One small rule per function or method of PyTorch."""

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from piebridge.core import compat, graph, operations
from piebridge.core.errors import UserError
from piebridge.core.names import closest


class TensorShape(tuple):
    """Marks a recorded value as that of a tensor."""


def translate(name, traced, runs, scopes):
    """(nodes, output, scopes, shapes) of the description of a traced module.

    runs: one {fx node: recorded value}, or two, at different batch sizes, where the trace depends on sizes. The scopes and shapes
    returned are by the description's node names.
    """
    translator = _Translator(name, traced, runs, scopes)
    for node in traced.graph.nodes:
        translator.visit(node)
    used = _used(translator.nodes, translator.output)
    return used, translator.output, translator.scopes, translator.shapes


def depends_on_sizes(traced, run):
    """Whether a trace computes numbers from its input's shape, or reshapes: then what is the batch shows in a second run only."""
    return any(RULES.get(node.target) in (_reshape, _expand) or node.op.startswith("call") and not _holds_tensor(run[node])
               for node in traced.graph.nodes) or any(isinstance(each, nn.MultiheadAttention) for each in traced.modules())


def _holds_tensor(value):
    return isinstance(value, TensorShape) or isinstance(value, tuple) and any(isinstance(each, TensorShape) for each in value)


def _used(nodes, output):
    needed = graph.ancestors({"nodes": nodes}, output)
    return [node for node in nodes if node["name"] in needed]


class _Translator:
    """Walks the trace. `names` maps an fx node to its description node's name, or to a tuple of names for several results."""

    def __init__(self, network_name, traced, runs, scopes):
        self.network_name = network_name
        self.modules = dict(traced.named_modules())
        self.traced = traced
        self.runs = runs
        self.trace_scopes = scopes
        self.nodes, self.names, self.scopes, self.shapes = [], {}, {}, {}
        self.output = None

    def visit(self, node):
        if node.op == "placeholder":
            if not self.is_tensor(node):
                return  # an optional argument that was left out
            self.names[node] = graph.INPUT
            self.shapes[graph.INPUT] = self.runs[0][node]
        elif node.op == "output":
            if not isinstance(node.args[0], fx.Node) or not isinstance(self.runs[0][node], torch.Tensor):
                self.refuse("an output that is not one tensor")
            self.output = self.names[node.args[0]]
        elif node.op == "get_attr":
            self.parameter(node)
        elif node.op == "call_module":
            self.module(node)
        elif self.is_tensor(node) or self.is_several(node):
            self.function(node)

    def is_tensor(self, node):
        return isinstance(self.runs[0][node], TensorShape)

    def is_several(self, node):
        return not self.is_tensor(node) and _holds_tensor(self.runs[0][node])

    def refuse(self, what):
        raise UserError(f"network {self.network_name}: cannot capture {what}")

    def parameter(self, node):
        tensor = self.traced
        for part in node.target.split("."):
            tensor = getattr(tensor, part)
        if not isinstance(tensor, nn.Parameter):
            self.refuse(f"{node.target!r}: only parameters may be used by themselves, not buffers or constants")
        self.emit(node, "parameter", [], {"shape": list(tensor.shape)}, parameter=node.target)

    def module(self, node):
        module = self.modules[node.target]
        if isinstance(module, nn.MultiheadAttention):
            return self.self_attention(node, module)
        operation = operations.module_operation(module)
        known = list(operations.MODULES) + ["MultiheadAttention"]
        if operation is None:
            kind = type(module).__name__
            self.refuse(f"module {node.target!r}: unknown operation {kind!r}{closest(kind, known)}")
        arguments = operations.arguments_of(operation, module)
        self.emit(node, operation, [self.names[each] for each in node.all_input_nodes], arguments, module=node.target)

    def function(self, node):
        rule = RULES.get(node.target)
        if rule is None:
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            place = self.trace_scopes[node.name] or "the network"
            self.refuse(f"{node.name!r} in {place}: unknown operation {target!r}{closest(target, list(operations.FUNCTIONS))}")
        rule(self, node, *self.known(node.args), **self.known(node.kwargs))

    def emit(self, node, operation, inputs, arguments=None, name=None, **extra):
        """Append a description node for an fx node (or an inner step of it, by `name`) and return its name."""
        entry = {"name": name or node.name, "operation": operation}
        entry.update(extra)
        entry.update(inputs=list(inputs), arguments=arguments or {})
        where = f"network {self.network_name}: node {entry['name']!r}"
        operations.check_arguments(where, operation, entry["arguments"], len(entry["inputs"]))
        self.nodes.append(entry)
        self.scopes[entry["name"]] = self.trace_scopes[node.name]
        if name is None:
            self.names[node] = node.name
            self.shapes[node.name] = self.runs[0][node]
        return entry["name"]

    def known(self, value):
        """Arguments in which what the trace computed (sizes, flags) stands as its value, unless it depends on the batch."""
        if isinstance(value, fx.Node) and not self.is_tensor(value) and not self.is_several(value):
            first, last = self.runs[0][value], self.runs[-1][value]
            return first if first == last else value
        if isinstance(value, slice):
            return slice(self.known(value.start), self.known(value.stop), self.known(value.step))
        if isinstance(value, (tuple, list)):
            return type(value)([self.known(each) for each in value])
        if isinstance(value, dict):
            return {key: self.known(each) for key, each in value.items()}
        return value

    def constant(self, value):
        """A plain argument as a JSON value; refused when it depends on the batch size."""
        if isinstance(value, fx.Node):
            self.refuse(f"{value.name!r}: an argument that depends on the batch size")
        return [self.constant(each) for each in value] if isinstance(value, (tuple, list)) else value

    def batch_free_shape(self, node):
        """The shape of a result with -1 where it changes with the batch."""
        shape = [first if first == last else -1 for first, last in zip(self.runs[0][node], self.runs[-1][node])]
        if shape.count(-1) > 1:
            self.refuse(f"{node.name!r}: a shape in which two sizes depend on the batch")
        return shape

    def self_attention(self, node, module):
        """nn.MultiheadAttention on one input, written out: in_proj, heads, attention, out_proj. [N,T,D] -> [N,T,D]."""
        arguments = dict(zip(("query", "key", "value"), node.args), **node.kwargs)
        query = arguments.pop("query")
        has_no_mask = all(value is None or name in ("need_weights", "average_attn_weights") for name, value in arguments.items()
                          if name not in ("key", "value"))
        is_plain = (arguments["key"] is query and arguments["value"] is query and len(node.args) <= 3 and has_no_mask
                    and module.batch_first and module.in_proj_weight is not None and module.in_proj_bias is not None
                    and module.bias_k is None and not module.add_zero_attn and module.dropout == 0.0)
        if not is_plain:
            self.refuse(f"module {node.target!r}: MultiheadAttention other than plain self-attention (batch first, with bias, "
                        "without dropout and masks)")
        tokens, width = self.runs[0][query][1:]
        prefix, path = node.name + "_", node.target
        weight, bias = [
            self.emit(node, "parameter", [], {"shape": shape}, prefix + name, parameter=path + ".in_proj_" + name)
            for name, shape in (("weight", [3 * width, width]), ("bias", [3 * width]))]
        joint = self.emit(node, "linear", [self.names[query], weight, bias], {}, prefix + "in_proj")
        shape = [-1, tokens, 3, module.num_heads, width // module.num_heads]
        heads = self.emit(node, "reshape", [joint], {"shape": shape}, prefix + "heads")
        parts = self.emit(node, "permute", [heads], {"dims": [2, 0, 3, 1, 4]}, prefix + "parts")
        parts = [self.emit(node, "select", [parts], {"dim": 0, "index": each}, prefix + "qkv"[each]) for each in range(3)]
        mixed = self.emit(node, "attention", parts, {}, prefix + "attention")
        mixed = self.emit(node, "transpose", [mixed], {"dim0": 1, "dim1": 2}, prefix + "transpose")
        mixed = self.emit(node, "reshape", [mixed], {"shape": [-1, tokens, width]}, prefix + "tokens")
        arguments = operations.arguments_of("Linear", module.out_proj)
        out = self.emit(node, "Linear", [mixed], arguments, prefix + "out_proj", module=path + ".out_proj")
        self.names[node], self.shapes[out] = (out, None), self.runs[0][query]


# Rules: (translator, fx node, arguments as the function or method takes them) ------------------------------------------------

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
