"""Selected samples wait until they fill a batch (Selective-Backprop, Jiang et al. 2019, algorithm 1)."""

import torch
import torch.nn.functional as F

from piebridge.core.gate import OpenGate

PREFIX = "waiting/"


class FullBatchStep:
    """A step that looks at each batch in a forward pass without gradients and trains on what the gate has selected, in full batches.

    step: trains on a batch. batch_size: how many selected samples it is called with; those of one level wait together, and what
    waits at the end of the training is never used, as published.
    """

    def __init__(self, step, batch_size, label_smoothing):
        self.step, self.trainable = step, step.trainable
        self._batch_size, self._label_smoothing = batch_size, label_smoothing
        self._waiting = {}  # level -> (inputs, labels)

    def __call__(self, inputs, labels, gate, progress, level=0):
        """As the step that it wraps: (losses float [B], is_selected bool [B] or None)."""
        with torch.no_grad():
            losses = F.cross_entropy(self.trainable(inputs, level), labels, reduction="none", label_smoothing=self._label_smoothing)
        choice = gate.select(losses)
        if choice is not None:
            inputs, labels = inputs[choice[0]], labels[choice[0]]
        if level in self._waiting:
            inputs, labels = [torch.cat(pair) for pair in zip(self._waiting[level], (inputs, labels))]
        while len(labels) >= self._batch_size:
            self.step(inputs[:self._batch_size], labels[:self._batch_size], OpenGate(), progress, level)
            inputs, labels = inputs[self._batch_size:], labels[self._batch_size:]
        self._waiting[level] = (inputs.clone(), labels.clone())
        return losses, None if choice is None else choice[0]

    def end_epoch(self, share_done):
        self.step.end_epoch(share_done)

    def state(self):
        waiting = {f"{PREFIX}{level}/{name}": tensor for level, pair in self._waiting.items()
                   for name, tensor in zip(("inputs", "labels"), pair) if len(pair[1])}
        return dict(self.step.state(), **waiting)

    def restore(self, state):
        device = self.trainable.parameters()[0].device
        levels = sorted({int(name.split("/")[1]) for name in state if name.startswith(PREFIX)})
        self._waiting = {level: tuple(state[f"{PREFIX}{level}/{name}"].to(device) for name in ("inputs", "labels")) for level in levels}
        self.step.restore({name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)})
