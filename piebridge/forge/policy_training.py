"""Train the policy as PieBridge does: a Gumbel-softmax mask mixes the features of all levels, and the mix is judged by its task.

The levels are frozen, so their features of each image are computed once, before; a step then costs the tiny network and a sum.
"""

import hashlib
import logging
import time
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch

from piebridge.core.checkpoint import STATE_FILE, read_checkpoint
from piebridge.core.errors import RunFailed, UserError
from piebridge.core.files import sha256_of_json
from piebridge.core.optimizers import build_optimizer, learning_rate
from piebridge.core.progress_bar import progress_bar
from piebridge.core.safetensors_file import tensor_bytes
from piebridge.core.sampler import epoch_batches
from piebridge.forge.checkpoints import write_checkpoint
from piebridge.forge.policy_loss import gumbel_mask, policy_loss, temperature
from piebridge.forge.policy_tasks import make_task

LOG = logging.getLogger(__name__)
LEAST_IMAGES = 8


@dataclass(frozen=True)
class PolicySettings:
    """task: "features" (relative square error from the original's), "logits" (divergence from the original's head) or "labels".

    cost_weight: lambda, the loss that one pass of the original is worth. epochs: the paper takes one, over 1.28 million images.
    """

    task: str = "features"
    cost_weight: float = 0.3
    epochs: int = 20
    batch_size: int = 32
    lr: float = 2e-3
    weight_decay: float = 0.01
    first_temperature: float = 5.0
    last_temperature: float = 0.5
    seed: int = 0
    checkpoint_seconds: float = 60.0

    def __post_init__(self):
        least = {"cost_weight": 0, "epochs": 1, "batch_size": 2, "lr": 0, "first_temperature": 1e-3, "last_temperature": 1e-3}
        for key, low in least.items():
            if not getattr(self, key) >= low:
                raise UserError(f"policy: {key}={getattr(self, key)} is below the least allowed, {low}")


def train_policy(policy, images, features, scores, settings=None, head=None, labels=None, folder=None, interrupt=None):
    """Train `policy` (see make_policy) in place; returns facts about it (JSON values).

    images: float32 [n, 3, S, S], normalised, at the policy's size. features: float32 [n, N + 1, D], each image's features at the
    head's tap through every level, bridged; the original's first. scores: N + 1 costs relative to the original's, which is 1, from
    the latency table. head: the original's Linear, for the tasks "logits" and "labels". labels: int64 [n], for "labels"; a copy
    of the head is then trained along, as the paper trains the trainable blocks.
    folder: where a checkpoint is kept; a training of the same inputs and settings goes on from there, to the same weights.
    interrupt: see core/interrupt.py. UserError for inputs that do not fit together, RunFailed for a loss that is not finite.
    """
    settings = settings or PolicySettings()
    scores = _checked(policy, images, features, scores)
    task = make_task(settings.task, features, head, labels)
    training = _Training(policy, task, settings, len(images), folder)
    training.restore(_key(policy, settings, scores, features, head, labels))
    policy.train()
    with progress_bar(total=training.total, desc="policy", unit="step", initial=training.done) as bar:
        while training.done < training.total:
            training.step(images, features, scores)
            bar.update()
            is_interrupted = interrupt is not None and interrupt.signal_name is not None
            training.save_when_due(is_interrupted)
            if is_interrupted:
                interrupt.check()
    policy.eval()
    return describe_policy(policy, images, features, scores, task)


