"""One training step, eagerly: forward, gate, backward, update."""

import torch
import torch.nn.functional as F

from piebridge.core.optimizers import build_optimizer, learning_rate


class EagerStep:
    """What is trained (a Tuning, see core/tuning.py), its loss and its optimizer; their state lives as long as the run."""

    def __init__(self, trainable, settings):
        self.trainable = trainable
        self._settings = settings
        self.optimizer = build_optimizer(trainable.parameters(), settings)

    def __call__(self, inputs, labels, gate, progress, level=0):
        """inputs [B, ...] at the trainable part's tap, labels int [B], through network `level` of the trainable part.

        gate: `select(losses)`, see core/gate.py. progress: share of the run that is done, 0..1. Returns (losses float [B],
        is_selected bool [B], or None where all samples are); when the gate selects none, nothing is updated.
        """
        losses = self.losses(inputs, labels, level)
        detached = losses.detach()
        choice = gate.select(detached)
        loss = gated_loss(losses, choice)
        if loss is not None:
            self.optimizer.zero_grad()
            self.backward(loss)
            self.optimizer.step(learning_rate(self._settings, progress))
        return detached, None if choice is None else choice[0]

    def losses(self, inputs, labels, level=0):
        """The loss of each sample, float [B]."""
        return F.cross_entropy(self.trainable(inputs, level), labels, reduction="none", label_smoothing=self._settings.label_smoothing)

    def backward(self, loss):
        """Add the gradient of what is minimised to the `.grad` of the trained tensors."""
        loss.backward()

    def end_epoch(self, share_done):
        """Called after each epoch, when the share `share_done` (0..1) of the run is done, before the validation."""

    def state(self):
        """{name: tensor} of what has to outlive the process, beside the trained tensors themselves; the tensors may be live ones."""
        return self.optimizer.state()

    def restore(self, state):
        """Go on from `state`; called before the trained tensors are restored."""
        self.optimizer.restore(state)


def gated_loss(losses, choice):
    """The loss that a step takes its gradient from, or None where no sample is selected.

    losses: float [B]. choice: what a gate selected. All: the mean. Some, without weights: the mean over the selected. With weights:
    the sum of weight * loss over the selected, divided by B; unbiased where each weight is one over the chance of being selected.
    """
    if choice is None:
        return losses.mean()
    is_selected, weights = choice
    if not bool(is_selected.any()):
        return None
    if weights is None:
        return losses[is_selected].mean()
    return (losses * weights)[is_selected].sum() / len(losses)


def evaluate(trainable, batches):
    """Accuracy (0..1) and mean cross-entropy over an iterable of (inputs, labels); (None, None) where it is empty."""
    was_training = trainable.training
    trainable.eval()
    correct, loss, count = 0, 0.0, 0
    with torch.no_grad():
        for inputs, labels in batches:
            logits = trainable(inputs)
            correct += int((logits.argmax(1) == labels).sum())
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            count += len(labels)
    trainable.train(was_training)
    return (correct / count, loss / count) if count else (None, None)
