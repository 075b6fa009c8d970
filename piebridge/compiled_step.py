"""step=compiled: what a run trains, as one program of the engine in the place of forward, autograd and optimizer."""

import torch

from piebridge.core.errors import UserError
from piebridge.core.optimizers import learning_rate
from piebridge.engine.compiling import compile as compile_step
from piebridge.engine.losses import smoothed
from piebridge.engine.step_graph import BUFFER, TRAINED, Part
from piebridge.engine.update_rules import rule_of

MIB = 1024 * 1024


class CompiledStep:
    """As EagerStep (core/step.py), with the same losses, update and state but for rounding.

    Compiled at the first batch, for the configured batch size: a smaller batch is filled up, or gets a program of its own where batch norm
    looks at the whole batch. The trained values are the program's; the Tuning has them after `end_epoch` and after `state`.
    """

    def __init__(self, trainable, config, report=lambda facts: None):
        """trainable: a Tuning. config: Config. report: takes what run.json says of the compilation, JSON values."""
        self.trainable = trainable
        self._settings, self._batch_size, self._seed, self._report = config.optimizer, config.loader.batch_size, config.seed, report
        self._programs, self._current = {}, None  # {batch size: StepProgram}; that which has the present values
        self._names = {}  # of the trained values in a program's state, by their keys in the Tuning's
        self._state = {}  # that the first program goes on from

    def __call__(self, inputs, labels, gate, progress, level=0):
        """As EagerStep's. gate: one that selects all samples, and whose `weights` say beforehand what each counts."""
        if level:
            raise UserError("step=compiled: trains through the original alone; use router.kind=none, or step=eager")
        weights = gate.weights()
        program = self._program_for(inputs, labels)
        losses, _ = program(inputs, labels, None if weights is None else weights.to(labels.device) / len(labels),
                            learning_rate(self._settings, progress))
        choice = gate.select(losses)
        return losses, None if choice is None else choice[0]

    def end_epoch(self, share_done):
        """Give the Tuning the present values, for the validation."""
        self._bring()

    def state(self):
        """{name: tensor} of what has to outlive the process, beside the trained tensors, which the Tuning has from now on."""
        self._bring()
        state = self._state if self._current is None else self._current.state()
        return {name: tensor for name, tensor in state.items() if not name.startswith((f"{TRAINED}/", f"{BUFFER}/"))}

    def restore(self, state):
        """Go on from `state`, with the Tuning's values as they are at the next batch."""
        self._programs, self._current, self._state = {}, None, dict(state)

    def _bring(self):
        if self._current is None:
            return
        state = self._current.state()
        with torch.no_grad():
            for key, tensor in self.trainable.state().items():
                name = self._names.get(key, f"{BUFFER}/{key}")
                if name in state:
                    tensor.copy_(state[name])

    def _program_for(self, inputs, labels):
        """The StepProgram for a batch, at the present values."""
        program = self._compiled(self._batch_size, inputs, labels)
        if len(labels) < self._batch_size and program.facts["mixes_samples"]:
            program = self._compiled(len(labels), inputs, labels)
        if self._current is None:
            program.restore(dict(program.state(), **self._state))
        elif program is not self._current:
            program.restore(self._current.state())
        self._current = program
        return program

    def _compiled(self, size, inputs, labels):
        if size not in self._programs:
            module, trained = self.trainable.tail()
            self._names = {key: f"{TRAINED}/{whole}" for key, (whole, _) in trained.items()}
            parts = {key: Part() if part is None else Part(part.dim, part.index) for key, part in trained.values()}
            places = torch.arange(size, device=labels.device) % len(labels)
            program = compile_step(module, smoothed(self._settings.label_smoothing), rule_of(self._settings), parts,
                                   (inputs[places], labels[places]), is_training=True, seed=self._seed)
            self._programs[size] = program
            programs = self._programs.values()
            self._report({"batch_sizes": sorted(self._programs),
                          "seconds": round(sum(each.compile_seconds for each in programs), 3),
                          "planned_peak_mib": round(max(each.memory.peak_bytes for each in programs) / MIB, 3)})
        return self._programs[size]
