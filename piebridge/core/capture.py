"""A torch.nn.Module -> a network description, by a symbolic trace over the allow-list of core/operations.py.

The trace (torch.fx) is taken in eval mode. Sizes that a forward computes from its input (`x.shape[0]`, `n, c, h, w = x.shape`)
never reach the description: a trace with such sizes is run at two batch sizes; what changes is the batch, what does not is a
constant. (So a network that reshapes, such as a ViT, is bound to its input size; one that only convolves and pools is not.)
"""

import copy

import torch
from torch import fx, nn

from piebridge.core import graph, operations, translation
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.packages import one_line

TOLERANCE = 1e-5  # of the captured network's outputs, relative to their largest


def capture(module, name, input_size, mean, std, interpolation="bilinear", crop_fraction=0.875, class_names=None):
    """A GraphNetwork that computes what `module` computes in eval mode, with a copy of its tensors.

    input_size: [3,H,W]. mean, std: of the three channels on 0..1 RGB. UserError names the operation that the allow-list lacks, or
    says that the captured outputs differ from the module's on a trial batch.
    """
    tensors = {key: tensor.detach().cpu().clone() for key, tensor in module.state_dict().items()}
    module = _without_zeros(copy.deepcopy(module).cpu().eval())
    tracer = _ScopedTracer()
    with torch.no_grad():
        try:
            traced = fx.GraphModule(module, tracer.trace(module))
        except fx.proxy.TraceError as error:
            raise UserError(f"network {name}: cannot capture a forward whose course depends on its input ({one_line(error)})") from None
        try:
            runs = [_Recorder(traced).record(_trial_batch(1, input_size))]
            if translation.depends_on_sizes(traced, runs[0]):
                runs.append(_Recorder(traced).record(_trial_batch(2, input_size)))
        except RuntimeError as error:
            size = " x ".join(str(each) for each in input_size)
            raise UserError(f"network {name}: does not run on images of {size} values ({one_line(error)})") from None
        nodes, output, scopes, shapes = translation.translate(name, traced, runs, tracer.scopes)
        trial_tensors = module.state_dict()
        nodes, output, joined = graph.join_averaged_heads(nodes, output)
        if joined:
            tensors, trial_tensors = join_head_tensors(tensors, joined), join_head_tensors(trial_tensors, joined)
        graph.limit_inplace(nodes)
        head, tap = graph.find_head(nodes, output)
        blocks = graph.find_blocks([node for node in nodes if node["name"] in scopes], scopes, _candidates(module), shapes)
        description = {
            "format": graph.FORMAT, "version": graph.VERSION, "name": name, "input_size": list(input_size),
            "normalization": {"mean": list(mean), "std": list(std)},
            "interpolation": interpolation, "crop_fraction": crop_fraction, "class_names": class_names,
            "head": head, "tap": tap, "blocks": blocks, "nodes": nodes, "output": output}
        _compare(_network(description, trial_tensors), runs[-1], _trial_batch(len(runs), input_size))
    return _network(description, tensors)


def join_head_tensors(tensors, paths):
    """State dict of two averaged heads -> that of the joined one (see graph.join_averaged_heads)."""
    first, second = paths
    tensors = dict(tensors)
    weights = [tensors.pop(path + ".weight") for path in paths]
    biases = [tensors.pop(path + ".bias") for path in paths]
    tensors[first + ".weight"] = torch.cat(weights, dim=1) / 2
    tensors[first + ".bias"] = (biases[0] + biases[1]) / 2
    return tensors


class _ScopedTracer(fx.Tracer):
    """Traces into every module that is no operation, and notes for each node the path of the module whose forward made it."""

    def __init__(self):
        super().__init__()
        self.scopes = {}
        self._path = ""

    def is_leaf_module(self, m, module_qualified_name):
        return operations.module_operation(m) is not None or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m, forward, args, kwargs):
        outer, self._path = self._path, self.path_of_module(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._path = outer

    def create_node(self, *args, **kwargs):
        node = super().create_node(*args, **kwargs)
        self.scopes[node.name] = self._path
        return node


class _Recorder(fx.Interpreter):
    """Runs a trace and keeps what each node gave: the shape of a tensor, or the value itself (a number, a tuple)."""

    def record(self, x):
        """{node: value}; a tensor's value is its torch.Size. The output node's value is the output itself."""
        self.values = {}
        self.run(x)
        return self.values

    def run_node(self, n):
        value = super().run_node(n)
        self.values[n] = value if n.op == "output" else _outline(value)
        return value


def _outline(value):
    if isinstance(value, torch.Tensor):
        return translation.TensorShape(value.shape)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return tuple(_outline(each) for each in value)
    return value


def _without_zeros(module):
    """Small random values in each parameter that is all zeros (fresh biases, a ViT's head): zeros would hide a wrong graph."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    return module


def _trial_batch(batch, input_size):
    generator = torch.Generator().manual_seed(0)
    return torch.randn([batch] + list(input_size), generator=generator)


def _candidates(module):
    """Paths of modules that may be blocks: members of a sequence that are no mere sequence themselves, outer before inner."""
    sequences = (nn.Sequential, nn.ModuleList)
    paths = dict(module.named_modules())
    return [path for path, each in paths.items() if path and isinstance(paths[path.rpartition(".")[0]], sequences)
            and not isinstance(each, sequences) and operations.module_operation(each) is None]


def _network(description, tensors):
    return GraphNetwork(description, {key: tensors[key] for key in expected_shapes(description) if key in tensors}).eval()


def _compare(network, run, batch):
    wanted = [value for node, value in run.items() if node.op == "output"][0]
    found = network(batch)
    error = (found - wanted).abs().max().item() / max(wanted.abs().max().item(), 1e-30)
    if not error <= TOLERANCE:
        name = network.description["name"]
        raise UserError(f"network {name}: the captured graph differs from the module by {error:.1e} (relative; at most "
                        f"{TOLERANCE:.0e} is allowed): one of its modules does other than the torch.nn class that it derives "
                        "from, or overwrites a value that is read again")
