"""A torch.fx trace, with what its nodes gave in trial runs -> the nodes of a description."""

import torch
from torch import fx, nn

from piebridge.core import capture_rules, graph, operations
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
    return any(node.target in capture_rules.RESHAPING or node.op.startswith("call") and not _holds_tensor(run[node])
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
        rule = capture_rules.RULES.get(node.target)
        if rule is None:
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            place = self.trace_scopes[node.name] or "the network"
            self.refuse(f"{node.name!r} in {place}: unknown operation {target!r}{closest(target, list(operations.FUNCTIONS))}")
        try:
            rule(self, node, *self.known(node.args), **self.known(node.kwargs))
        except (TypeError, KeyError) as error:
            self.refuse(f"{node.name!r}: arguments of {node.target!r:.60} that are not provided for ({error})")

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
