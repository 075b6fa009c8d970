"""A PET structure on a network: what is trained, from which tap on, through which levels, and how it gets back."""

import copy
import functools

import torch
from torch import nn

from piebridge.core import graph
from piebridge.core.backends.folding import folded
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.pet import structure_of
from piebridge.core.pet_lora import factor_cuts, merged, put_lora
from piebridge.core.pet_sparse import put_back, with_part
from piebridge.core.slices import cut


class Tuning:
    """network: GraphNetwork with a fresh head, on its device. settings: the section `pet` of a configuration. body: how what lies above the
    tap computes, a key of BODIES; the same function but for rounding. parts: of pet.kind=sparse, see core/pet_sparse.py.

    Attributes: network, the whole network as it is trained, which shares the given one's tensors: with adapters among its nodes, LoRA in
    its targets' places; tap, the node whose value [B, ...] the trainable part starts from, the last that no trained tensor lies
    before, "x" where nothing is frozen below; training: the mode, which batch norm follows only where its statistics are trained too.
    UserError where the settings do not fit the network.
    """

    def __init__(self, network, settings, body="eager", parts=None):
        network.requires_grad_(False).eval()  # frozen batch norm uses its running statistics
        self.training = True
        self._original, self._structure = network, structure_of(network, settings, parts)
        self._tensors = dict(self._renamed(_named_tensors(network)), **self._structure.added)
        self._trained = {key: self._tensors[key].requires_grad_(key not in self._structure.set_once) for key in self._structure.trained}
        description = self._structure.edit(network.description)
        is_plain = description is network.description and not self._structure.factors
        self.network = network if is_plain else _built(description, self._tensors, self._structure)
        self._body = BODIES[body] if not self._structure.moves_statistics else None
        self._levels = [_Level(description, self._tensors, {}, self._trained, self._structure, self._body, self.network).train(True)]
        self.tap = self._levels[0].tap

    @property
    def head(self):
        """The final Linear."""
        return self.network.head

    def parameters(self):
        """The trained tensors, in a fixed order, but for those that are set once and not by gradients."""
        return [parameter for key, parameter in self._trained.items() if key not in self._structure.set_once]

    def count(self):
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.parameters())

    def share(self):
        """Trained numbers over all parameters of the network as it is trained, 0..1."""
        return self.count() / sum(parameter.numel() for parameter in self.network.parameters())

    def state(self):
        """{key: tensor} of what training changes; the tensors are the live ones, without gradients."""
        buffers = dict(self.network.named_buffers()) if self._structure.moves_statistics else {}
        return dict({key: parameter.detach() for key, parameter in self._trained.items()}, **buffers)

    def restore(self, state):
        """Take over a `state`, in place."""
        with torch.no_grad():
            for key, tensor in self.state().items():
                tensor.copy_(state[key])

    def train(self, mode=True):
        self.training = mode
        for level in self._levels:
            level.train(mode)
        return self

    def eval(self):
        return self.train(False)

    def __call__(self, inputs, level=0):
        """Values [B, ...] at the level's tap -> logits [B, C], through the level's network."""
        return self._levels[level](inputs)

    def add_level(self, network, cuts=None):
        """A further level, through a proxy of the network (GraphNetwork with the same names, some blocks left out); returns its number.

        Its frozen tensors are the proxy's own. What is trained is the same in all levels: the same objects, or, where `cuts` ({state
        dict key: slices}, see core/slices.py) names a key, that part of them, through which gradients reach the whole.
        """
        own, description = self._original.description, copy.deepcopy(network.description)
        description["class_names"] = own["class_names"]
        head = graph.nodes_by_name(own)[own["output"]]
        graph.nodes_by_name(description)[description["output"]].update(arguments=dict(head["arguments"]))
        own_tensors = self._renamed(_named_tensors(network))
        for key in set(own_tensors).difference(self._trained):  # a set's proxies come as networks that could be trained
            own_tensors[key].requires_grad_(False)
        tensors = dict(own_tensors, **self._trained)
        level = _Level(self._structure.edit(description), tensors, self._renamed(cuts or {}), self._trained, self._structure, self._body)
        self._levels.append(level.train(self.training))
        return len(self._levels) - 1

    def tail(self):
        """(module, parts): what lies above the tap in the original, value at the tap -> logits, with the trained values as they are; and
        {key in `state`: (key of the module's parameter, TensorPart or None for the whole of it)} of what gradients train.
        """
        parts = {key: self._structure.parts.get(key) for key in self._trained if key not in self._structure.set_once}
        return self._levels[0].tail(), {key: (part.whole if part else key, part) for key, part in parts.items()}

    def tap_shape(self):
        """The shape of one sample's value at the tap, at the original's resolution."""
        size = self._original.description["input_size"]
        if self.tap == graph.INPUT:
            return tuple(size)
        if self.tap == self._original.description["tap"]:
            return (self.head.in_features,)
        like = self.head.weight
        with torch.no_grad():
            return tuple(self.frozen().features(torch.zeros([1] + list(size), device=like.device, dtype=like.dtype)).shape[1:])

    def tap_of(self, level):
        """The node that a level's trainable part starts from: another than `tap` only where blocks were left out around it."""
        return self._levels[level].tap

    def frozen(self, level=0):
        """A GraphNetwork in eval mode whose `features(images)` are the values at the level's tap, for a backend's segment."""
        return self._levels[level].frozen()

    def bridged(self):
        """The original, tuned: a GraphNetwork on the CPU, in eval mode; LoRA is merged. To be saved, as it may share tensors."""
        if self.network is self._original and not self._structure.parts and self.head.weight.device.type == "cpu":
            return self.network.eval()
        tensors = {key: tensor.detach().cpu() for key, tensor in dict(self._tensors, **self.state()).items()}
        tensors = put_back(tensors, self._structure.parts)
        if not self._structure.factors:
            return GraphNetwork(self.network.description, tensors).eval()
        tensors = merged(tensors, self._structure.factors)
        tensors = {self._structure.renamed.get(key, key): tensor for key, tensor in tensors.items()}
        return GraphNetwork(self._original.description, tensors).eval()

    def _renamed(self, entries):
        names = {old: new for new, old in self._structure.renamed.items()}
        return {names.get(key, key): entry for key, entry in entries.items()}


