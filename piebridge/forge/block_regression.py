"""Alignment by block-wise regression of the original's features: one block at a time, gradients inside the block only."""

import contextlib
import logging
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch

from piebridge.core.files import sha256_of_json
from piebridge.core.optimizers import build_optimizer, learning_rate
from piebridge.forge.checkpoints import restore_checkpoint, restore_parameters, write_checkpoint
from piebridge.forge.segments import BATCH, device_of, own_parameters, resampled, walk

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegressionSettings:
    """epochs: passes over the images for each block. rate: of AdamW, falling to zero as a cosine. held_out: share of the images that
    decide whether a block's new weights are kept; at least one image is trained on, and one held out."""

    epochs: int = 3
    batch_size: int = 16
    rate: float = 1e-3
    weight_decay: float = 0.0
    held_out: float = 0.125
    seed: int = 0


def regress_blocks(original, proxy, batches, settings=None, folder=None, scratch=None, on_step=lambda: None):
    """Align `proxy` in place; tensors that it shares with the original and that change become its own. Returns a list of dicts.

    Each block learns to give what the original gives at its output, from what the blocks before it, already aligned, now give: all
    of its parameters, by AdamW on the relative mean square error, with the statistics of batch norms as they are. Of its states
    after each epoch, and the one it had, that with the least loss on held-out images stays, so no block gets worse on them.

    batches, scratch: see segments.walk. folder: for a checkpoint after each block; a call with the same networks and settings goes
    on from there. on_step: called before each batch; what it raises ends the work. A dict of the result: block; before, after:
    held-out loss; epoch: whose weights were kept, 0 for those it had.
    UserError where the checkpoint is of other work.
    """
    settings = settings or RegressionSettings()
    job = sha256_of_json([asdict(settings), original.fingerprint(), proxy.fingerprint()])
    with own_parameters(proxy):
        report = _restored(proxy, folder, job)
        done = len(report)
        for number, stretch in enumerate(walk(original, proxy, batches, scratch)):
            if number < done:
                continue
            report.append(_regress(stretch, settings, number, on_step))
            if folder is not None:
                write_checkpoint(folder, job, dict(proxy.named_parameters()), {"report": report})
    return report


def _restored(proxy, folder, job):
    """The report of the blocks that a checkpoint has; their parameters are put into the proxy."""
    found = restore_checkpoint(folder, job)
    if found is None:
        return []
    tensors, facts = found
    restore_parameters(proxy, tensors)
    LOG.info("%d blocks are done already", len(facts["report"]))
    return facts["report"]


def _regress(stretch, settings, number, on_step):
    """Train one block; returns its part of the report."""
    count = len(stretch.inputs)
    training = max(1, count - max(1, round(count * settings.held_out)))
    held_out = [slice(start, min(start + BATCH, count)) for start in range(training, count, BATCH)]
    parameters = list(stretch.proxy.parameters())
    unit = _mean_square(stretch, held_out)
    before = _held_out_loss(stretch, held_out, unit)
    best = (before, 0, _copies(parameters))
    optimizer = build_optimizer(parameters, SimpleNamespace(kind="adamw", weight_decay=settings.weight_decay))
    schedule = SimpleNamespace(schedule="cosine", lr=settings.rate)
    generator = torch.Generator().manual_seed(settings.seed * 1000003 + number)  # of its own, so that a resumed block is the same
    per_epoch = -(-training // settings.batch_size)
    with _trainable(parameters):
        for epoch in range(settings.epochs if parameters else 0):
            for step, images in enumerate(torch.randperm(training, generator=generator).split(settings.batch_size)):
                on_step()
                optimizer.zero_grad()
                regression_loss(stretch, images.numpy(), unit).backward()
                optimizer.step(learning_rate(schedule, (epoch + step / per_epoch) / settings.epochs))
            loss = _held_out_loss(stretch, held_out, unit)
            if loss < best[0]:
                best = (loss, epoch + 1, _copies(parameters))
    with torch.no_grad():
        for parameter, kept in zip(parameters, best[2]):
            parameter.copy_(kept)
    LOG.debug("%s: held-out loss %.4g -> %.4g after epoch %d", stretch.name, before, best[0], best[1])
    return {"block": stretch.name, "before": before, "after": best[0], "epoch": best[1]}


def regression_loss(stretch, images, unit):
    """Mean square of what the proxy's output lacks of the original's for some images, over `unit`, the mean square of the latter."""
    device = device_of(stretch.proxy)
    found = stretch.proxy(stretch.inputs.read(images, device))
    wanted = resampled(stretch.targets.read(images, device), found)
    return (found - wanted).square().mean() / unit


def _held_out_loss(stretch, held_out, unit):
    sizes = [images.stop - images.start for images in held_out]
    with torch.no_grad():
        losses = [float(regression_loss(stretch, images, unit)) for images in held_out]
    return sum(loss * size for loss, size in zip(losses, sizes)) / sum(sizes)


def _mean_square(stretch, batches):
    sizes = [images.stop - images.start for images in batches]
    squares = [float(stretch.targets.read(images).double().square().mean()) for images in batches]
    return max(sum(square * size for square, size in zip(squares, sizes)) / sum(sizes), 1e-30)


def _copies(parameters):
    return [parameter.detach().clone() for parameter in parameters]


@contextlib.contextmanager
def _trainable(parameters):
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None
