"""The training step of a linear head without autograd: its gradient is known."""

import numpy as np
import torch

from piebridge.core.optimizers import learning_rate
from piebridge.core.step import EagerStep


class DirectStep(EagerStep):
    """Softmax regression: same loss, same update rule, and a quarter of EagerStep's time, which on cached features is all there is.

    With logits z = x W^T + b, p = softmax(z), targets t = (1 - s) onehot + s / C for label smoothing s, and n selected samples:
    dL/dz = (p - t) / n for those, dL/dW = (dL/dz)^T x, dL/db = the column sums of dL/dz. In numpy, on the tensors' own memory: on a
    few rows the calls are what takes the time, and numpy's take half of torch's. On a GPU it is EagerStep.
    """

    def __call__(self, inputs, labels, gate, progress):
        """inputs [B, D], labels int [B] -> (losses float [B], is_selected bool [B], or None where all samples are)."""
        if inputs.device.type != "cpu":
            return super().__call__(inputs, labels, gate, progress)
        head, smoothing = self.trainable, self._settings.label_smoothing
        x, rows, column = inputs.numpy(), np.arange(len(inputs)), labels.numpy()
        logits = x @ head.weight.detach().numpy().T + head.bias.detach().numpy()  # [B, C]
        logits -= logits.max(axis=1, keepdims=True)
        slope = np.exp(logits)
        total = slope.sum(axis=1, keepdims=True)
        logits -= np.log(total)  # now log softmax
        slope /= total  # softmax, becomes dL/dz
        losses = (smoothing - 1) * logits[rows, column]
        if smoothing:
            losses -= smoothing / logits.shape[1] * logits.sum(axis=1)
            slope -= smoothing / logits.shape[1]
        losses = torch.from_numpy(losses)
        is_selected = gate.select(losses)
        count = len(losses) if is_selected is None else int(is_selected.sum())
        if count:
            slope[rows, column] -= 1 - smoothing
            slope *= 1 / count if is_selected is None else is_selected.numpy()[:, None] / np.asarray(count, slope.dtype)
            head.weight.grad, head.bias.grad = torch.from_numpy(slope.T @ x), torch.from_numpy(slope.sum(axis=0))
            self.optimizer.step(learning_rate(self._settings, progress))
        return losses, is_selected
