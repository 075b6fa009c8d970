"""Watches a forward pass: which parameter goes into which operation.

So it does not matter how a network calls its parameters: as modules, as functions (torch's joint attention projections), or as bare
tensors (class tokens, low-rank factors).
"""

from dataclasses import replace

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from piebridge.engine.layer import CONV, DEPTHWISE, EMBEDDING, LINEAR, NORM, PARAMETER, POINTWISE, Layer

_NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
_ADDED = ("lora_", "adapter")  # in paths of what was put into the network to be trained


class LayerRecorder(TorchFunctionMode):
    """layers: {path: Layer}. flow: the paths of linear layers and, between them, ("attention", heads)."""

    def __init__(self, module):
        super().__init__()
        self._module, self._stack = module, []
        self._keys = {}  # id of a parameter: its keys, the one that named_parameters gives first
        for key, parameter in module.named_parameters(remove_duplicate=False):
            self._keys.setdefault(id(parameter), []).append(key)
        self.layers, self.flow = {}, []

    def watching(self):
        """A context in which it is known whose forward is running."""
        return _Watch({id(module): path for path, module in self._module.named_modules()}, self._stack)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self._note(getattr(function, "__name__", ""), args, kwargs, result)
        return result

    def _note(self, name, args, kwargs, result):
        if name == "scaled_dot_product_attention":
            query = args[0] if args else kwargs["query"]  # [B,heads,T,D]
            self.flow.append(("attention", query.shape[1] if query.dim() == 4 else 1))
        elif name == "softmax" and result.dim() == 4:
            self.flow.append(("attention", result.shape[1]))
        if name != "multi_head_attention_forward" and not isinstance(result, torch.Tensor):
            return  # a shape, a type
        given = [value for value in _flat(args) + _flat(kwargs.values()) if id(value) in self._keys]
        if not given:
            return
        if name == "multi_head_attention_forward":
            self._note_attention(args, kwargs, given)
        elif name in _NORMS or name in _WEIGHTED:
            self._note_layer(name, args[0] if args else kwargs["input"], given, result)
        elif name in ("addmm", "matmul", "__matmul__") and args[-1] is given[-1] and args[-1].dim() == 2:
            given = given[::-1]  # weight [in, out] comes last
            self._note_layer("matmul", args[-2], given, result)
        else:
            for parameter in given:
                self._note_bare(parameter, args, result)

    def _note_layer(self, name, x, given, result):
        weight = next((each for each in given if not self._key(each).endswith("bias")), None)
        bias = next((each for each in given if each is not weight), None)
        kind, cut, groups, macs = NORM, None, 1, 0
        if name in _WEIGHTED:
            kind, cut, groups, macs = _WEIGHTED[name](x, weight, result)
        elif name == "matmul":
            kind, cut, macs = LINEAR, 0, result.numel() * weight.shape[0]
        self._add(kind, weight, bias, cut, groups, x, result.shape, macs)

    def _note_attention(self, args, kwargs, given):
        """torch's attention as one call: its projections of query, key and value, joint or not, and that of the output."""
        named = dict(zip(("query", "key", "value", "features", "heads"), args), **kwargs)
        by_path = {}
        for parameter in given:
            by_path.setdefault(self._path(self._key(parameter)), []).append(parameter)
        for path, parameters in by_path.items():
            weight = next((each for each in parameters if each.dim() == 2), None)
            bias = next((each for each in parameters if each.dim() == 1), None)
            is_out = path.endswith("out_proj")
            x = named[{"k": "key", "v": "value"}.get(path.rpartition(".")[2][:1], "query")]
            if is_out:
                self.flow.append(("attention", named["heads"]))
            if weight is None:
                self._add(PARAMETER, None, bias, None, 1, x, x.shape, 0)
            else:
                shape = x.shape[:-1] + weight.shape[:1]
                self._add(LINEAR, weight, bias, 1, 1, x, shape, x.numel() * weight.shape[0])

    def _note_bare(self, parameter, args, result):
        """A parameter in any other operation: the scale of a hand-written norm, the bias behind it, a token."""
        path, key = self._path(self._key(parameter)), self._keys[id(parameter)][0]
        known = self.layers.get(path)
        if known is not None:
            if key not in (known.weight, known.bias) and known.bias is None:
                self.layers[path] = replace(known, bias=key)
            return
        holder, _, leaf = self._key(parameter).rpartition(".")
        x = next((value for value in args if isinstance(value, torch.Tensor) and value is not parameter), parameter)
        is_norm = leaf == "weight" and "norm" in type(self._module.get_submodule(holder)).__name__.lower()
        self._add(NORM if is_norm else PARAMETER, parameter, None, None, 1, x, result.shape, 0)

    def _add(self, kind, weight, bias, cut, groups, x, output_shape, macs):
        names = self._keys[id(weight if weight is not None else bias)]
        path = self._path(self._key(weight if weight is not None else bias))
        if kind == LINEAR:
            self.flow.append((path, None))
        known = self.layers.get(path)
        if known is not None and known.kind != PARAMETER:  # called again
            self.layers[path] = replace(known, macs=known.macs + macs, is_tied=True)
            return
        key = None if weight is None else names[0]
        is_shared = key is not None and (len(names) > 1 or any(layer.weight == key for layer in self.layers.values()))
        self.layers[path] = Layer(
            path, kind, key, None if bias is None else self._keys[id(bias)][0], () if weight is None else tuple(weight.shape), cut, groups,
            tuple(x.shape), tuple(output_shape), x.numel() * x.element_size(), macs, is_tied=is_shared,
            is_added=any(word in path for word in _ADDED))

    def _key(self, parameter):
        """Of a parameter with several names the one that belongs to the module whose forward is running."""
        names = self._keys[id(parameter)]
        running = self._stack[-1] if self._stack else ""
        return next((name for name in names if name.rpartition(".")[0] == running), names[0])

    @staticmethod
    def _path(key):
        """a.weight -> a, a.in_proj_weight -> a.in_proj, a.lora_A -> a.lora_A"""
        holder, _, name = key.rpartition(".")
        for ending in ("weight", "bias"):
            if name == ending:
                return holder or key
            if name.endswith("_" + ending):
                return f"{holder}.{name[:-len(ending) - 1]}".lstrip(".")
        return key


