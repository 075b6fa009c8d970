"""What the mixed features of a policy's training are judged by: labels, or the original itself where there are none."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from piebridge.core.errors import UserError
from piebridge.core.names import closest


class FeatureTask(nn.Module):
    """Mean of |f - f_0|^2 / |f_0|^2, f_0 being the original's features."""

    def __init__(self, features, head, labels):
        super().__init__()
        self._wanted = features[:, 0]

    def forward(self, mixed, batch):
        """Mixed features [B, D] of the images `batch` (list of int) -> scalar."""
        wanted = self._wanted[batch]
        return ((mixed - wanted).square().sum(1) / wanted.square().sum(1).clamp(min=1e-12)).mean()


class LogitTask(nn.Module):
    """Mean divergence KL(softmax(h(f_0)) || softmax(h(f))) for the original's own head h, which stays as it is."""

    def __init__(self, features, head, labels):
        super().__init__()
        self._wanted, self._head = features[:, 0], _Frozen(head)

    def forward(self, mixed, batch):
        wanted = torch.log_softmax(self._head(self._wanted[batch]), dim=1)
        return F.kl_div(torch.log_softmax(self._head(mixed), dim=1), wanted, reduction="batchmean", log_target=True)


class LabelTask(nn.Module):
    """Mean cross-entropy of a head that is trained along, starting from a copy of the given one."""

    def __init__(self, features, head, labels):
        super().__init__()
        self.head = copy.deepcopy(head).requires_grad_(True)
        self._labels = labels

    def forward(self, mixed, batch):
        return F.cross_entropy(self.head(mixed), self._labels[batch])


TASKS = {"features": FeatureTask, "logits": LogitTask, "labels": LabelTask}


def make_task(name, features, head=None, labels=None):
    """The task `name`: a module `task(mixed [B, D], batch) -> scalar` whose parameters are what is trained beside the policy.

    features [n, L, D], head, labels: see train_policy. UserError for an unknown task, or one that lacks its head or labels.
    """
    if name not in TASKS:
        raise UserError(f"policy: task={name!r} is not known{closest(name, list(TASKS))}; choose one of {', '.join(TASKS)}")
    if name != "features" and (head is None or head.in_features != features.shape[2]):
        raise UserError(f"policy: task={name} needs a head for {features.shape[2]} features; give the original's, or task=features")
    if name == "labels":
        if labels is None or len(labels) != len(features):
            raise UserError(f"policy: task=labels needs a label for each of {len(features)} images; give them, or task=features")
        if int(labels.min()) < 0 or int(labels.max()) >= head.out_features:
            raise UserError(f"policy: labels from {int(labels.min())} to {int(labels.max())} do not fit a head of {head.out_features} "
                            "classes; give a head of as many classes as there are")
    return TASKS[name](features, head, labels)


class _Frozen:
    """A call of a Linear with its weights as constants; no module, so that nothing of it is trained or saved."""

    def __init__(self, head):
        self._weight, self._bias = head.weight.detach(), None if head.bias is None else head.bias.detach()

    def __call__(self, features):
        return F.linear(features, self._weight, self._bias)
