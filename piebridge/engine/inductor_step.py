"""A training step compiled by TorchInductor: when it first runs, or ahead of that into a `.pt2` package, which runs without tracing."""

from pathlib import Path

import torch
from torch import nn

from piebridge.core.errors import UserError
from piebridge.core.files import atomic_path
from piebridge.engine import compat
from piebridge.engine.step_arguments import GIVEN, given_tensors, given_values
from piebridge.engine.step_graph import INDEX, LOSSES, OUTPUTS, TRAINED


class StepModule(nn.Module):
    """The step as a module that holds the live tensors as buffers and writes their new values into them.

    step: StepGraph. tensors: {(role, name): tensor}; the buffers share their memory. forward(*given), as `given_values` has them ->
    (losses, outputs).
    """

    def __init__(self, step, tensors):
        super().__init__()
        self.body, given = step.graph_module, {value: place for place, value in enumerate(given_values(step))}
        self._sources, names = [], {}  # one per input: place among what is given, or a buffer's name
        for position, value in enumerate(step.inputs):
            if value.role in GIVEN:
                self._sources.append(given[value])
            else:
                names[value.role, value.name] = f"tensor_{position}"
                self.register_buffer(f"tensor_{position}", tensors[value.role, value.name].detach())
                self._sources.append(f"tensor_{position}")
        self._targets = []  # one per output: None, or (buffer's name, dimension, name of the index) of where it goes
        for value in step.outputs:
            part = step.parts.get(value.name) if value.role == TRAINED else None
            is_whole = part is None or part.is_whole
            where = None if is_whole else part.dim, None if is_whole else names[INDEX, value.name]
            self._targets.append(None if value.role in (LOSSES, OUTPUTS) else (names[value.role, value.name], *where))

    def forward(self, *given):
        results = self.body(*[given[source] if isinstance(source, int) else getattr(self, source) for source in self._sources])
        put_out = []
        for result, target in zip(results, self._targets):
            if target is None:
                put_out.append(result)
            elif target[1] is None:
                getattr(self, target[0]).copy_(result)
            else:
                getattr(self, target[0]).index_copy_(target[1], getattr(self, target[2]), result)
        return tuple(put_out)


class InductorStep:
    """Executor of a StepGraph through torch.compile; the first run compiles, which takes from ten seconds to minutes.

    tensors: {(role, name): tensor}, the live ones, updated in place.
    """

    def __init__(self, step, tensors):
        self._step = step
        self._compiled = torch.compile(StepModule(step, tensors), fullgraph=True, dynamic=False)

    def run(self, batch, weights=None, rate=None, count=None, draws=()):
        """One step; for its arguments see step_arguments.given_tensors. -> (losses [B], outputs)."""
        losses, outputs = self.results(batch, weights, rate, count, draws)
        return losses, outputs

    def results(self, batch, weights=None, rate=None, count=None, draws=()):
        """What is put out and not written back, in the order of the step's outputs; also for a graph without losses."""
        with torch.no_grad():
            return self._compiled(*given_tensors(self._step, batch, weights, rate, count, draws))


class PackagedStep:
    """Executor of a `.pt2` package that `write_package` has made, of the same StepGraph.

    tensors: {(role, name): tensor}, the live ones: the package works on their memory, which is updated in place. Frozen ones come from
    there too. UserError for a file that is no such package.
    """

    def __init__(self, step, tensors, path):
        self._step, self._held = step, StepModule(step, tensors)
        if not Path(path).is_file():
            raise UserError(f"{path}: no such file")
        try:
            self._package = compat.load_package(path)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()
            raise UserError(f"{path}: not a package of a step ({reason[0][:120] if reason else error}); write it again") from error
        compat.share_constants(self._package, dict(self._held.named_buffers()))

    def run(self, batch, weights=None, rate=None, count=None, draws=()):
        """One step; for its arguments see step_arguments.given_tensors. -> (losses [B], outputs)."""
        losses, outputs = self.results(batch, weights, rate, count, draws)
        return losses, outputs

    def results(self, batch, weights=None, rate=None, count=None, draws=()):
        """What is put out and not written back, in the order of the step's outputs; also for a graph without losses."""
        return self._package(*given_tensors(self._step, batch, weights, rate, count, draws))


def write_package(path, step, tensors):
    """Compile a StepGraph ahead of time into a `.pt2` package; needs a C++ compiler, here but not where it runs.

    tensors: {(role, name): tensor}, examples for shapes; the package holds a copy of their values.
    """
    if not str(path).endswith(".pt2"):
        raise UserError(f"{path}: a package is named .pt2; choose another name")
    examples = tuple(torch.zeros(value.shape, dtype=value.dtype) for value in given_values(step))
    with torch.no_grad():
        exported = torch.export.export(StepModule(step, tensors), examples)
    with atomic_path(path) as temporary:
        made = temporary.with_name(temporary.name + ".pt2")  # the compiler insists on the ending
        try:
            compat.compile_package(exported, made)
            made.replace(temporary)
        finally:
            made.unlink(missing_ok=True)
