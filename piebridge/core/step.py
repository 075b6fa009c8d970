"""One training step, eagerly: forward, gate, backward, update."""

import torch
import torch.nn.functional as F

from piebridge.core.optimizers import build_optimizer, learning_rate


class EagerStep:
    """The trainable module, its loss and its optimizer; their state lives as long as the run."""

    def __init__(self, trainable, settings):
        self.trainable = trainable
        self._settings = settings
        self.optimizer = build_optimizer([p for p in trainable.parameters() if p.requires_grad], settings)

    def __call__(self, inputs, labels, gate, progress):
        """inputs [B, ...], labels int [B] -> (losses float [B], is_selected bool [B], or None where all samples are).

        The loss is the mean over the samples that the gate selects; when it selects none, nothing is updated.
        """
        losses = F.cross_entropy(self.trainable(inputs), labels, reduction="none", label_smoothing=self._settings.label_smoothing)
        detached = losses.detach()
        is_selected = gate.select(detached)
        if is_selected is None or bool(is_selected.any()):
            self.optimizer.zero_grad()
            (losses if is_selected is None else losses[is_selected]).mean().backward()
            self.optimizer.step(learning_rate(self._settings, progress))
        return detached, is_selected


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
