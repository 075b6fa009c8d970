"""The audit: now and then a batch also runs through the original, and the two gradients are compared.

Proxies are judged before training by their features. What training needs of them is the gradient of the trained tensors; where the
proxies' gradient no longer points where the original's does, the cheapest level is given up.
"""

import logging

import torch
import torch.nn.functional as F

LOG = logging.getLogger(__name__)
LEAST_AUDITS = 3  # of a level, before it may be given up
MOMENTUM = 0.8  # of the running mean of the cosine


def gradient(trainable, inputs, labels, level, label_smoothing):
    """The mean loss's gradient by the trained tensors through a level, float [P], in eval mode: nothing random, nothing changed.

    inputs: values [B, ...] at the tap; labels: int [B].
    """
    was_training = trainable.training
    trainable.eval()
    with torch.enable_grad():
        loss = F.cross_entropy(trainable(inputs, level), labels, label_smoothing=label_smoothing)
        parameters = [parameter for parameter in trainable.parameters() if parameter.requires_grad]
        pieces = torch.autograd.grad(loss, parameters, allow_unused=True)
    trainable.train(was_training)
    return torch.cat([(torch.zeros_like(parameter) if piece is None else piece).flatten() for parameter, piece in zip(parameters, pieces)])


class AuditedStep:
    """A step that compares, for the share `share` of the batches that a proxy serves, its gradient with the original's.

    step: the step that trains. router: a DataAwareRouter, whose `give_up(level)` takes a level and all cheaper ones away from the next
    epoch on. original: (indices, epoch) -> the same views' values [B, ...] at the tap through the original, or None. floor: the least
    running mean of the cosine; per level, after LEAST_AUDITS. What the audit costs is in `train_seconds` like the rest of a step.
    """

    def __init__(self, step, router, original, share, floor, label_smoothing):
        self.step, self.trainable = step, step.trainable
        self._router, self._original, self._floor, self._label_smoothing = router, original, floor, label_smoothing
        self._every = max(1, int(round(1 / share)))
        self._epoch, self._served = 0, 0  # batches that a proxy has served
        self.cosines = {}  # level -> (number of audits, running mean)

    def __call__(self, inputs, labels, gate, progress, level=0):
        """As the step that it wraps; `gate.indices` are the batch's samples."""
        if self._router.levels[gate.indices[0]] > 0:
            self._served += 1
            if self._served % self._every == 0:
                self._audit(inputs, labels, gate.indices, level)
        return self.step(inputs, labels, gate, progress, level)

    def _audit(self, inputs, labels, indices, number):
        level = int(self._router.levels[indices[0]])
        values = self._original(indices, self._epoch)
        if values is None:
            return
        truth = gradient(self.trainable, values, labels, 0, self._label_smoothing)
        cosine = float(F.cosine_similarity(gradient(self.trainable, inputs, labels, number, self._label_smoothing), truth, dim=0))
        count, mean = self.cosines.get(level, (0, cosine))
        count, mean = count + 1, MOMENTUM * mean + (1 - MOMENTUM) * cosine
        self.cosines[level] = (count, mean)
        LOG.debug("audit of level %d: cosine %.3f, running mean %.3f of %d", level, cosine, mean, count)
        if count >= LEAST_AUDITS and mean < self._floor and level <= self._router.cheapest:
            LOG.warning("level %d is given up: its gradients have a mean cosine of %.2f with the original's, below router.audit_floor=%g",
                        level, mean, self._floor)
            self._router.give_up(level)

    def end_epoch(self, share_done):
        self._epoch += 1
        self.step.end_epoch(share_done)

    def state(self):
        audits = [[float(level), float(count), mean] for level, (count, mean) in sorted(self.cosines.items())]
        counts = torch.tensor([self._epoch, self._served])
        return dict(self.step.state(), **{"audit/counts": counts, "audit/cosines": torch.tensor(audits, dtype=torch.float64).view(-1, 3)})

    def restore(self, state):
        self._epoch, self._served = state["audit/counts"].tolist()
        self.cosines = {int(level): (int(count), mean) for level, count, mean in state["audit/cosines"].tolist()}
        self.step.restore({name: tensor for name, tensor in state.items() if not name.startswith("audit/")})