class _Watch:
    """Keeps the path of the module whose forward is running on top of `stack`."""

    def __init__(self, paths, stack):
        self._paths, self._stack = paths, stack

    def __enter__(self):
        self._handles = [nn.modules.module.register_module_forward_pre_hook(self._begin),
                         nn.modules.module.register_module_forward_hook(self._end)]

    def __exit__(self, *_):
        for handle in self._handles:
            handle.remove()

    def _begin(self, module, _):
        self._stack.append(self._paths.get(id(module), ""))

    def _end(self, module, *_):
        self._stack.pop()


def _flat(values):
    return [each for value in values for each in (value if isinstance(value, (list, tuple)) else (value,))]


def _convolution(x, weight, result):
    groups = x.shape[1] // weight.shape[1]
    macs = result.numel() * weight[0].numel()
    if groups > 1:
        return DEPTHWISE if groups == x.shape[1] else CONV, 0, groups, macs
    return POINTWISE if weight[0, 0].numel() == 1 else CONV, 1, 1, macs


def _transposed(x, weight, result):
    return CONV, None if x.shape[1] != weight.shape[0] else 0, 1, x.numel() * weight[0].numel()


def _linear(x, weight, result):
    return LINEAR, 1, 1, result.numel() * weight.shape[1]


def _embedding(x, weight, result):
    return EMBEDDING, None, 1, 0


# function: (input, weight, result) -> kind, cut, groups, MACs
_WEIGHTED = {"conv1d": _convolution, "conv2d": _convolution, "conv3d": _convolution, "conv_transpose1d": _transposed,
             "conv_transpose2d": _transposed, "conv_transpose3d": _transposed, "linear": _linear, "embedding": _embedding}
