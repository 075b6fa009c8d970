"""The training step of a linear head without autograd: its gradient is known."""

import torch

from piebridge.core.optimizers import learning_rate
from piebridge.core.step import EagerStep


class DirectStep(EagerStep):
    """Softmax regression: same loss, same update rule, and a third of EagerStep's time, which on cached features is all there is.

    With logits z = x W^T + b, p = softmax(z), targets t = (1 - s) onehot + s / C for label smoothing s, and n selected samples:
    dL/dz = (p - t) / n for those, dL/dW = (dL/dz)^T x, dL/db = the column sums of dL/dz.
    """

    @torch.no_grad()
    def __call__(self, inputs, labels, gate, progress):
        """inputs [B, D], labels int [B] -> (losses float [B], is_selected bool [B], or None where all samples are)."""
        head, smoothing = self.trainable, self._settings.label_smoothing
        logarithms = torch.log_softmax(torch.addmm(head.bias, inputs, head.weight.t()), 1)  # [B, C]
        classes, column = logarithms.shape[1], labels[:, None]
        losses = (smoothing - 1) * logarithms.gather(1, column)[:, 0]
        if smoothing:
            losses -= smoothing / classes * logarithms.sum(1)
        is_selected = gate.select(losses)
        count = len(losses) if is_selected is None else int(is_selected.sum())
        if count:
            slope = logarithms.exp_()  # [B, C], becomes dL/dz
            if smoothing:
                slope -= smoothing / classes
            slope.scatter_add_(1, column, slope.new_full(column.shape, smoothing - 1))
            slope *= 1 / count if is_selected is None else is_selected[:, None].to(slope.dtype) / count
            head.weight.grad, head.bias.grad = slope.t() @ inputs, slope.sum(0)
            self.optimizer.step(learning_rate(self._settings, progress))
        return losses, is_selected
