"""A compiled training step, to be called like a function: it owns what it trains, counts its updates and draws its random numbers."""

import functools
import logging

import torch

from piebridge.core.errors import UserError
from piebridge.engine.interpreter import Interpreter
from piebridge.engine.program_file import COUNT_NAME, read_program, read_state, state_layout, write_program, write_state
from piebridge.engine.step_graph import BATCH, DRAW, STATE, WEIGHTS

LOG = logging.getLogger(__name__)
UPDATE, ACCUMULATE = "update", "accumulate"


class StepProgram:
    """steps: {"update": StepGraph, and "accumulate" where gradients are added up over several batches}, propagated. tensors: {(role, name):
    tensor} of all that stays between steps; what is trained and what changes is copied, the rest shared. facts: JSON value, kept in the
    program file: "scheme", "settings" {"seed", "accumulation", "is_channels_last"}, "mixes_samples", "compile_seconds", "choice".
    executor: see interpreter.py; called with a step and the tensors.

    Attributes: steps, facts, batch_size.
    """

    def __init__(self, steps, tensors, facts=None, executor=None, content_hash=""):
        self.steps, self.facts, self._hash = steps, dict(facts or {}), content_hash
        settings = self.facts.get("settings", {})
        self._seed, self._accumulation = settings.get("seed", 0), settings.get("accumulation", 1)
        if (self._accumulation > 1) != (ACCUMULATE in steps):
            raise UserError(f"engine: accumulation={self._accumulation} with the graphs {', '.join(steps)}")
        self._layout = state_layout(steps[UPDATE])
        changing = {(value.role, value.name) for _, value, _ in self._layout}
        self._tensors = {key: tensor.detach().clone() if key in changing else tensor.detach() for key, tensor in tensors.items()}
        executor = executor or (lambda step, live: Interpreter(step, live, settings.get("is_channels_last", False)))
        self._executors = {name: executor(step, self._tensors) for name, step in steps.items()}
        self._step_count = 0
        self._given = [value for _, value in steps[UPDATE].inputs_of(BATCH)]
        self._draws = {name: [value for _, value in step.inputs_of(DRAW)] for name, step in steps.items()}
        (_, weights), = steps[UPDATE].inputs_of(WEIGHTS)
        self.batch_size, self._weight_type = weights.shape[0], weights.dtype

    @property
    def update_count(self):
        """How many updates have been made."""
        return self._step_count // self._accumulation

    @property
    def tensors(self):
        """{(role, name): tensor} of all that stays between steps; the live ones."""
        return self._tensors

    @property
    def compile_seconds(self):
        """What making it has taken, or finding it again in the cache."""
        return self.facts.get("compile_seconds", 0.0)

    @property
    def memory(self):
        """The MemoryPlan of the updating step, see memory_plan.py."""
        from piebridge.engine.memory_plan import plan_memory

        return plan_memory(self.steps[UPDATE])

    def __call__(self, inputs, targets, weights=None, rate=0.01):
        """One step. inputs, targets: a tensor or a tuple of tensors, as in the example. weights: float [B], what each sample's loss counts
        in the sum that is minimised; None: the mean over the batches of one update. rate: the learning rate.

        A batch of fewer samples than it was compiled for is filled up with its first sample at weight 0, and what comes back is cut.
        Returns (losses float [B], outputs), both without the weights. UserError where shapes or types are not the compiled ones.
        """
        batch = [*(inputs if isinstance(inputs, tuple) else (inputs,)), *(targets if isinstance(targets, tuple) else (targets,))]
        size = self._check(batch)
        if weights is None:
            weights = torch.full((size,), 1.0 / (size * self._accumulation), dtype=self._weight_type, device=batch[0].device)
        elif tuple(weights.shape) != (size,):
            raise UserError(f"step program: weights has the shape {list(weights.shape)}, for {size} samples; give one per sample")
        if size < self.batch_size:
            batch, weights = self._filled_up(batch, weights.to(self._weight_type), size)
        name = UPDATE if (self._step_count + 1) % self._accumulation == 0 else ACCUMULATE
        executor, draws = self._executors[name], self._drawn(self._draws[name])
        if not getattr(executor, "draws_late", False):
            draws = [draw() for draw in draws]
        losses, outputs = executor.run(batch, weights.to(self._weight_type), float(rate), float(self.update_count + 1), draws)
        self._step_count += 1
        if size < self.batch_size:
            losses, outputs = losses[:size], outputs[:size] if outputs.shape[:1] == (self.batch_size,) else outputs
        return losses, outputs

    def _check(self, batch):
        """Number of samples in a batch that fits."""
        if len(batch) != len(self._given):
            raise UserError(f"step program: takes {', '.join(value.name for value in self._given)}, and {len(batch)} tensors were given")
        size = batch[0].shape[0] if batch[0].dim() else 0
        if not 0 < size <= self.batch_size:
            raise UserError(f"step program: a batch of {size} samples, compiled for {self.batch_size}; split it, or compile with such an "
                            "example")
        for value, tensor in zip(self._given, batch):
            shape = (size, *value.shape[1:]) if value.shape[:1] == (self.batch_size,) else value.shape
            if tensor.dtype != value.dtype:
                raise UserError(f"step program: {value.name} is {tensor.dtype}, compiled for {value.dtype}; "
                                f"convert it with .to({value.dtype})")
            if tuple(tensor.shape) != shape:
                raise UserError(f"step program: {value.name} has the shape {list(tensor.shape)}, compiled for {list(shape)}; "
                                "bring it to that size, or compile with an example like it")
        if size < self.batch_size and self.facts.get("mixes_samples"):
            raise UserError(f"step program: a batch of {size} samples, compiled for {self.batch_size}; it cannot be filled up, as "
                            f"{self.facts['mixes_samples']} takes its statistics from the whole batch: leave the last small batch out, "
                            "or compile with is_training=False")
        return size

    def _filled_up(self, batch, weights, size):
        missing = self.batch_size - size
        filled = [torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])]) if value.shape[:1] == (self.batch_size,) else tensor
                  for value, tensor in zip(self._given, batch)]
        return filled, torch.cat([weights, weights.new_zeros(missing)])

    def _drawn(self, values):
        """Functions that draw: what they draw depends on the seed, the number of steps so far and their own number only, so that a
        resumed run draws the same, and in any order.
        """
        device = next(iter(self._tensors.values())).device
        return [functools.partial(_draw, value, self._seed, self._step_count, number, device) for number, value in enumerate(values)]

    def state(self):
        """{name: tensor} of what training changes, copied: trained parts, the rule's states, buffers that change, the number of steps."""
        state = {name: part.of(self._tensors[value.role, value.name]).clone() for name, value, part in self._layout}
        return dict(state, **{COUNT_NAME: torch.tensor([self._step_count])})

    def restore(self, state):
        """Go on from a `state` of the same program. UserError where it is another's."""
        wanted = {name: (tuple(value.shape), value.dtype) for name, value, _ in self._layout}
        wanted[COUNT_NAME] = (1,), torch.int64
        for name, (shape, dtype) in wanted.items():
            if name not in state:
                raise UserError(f"step program: the state has no {name!r}; it is another program's")
            if tuple(state[name].shape) != shape or state[name].dtype != dtype:
                raise UserError(f"step program: {name!r} of the state is {state[name].dtype} {list(state[name].shape)}, "
                                f"this program's {dtype} {list(shape)}; it is another program's")
        for name in state:
            if name not in wanted:
                raise UserError(f"step program: the state has {name!r}, which this program does not train; it is another program's")
        for name, value, part in self._layout:
            target = self._tensors[value.role, value.name]
            target.copy_(state[name]) if part.is_whole else target.index_copy_(part.dim, part.index, state[name])
        self._step_count = int(state[COUNT_NAME])
        return self

    def load_into(self, module):
        """Put the tuned values, and the buffers that have changed, into a module with the original's names. Returns it."""
        tensors = dict(module.named_parameters(), **dict(module.named_buffers()))
        changed = [(value.role, value.name) for _, value, _ in self._layout if value.role != STATE]
        for role, name in changed:
            if name not in tensors or tensors[name].shape != self._tensors[role, name].shape:
                found = list(tensors[name].shape) if name in tensors else "no such tensor"
                raise UserError(f"step program: {name!r} is {list(self._tensors[role, name].shape)} here, and in the module: {found}")
        with torch.no_grad():
            for role, name in changed:
                tensors[name].copy_(self._tensors[role, name])
        return module

    def write(self, path):
        """Write the program file: graphs, frozen tensors and the values that training starts from, which are the present ones."""
        self._hash = write_program(path, self.steps, self._tensors, self.facts)
        return self

    @classmethod
    def read(cls, path, executor=None):
        """The program of a file, at its beginning, on the executor that was chosen when it was compiled, or on another. UserError where the
        file is not one, and where that executor cannot run here; no code from the file is run.
        """
        steps, tensors, facts, content_hash = read_program(path)
        if executor is None and facts.get("choice"):
            from piebridge.engine.backends import FastestExecutor

            executor = FastestExecutor(choice=facts["choice"])
        return cls(steps, tensors, facts, executor, content_hash)

    def write_state(self, path):
        """Write `state` as a small file of its own."""
        write_state(path, self.state(), self._hash)
        return self

    def read_state(self, path):
        """Go on from a state file. UserError where it is not one of this program."""
        try:
            return self.restore(read_state(path))
        except UserError as error:
            raise UserError(f"{path}: {str(error).replace('step program: ', '')}") from None


def _draw(value, seed, step_count, number, device):
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + step_count) * 1_000_003 + number) % (1 << 63))
    return torch.empty(value.shape, dtype=value.dtype).bernoulli_(value.facts["keep"], generator=generator).to(device)
