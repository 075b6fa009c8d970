"""A network description made runnable: `GraphNetwork` interprets the graph over ordinary torch.nn modules."""

import copy
import hashlib
from collections import namedtuple

from torch import nn

from piebridge.core import graph, operations
from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_json
from piebridge.core.names import closest
from piebridge.core.safetensors_file import tensor_bytes

# holder, key: where the module or parameter is looked up at each call, so that a replaced module is used (holder None: the
# network itself, which would be a reference cycle); run: a function operation; inputs, output: places in the list of values;
# arguments: of the function; done: places that no later step reads
_Step = namedtuple("_Step", "name holder key run inputs output arguments done")


class GraphNetwork(nn.Module):
    """An image classifier given by a description (see core/graph.py) and its tensors.

    Modules and parameters sit at their own paths, so the keys of the state dict are those of the source architecture, train mode
    means what it means for the modules, and hooks, `.to()` and optimizers work as usual. An intermediate value is released after
    its last use.

    description: dict; copied. tensors: {state dict key: tensor}, every key of the network and no other. An nn.Parameter is the
    same object here; of another tensor the memory is shared.
    """

    def __init__(self, description, tensors):
        super().__init__()
        self.description = copy.deepcopy(description)
        _place_tensors(self, self.description, tensors)
        self._to_output = _steps(self, self.description, [self.description["output"]])
        self._to_tap = _steps(self, self.description, [self.description["tap"]])

    def forward(self, x):
        """Images [N,3,H,W], normalised -> logits [N,C]."""
        return _execute(self, self._to_output, x)

    def features(self, x):
        """Images [N,3,H,W], normalised -> the head's input [N,D]."""
        return _execute(self, self._to_tap, x)

    def values(self, x, names):
        """Images [N,3,H,W] -> {node name: value} for the named nodes; nothing beyond them is computed. "x" names the input."""
        nodes = graph.nodes_by_name(self.description)
        for name in names:
            if name not in nodes and name != graph.INPUT:
                raise UserError(f"network {self.description['name']}: no node {name!r}{closest(name, list(nodes))}")
        kept = {graph.INPUT: x} if graph.INPUT in names else {}

        def keep(name, value):
            if name in names:
                kept[name] = value.clone()  # a later step may work in place

        _execute(self, _steps(self, self.description, [name for name in names if name in nodes]), x, keep)
        return kept

    def observe(self, x, callback):
        """Run forward and call `callback(node name, value)` after each node; returns the logits [N,C]."""
        return _execute(self, self._to_output, x, callback)

    @property
    def head(self):
        """The final Linear."""
        return self.get_submodule(self.description["head"])

    def replace_head(self, class_names):
        """Put a fresh Linear (weights of deviation 0.01, zero bias) for these classes in the head's place, and describe it."""
        old = self.head
        head = nn.Linear(old.in_features, len(class_names))
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)
        holder, key = _holder(self, self.description["head"])
        holder._modules[key] = head.to(old.weight.device, old.weight.dtype).train(self.training)
        self.description["class_names"] = [str(name) for name in class_names]
        node = graph.nodes_by_name(self.description)[self.description["output"]]
        node["arguments"].update(out_features=len(class_names), bias=True)

    def without_blocks(self, names):
        """This network without the named residual blocks (see `description["blocks"]`), in the same mode.

        Parameters are the same objects; buffers (batch-norm statistics) are copies. UserError for a block that is unknown or no
        residual block with equal input and output shape.
        """
        description = graph.drop_blocks(self.description, names)
        tensors = {key: buffer.clone() for key, buffer in self.named_buffers()}
        tensors.update(self.named_parameters())
        network = GraphNetwork(description, {key: tensors[key] for key in expected_shapes(description)})
        for path, module in network.named_modules():
            module.training = self.get_submodule(path).training
        return network

    def below(self, prefix):
        """The same network with each module's path below `prefix`, all tensors shared.

        For exporters, which find modules as attributes: MobileNetV3's module `features` has the name of a method here.
        """
        tensors = dict(self.named_buffers(), **dict(self.named_parameters()))
        tensors = {prefix + "." + key: tensor for key, tensor in tensors.items()}
        return GraphNetwork(graph.put_below(self.description, prefix), tensors).train(self.training)

    def fingerprint(self):
        """sha256 (hex) over the description and every tensor's name, type, shape and bytes."""
        digest = hashlib.sha256(sha256_of_json(self.description).encode("ascii"))
        for key, tensor in sorted(self.state_dict().items()):
            digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode("utf-8"))
            digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    def get_submodule(self, target):
        """The module at a dotted path; unlike the inherited one, also where a path begins like a method here ("features.0")."""
        holder = self
        for part in target.split(".") if target else ():
            if part not in holder._modules:
                raise AttributeError(f"network {self.description['name']} has no module {target!r}")
            holder = holder._modules[part]
        return holder


