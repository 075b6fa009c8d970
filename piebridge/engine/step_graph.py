"""A training step as one static graph: what goes in, what comes out, and the ATen graph between.

The graph is a torch.fx GraphModule of ATen calls with static shapes. Each node's `meta["val"]` is a tensor without memory (a
FakeTensor) with its shape, type, strides and storage: nodes whose fake tensors share a storage share memory when they run.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import fx

from piebridge.core.errors import UserError

# roles of inputs; `name` is a state dict key, "key/slot" for states, or the batch's own name
TRAINED, FROZEN, BUFFER = "trained", "frozen", "buffer"
INDEX = "index"  # int64 [n]: the chosen channels of a partly trained tensor
STATE = "state"  # of the update rule, as large as the trained part
BATCH, WEIGHTS = "batch", "weights"  # inputs and targets; float [B], what each sample's loss counts
RATE, COUNT = "rate", "count"  # float scalars: learning rate; number of this update, from 1
DRAW = "draw"  # random numbers that the caller draws: `facts` says how
# roles of outputs: LOSSES float [B] and OUTPUTS (the network's), then what an input of the same role and name becomes
LOSSES, OUTPUTS = "losses", "outputs"


@dataclass(frozen=True)
class Value:
    """An input or output of a step."""

    role: str
    name: str
    shape: Tuple[int, ...]
    dtype: torch.dtype
    facts: Dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def bytes(self):
        size = torch.empty((), dtype=self.dtype).element_size()
        for extent in self.shape:
            size *= extent
        return size

    def check(self, tensor):
        """UserError where a tensor has not this shape and type: a step was captured for one."""
        if tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype:
            return
        cure = "capture a step for that"
        if self.role in (BATCH, WEIGHTS) and tensor.dtype == self.dtype:
            cure += ", or fill the batch up with samples of weight 0"
        given, needed = f"{tensor.dtype} {list(tensor.shape)}", f"{self.dtype} {list(self.shape)}"
        raise UserError(f"step: {self.name} is {given}, and the step was captured for {needed}; {cure}")


@dataclass(frozen=True)
class Part:
    """What is trained of a tensor: all of it, or `index` (int64 [n], ascending) along dimension `dim`."""

    dim: Optional[int] = None
    index: Optional[torch.Tensor] = None

    @property
    def is_whole(self):
        return self.dim is None

    def of(self, tensor):
        return tensor if self.is_whole else tensor.index_select(self.dim, self.index)


@dataclass
class StepGraph:
    """graph_module: placeholders in the order of `inputs`, one output tuple in the order of `outputs`. parts: {key: Part} of what is
    trained; an output TRAINED is the new value of that part. facts: what passes and planners note about it.
    """

    graph_module: fx.GraphModule
    inputs: List[Value]
    outputs: List[Value]
    parts: Dict[str, Part]
    facts: Dict[str, Any] = field(default_factory=dict)

    @property
    def graph(self):
        return self.graph_module.graph

    @property
    def placeholders(self):
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output(self):
        """The node behind all others, which puts out the results."""
        return next(iter(reversed(self.graph.nodes)))

    @property
    def results(self):
        """The nodes that are put out, in the order of `outputs`."""
        return list(self.output.args[0])

    def inputs_of(self, *roles):
        """[(position, Value)] of the inputs with one of these roles."""
        return [(position, value) for position, value in enumerate(self.inputs) if value.role in roles]

    def node_of(self, role, name=None):
        """The placeholder of an input."""
        for node, value in zip(self.placeholders, self.inputs):
            if value.role == role and name in (None, value.name):
                return node
        raise KeyError((role, name))

    def add_input(self, value, like=None):
        """A further placeholder, behind the others; returns its node."""
        last = self.placeholders[-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(f"{value.role}_{len(self.inputs)}")
        node.meta["val"] = like
        self.inputs.append(value)
        return node

    def finish(self):
        """Called after an edit: check the graph and regenerate its code."""
        self.graph.lint()
        self.graph_module.recompile()
        return self

    def copy(self):
        """Another StepGraph with an own graph; tensors and fake tensors are shared."""
        graph, mapping = fx.Graph(), {}
        output = graph.graph_copy(self.graph, mapping)
        graph.output(output)
        for old, new in mapping.items():
            new.meta = dict(old.meta)
        module = fx.GraphModule(self.graph_module, graph)
        return replace(self, graph_module=module, inputs=list(self.inputs), outputs=list(self.outputs), parts=dict(self.parts),
                       facts=dict(self.facts))

    def __call__(self, *arguments):
        """Run it as it stands: one tensor per input -> one per output."""
        if len(arguments) != len(self.inputs):
            raise UserError(f"step: takes {len(self.inputs)} inputs, {len(arguments)} given")
        for value, tensor in zip(self.inputs, arguments):
            value.check(tensor)
        return self.graph_module(*arguments)