def tuning_of(network, config, parts=None):
    """The Tuning of a run. What it trains runs in torch: on a backend of torch's as there, else with the frozen batch norm folded away; or
    in a compiled step, which is made of plain modules, as it folds and lays out by itself.
    """
    body = config.backend.name if config.backend.name in BODIES else "folded"
    return Tuning(network, config.pet, "eager" if config.step == "compiled" else body, parts)


class _Level:
    """One network, in two: frozen up to its tap, from there on trained.

    tensors: {key: tensor} of the whole network; of those in `trained` that `cuts` cuts, a part is taken at each call. whole: the
    network itself where it is there already. body: (description, tensors, names of trained nodes) -> (description, tensors) that compute
    the same faster, or None.
    """

    def __init__(self, description, tensors, cuts, trained, structure, body, whole=None):
        wholes = {part.whole: (part, trained[key]) for key, part in structure.parts.items()}
        trained_nodes = _trained_nodes(description, set(trained).union(wholes))
        self.tap = _tap(description, trained_nodes)
        self._is_channels_last = body is not None
        self._moves_statistics = structure.moves_statistics
        self._description, self._tensors, self._whole = description, tensors, whole
        for key in wholes:
            if key in cuts:
                raise UserError(f"pet.kind=sparse: a part of {key} is trained, and a proxy has other channels of it; use proxies of whole "
                                "layers, or a scheme that trains it whole")
        cuts = {key: slices for key, slices in dict(cuts, **factor_cuts(cuts, structure.factors)).items() if key in trained}
        parts = {key: nn.Parameter(cut(trained[key].detach(), slices)) for key, slices in cuts.items()}
        if self.tap == graph.INPUT and whole is not None and body is None and not wholes:
            self._tail = whole
        else:
            tail, tensors = graph.after(description, self.tap), dict(tensors, **parts)
            if body is not None:
                tail, tensors = body(tail, tensors, trained_nodes)
                tensors = {key: tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach(), requires_grad=False)
                           for key, tensor in tensors.items()}
            self._tail = _built(tail, tensors, structure)
        # parameters of the tail that are made of trained tensors, at each call
        self._made = [(*place, functools.partial(cut, trained[key], cuts[key])) for key, place in _places(self._tail, parts).items()]
        self._made += [(*place, functools.partial(with_part, tensors[key], *wholes[key]))
                       for key, place in _places(self._tail, wholes).items()]

    def __call__(self, inputs):
        for holder, name, make in self._made:
            holder._parameters[name] = make()
        if self._is_channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return self._tail(inputs)

    def tail(self):
        for holder, name, make in self._made:
            holder._parameters[name] = nn.Parameter(make().detach(), requires_grad=False)
        return self._tail

    def train(self, mode):
        self._tail.train(mode)
        if not self._moves_statistics:
            for module in self._tail.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def frozen(self):
        if self._whole is not None and self.tap == self._description["tap"]:
            return self._whole
        description = graph.before(self._description, self.tap)
        return GraphNetwork(description, {key: self._tensors[key] for key in expected_shapes(description)}).eval()


def _tap(description, trained_nodes):
    """The last cut that no trained tensor lies before; "x" where there is none, or nothing frozen before it but padding of the image."""
    tap = graph.last_cut(description, trained_nodes)
    return tap if expected_shapes(graph.before(description, tap)) else graph.INPUT


def _channels_last(description, tensors, trained_nodes):
    """The frozen convolutions' weights in the format that CPUs and tensor cores compute in."""
    trained = {node.get("module") or node.get("parameter") for node in description["nodes"] if node["name"] in trained_nodes}
    return description, {key: tensor.contiguous(memory_format=torch.channels_last)
                         if tensor.dim() == 4 and key.rpartition(".")[0] not in trained and key not in trained else tensor
                         for key, tensor in tensors.items()}


def _folded(description, tensors, trained_nodes):
    """Frozen batch norm in the convolutions before it, and channels last."""
    description, changed = folded(description, tensors, left=trained_nodes)
    return _channels_last(description, dict(tensors, **changed), trained_nodes)  # LoRA's tensors are in no description


BODIES = {"eager": None, "channels_last": _channels_last, "folded": _folded}


def _built(description, tensors, structure):
    """The GraphNetwork of a description with those of `tensors` that it has, and LoRA put into its places."""
    network = GraphNetwork(description, {key: tensors[key] for key in expected_shapes(description)}).eval()
    return put_lora(network, tensors, structure.factors)


def _named_tensors(network):
    return dict(network.named_buffers(), **dict(network.named_parameters()))


def _trained_nodes(description, trained):
    """Names of the nodes that use a trained tensor."""
    owners = set(trained) | {key.rpartition(".")[0] for key in trained}
    return {node["name"] for node in description["nodes"] if (node.get("module") or node.get("parameter")) in owners}


def _places(network, keys):
    """{key: (module, name)}: where the network has the parameters of these keys, as far as it has them."""
    found = {}
    for path, module in network.named_modules():
        for name in module._parameters:
            key = f"{path}.{name}" if path else name
            if key in keys:
                found[key] = module, name
    return found