def expected_shapes(description):
    """{state dict key: shape} that a checked description implies."""
    shapes = {}
    for node in description["nodes"]:
        if node["operation"] == operations.PARAMETER:
            shapes[node["parameter"]] = tuple(node["arguments"]["shape"])
        for name, shape in operations.tensor_shapes(node["operation"], node["arguments"]).items():
            shapes[node["module"] + "." + name] = tuple(shape)
    return shapes


def check_tensors(description, shapes):
    """Compare {key: shape} of some tensors with what the description implies; UserError names the first difference."""
    name, expected = description["name"], expected_shapes(description)
    for key, shape in expected.items():
        if key not in shapes:
            spare = [each for each in shapes if each not in expected]
            raise UserError(f"network {name}: tensor {key!r} is missing{closest(key, spare)}")
        if tuple(shapes[key]) != shape:
            found = list(shapes[key])
            raise UserError(f"network {name}: tensor {key!r} has shape {found} where its description says {list(shape)}")
    for key in shapes:
        if key not in expected:
            raise UserError(f"network {name}: tensor {key!r} belongs to no node of its description")


def _place_tensors(network, description, tensors):
    check_tensors(description, {key: tensor.shape for key, tensor in tensors.items()})
    for node in description["nodes"]:
        if node["operation"] == operations.PARAMETER:
            holder, key = _holder(network, node["parameter"], is_created=True)
            _put(holder, key, tensors[node["parameter"]])
        elif "module" in node:
            holder, key = _holder(network, node["module"], is_created=True)
            if key not in holder._modules:  # a module that is called twice has two nodes
                holder._modules[key] = _filled_module(node, tensors)


def _filled_module(node, tensors):
    module = operations.build_module(node["operation"], node["arguments"])
    for name in operations.tensor_shapes(node["operation"], node["arguments"]):
        _put(module, name, tensors[node["module"] + "." + name])
    return module


def _put(module, name, tensor):
    if name in module._buffers:
        module._buffers[name] = tensor.detach()
    else:
        module._parameters[name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach())


def _holder(network, path, is_created=False):
    """(module that holds the last part of a dotted path, that part); the modules on the way are made where asked."""
    parts = path.split(".")
    holder = network
    for part in parts[:-1]:
        if is_created and part not in holder._modules:
            holder._modules[part] = nn.Module()  # add_module would refuse names that are also methods here ("features", "head")
        holder = holder._modules[part]
    return holder, parts[-1]


def _steps(network, description, targets):
    needed = set().union(*[graph.ancestors(description, target) for target in targets])
    nodes = [node for node in description["nodes"] if node["name"] in needed]
    last_reader = {name: position for position, node in enumerate(nodes) for name in node["inputs"]}
    places = {graph.INPUT: 0}
    steps = []
    for position, node in enumerate(nodes):
        inputs = [places[name] for name in node["inputs"]]
        places[node["name"]] = len(places)
        done = [places[name] for name in set(node["inputs"]) if last_reader[name] == position]
        path = node.get("module") or node.get("parameter")
        holder, key = _holder(network, path) if path else (None, None)
        run = None if path else operations.FUNCTIONS[node["operation"]].run
        arguments = {name: value for name, value in node["arguments"].items() if value is not None}
        holder = None if holder is network else holder
        steps.append(_Step(node["name"], holder, key, run, inputs, places[node["name"]], arguments, done))
    return steps


def _execute(network, steps, x, observe=None):
    values = [None] * (len(steps) + 1)
    values[0] = value = x
    del x
    for name, holder, key, run, inputs, output, arguments, done in steps:
        if run is not None:
            value = run(*[values[place] for place in inputs], **arguments)
        else:
            holder = network if holder is None else holder
            value = holder._modules[key](values[inputs[0]]) if inputs else holder._parameters[key]
        for place in done:
            values[place] = None
        values[output] = value
        if observe is not None:
            observe(name, value)
    return value