class _Training:
    """The state of a training: `done` of `total` steps, weights, the optimizer's averages. Noise and batches follow from the step."""

    def __init__(self, policy, task, settings, count, folder):
        self.policy, self.task, self.settings, self.count, self.folder = policy, task, settings, count, folder
        self.update = SimpleNamespace(kind="adamw", schedule="cosine", lr=settings.lr, weight_decay=settings.weight_decay)
        self.rule = build_optimizer(list(policy.parameters()) + list(task.parameters()), self.update)
        self.per_epoch = -(-count // settings.batch_size)
        self.total, self.done, self.key = self.per_epoch * settings.epochs, 0, None
        self._saved = time.monotonic()

    def step(self, images, features, scores):
        settings, progress = self.settings, self.done / self.total
        epoch, number = divmod(self.done, self.per_epoch)
        batch = epoch_batches(self.count, settings.batch_size, settings.seed, epoch)[number]
        generator = torch.Generator().manual_seed(settings.seed * 1000003 + self.done)
        heat = temperature(progress, settings.first_temperature, settings.last_temperature)
        mask = gumbel_mask(self.policy(images[batch]), heat, generator)
        loss = policy_loss(mask, features[batch], scores, settings.cost_weight, lambda mixed: self.task(mixed, batch))
        if not bool(torch.isfinite(loss)):
            raise RunFailed(f"policy: the loss is not finite at step {self.done}; lower its learning rate, {settings.lr}")
        self.rule.zero_grad()
        loss.backward()
        self.rule.step(learning_rate(self.update, progress))
        self.done += 1

    def save_when_due(self, is_interrupted):
        is_due = is_interrupted or self.done == self.total or time.monotonic() - self._saved > self.settings.checkpoint_seconds
        if self.folder is not None and is_due:
            write_checkpoint(self.folder, self.key, self._tensors(), {"done": self.done})
            self._saved = time.monotonic()

    def restore(self, key):
        """Go on from the checkpoint in the folder where it has the same key."""
        self.key = key
        found = read_checkpoint(self.folder) if self.folder is not None else None
        if found is None:
            return
        saved, facts = found
        live = self._tensors()
        if facts.get("job") != self.key or {name: each.shape for name, each in saved.items()} != {
                name: each.shape for name, each in live.items()}:
            LOG.info("policy: %s is of other images or settings: starting anew", self.folder / STATE_FILE)
            return
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(saved[name])
        self.rule.restore({name[len("rule/"):]: each for name, each in saved.items() if name.startswith("rule/")})
        self.done = int(facts["done"])
        LOG.info("policy: going on after step %d of %d", self.done, self.total)

    def _tensors(self):
        """{name: tensor}, the live ones."""
        parts = {"policy": self.policy.state_dict(), "task": self.task.state_dict(), "rule": self.rule.state()}
        return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def _key(policy, settings, scores, features, head, labels):
    """Hash of what decides the result; other images have other features."""
    seen = hashlib.sha256()
    for tensor in [features] + ([] if labels is None else [labels]) + ([] if head is None else list(head.parameters())):
        seen.update(tensor_bytes(tensor))
    return sha256_of_json({"settings": asdict(settings), "scores": scores.tolist(), "shape": list(features.shape),
                           "tensors": seen.hexdigest(), "policy": policy.fingerprint()})


def describe_policy(policy, images, features, scores, task, batch_size=256):
    """What the policy does with some images: {"shares" of the levels, "relative_cost", "task_loss", "level_losses"}.

    relative_cost: mean score of the levels given. task_loss: of the features of these levels; level_losses: if every image had
    the level, the same for each.
    """
    pieces = [list(range(start, min(start + batch_size, len(images)))) for start in range(0, len(images), batch_size)]
    with torch.no_grad():
        levels = torch.cat([policy(images[piece]).argmax(1) for piece in pieces])

        def loss(chosen):
            return sum(len(piece) * float(task(features[piece, chosen[piece]], piece)) for piece in pieces) / len(images)

        single = [loss(torch.full_like(levels, level)) for level in range(len(scores))]
        return {"shares": (torch.bincount(levels, minlength=len(scores)) / len(levels)).tolist(),
                "relative_cost": float(scores[levels].mean()), "task_loss": loss(levels), "level_losses": single}


def _checked(policy, images, features, scores):
    """The scores as a tensor. UserError where the inputs do not fit each other."""
    where = f"policy {policy.description['name']}"
    size, outputs = policy.description["input_size"], policy.head.out_features
    if len(images) < LEAST_IMAGES:
        raise UserError(f"{where}: {len(images)} images are too few to train it; give {LEAST_IMAGES} or more")
    if list(images.shape[1:]) != size:
        raise UserError(f"{where}: it is for images of {size}, and these are {list(images.shape[1:])}; load them at its size")
    if features.dim() != 3 or features.shape[:2] != (len(images), outputs):
        raise UserError(f"{where}: features must be [{len(images)}, {outputs}, D] for these images and its levels, and are "
                        f"{list(features.shape)}")
    for level in range(outputs):
        if not bool(torch.isfinite(features[:, level]).all()):
            raise UserError(f"{where}: level {level} gives features that are not finite; make that proxy anew or leave it out")
    scores = torch.as_tensor(scores, dtype=torch.float32)
    if scores.shape != (outputs,) or not bool((torch.isfinite(scores) & (scores > 0)).all()) or float(scores[0]) != 1.0:
        raise UserError(f"{where}: scores={scores.tolist()} must be {outputs} costs above zero, relative to the original's, the first: 1")
    return scores
