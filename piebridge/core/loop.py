"""THE training loop. Methods differ by the objects they pass in, never by a branch in here."""

import contextlib
import logging
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

import torch

from piebridge.core.bad_images import NOTHING_READABLE
from piebridge.core.clock import PHASES
from piebridge.core.device import limited_threads
from piebridge.core.errors import RunFailed, UserError
from piebridge.core.gate import BatchGate
from piebridge.core.optimizers import learning_rate
from piebridge.core.progress_bar import progress_bar
from piebridge.core.sampler import EverySample, epoch_batches

LOG = logging.getLogger(__name__)


@dataclass
class Parts:
    """What a method brings to the loop."""

    source: Any  # stream(batches, epoch, levels) -> (indices, inputs, level); needs_level_batches; threads; usable: sample indices
    step: Any  # step(inputs, labels, gate, progress, level) -> (losses, is_selected); end_epoch(share_done); state, restore
    gate: Any  # select(losses, indices), see core/gate.py; state, restore
    router: Any  # levels int [samples]; update(indices, losses, is_selected); end_epoch(); state, restore
    labels: Any  # labels[indices]; start_epoch(epoch, parts); known(usable); device; state, restore: see core/labels.py
    validate: Callable  # the step's trainable -> (accuracy, loss)
    settings: Any  # the optimizer section, for the learning rate that is reported
    epochs: int
    batch_size: int
    seed: int
    describe_sample: Callable = str  # sample index -> its file name, for errors
    batches: Callable = epoch_batches  # (samples, batch size, seed, epoch, levels or None) -> lists of positions, see core/sampler.py
    pruner: Any = field(default_factory=EverySample)  # which samples an epoch leaves out, see core/sampler.py


@dataclass
class Progress:
    """Where a run stands; everything here is in the checkpoint."""

    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    loss_sum: float = 0.0
    seen: int = 0
    selected: int = 0
    best_accuracy: Optional[float] = None
    best_loss: Optional[float] = None
    best_epoch: Optional[int] = None
    rows: List[Dict[str, Any]] = field(default_factory=list)


def run_loop(parts, progress, best, clock, checkpoints, interrupt):
    """Train from `progress` on to the last epoch. `best` (dict of tensors) receives the best trainable state on validation.

    `checkpoints` is a Saver: `due()` and `save(is_epoch_end)`.
    """
    with limited_threads(parts.source.threads):
        _run_epochs(parts, progress, best, clock, checkpoints, interrupt)


def _run_epochs(parts, progress, best, clock, checkpoints, interrupt):
    total = parts.epochs
    for epoch in range(progress.epoch, total):
        if not progress.batch:
            parts.labels.start_epoch(epoch, parts)
        known = parts.labels.known(parts.source.usable)
        usable = parts.pruner.kept(known, epoch)
        left_out = len(known) - len(usable)
        levels = parts.router.levels[usable] if parts.source.needs_level_batches else None
        batches = [[usable[position] for position in batch]
                   for batch in parts.batches(len(usable), parts.batch_size, parts.seed, epoch, levels)]
        stream = parts.source.stream(batches[progress.batch:], epoch, parts.router.levels)
        bar = progress_bar(total=len(batches), initial=progress.batch, desc=f"epoch {epoch + 1}/{total}", unit="batch")
        with contextlib.closing(stream), bar:
            for indices, inputs, level in stream:
                with clock.phase("trainable"):
                    _train_batch(parts, progress, indices, inputs, level, (epoch + progress.batch / len(batches)) / total)
                progress.batch += 1
                bar.update()
                if interrupt.signal_name or checkpoints.due():
                    checkpoints.save()
                    interrupt.check()
        if batches and not progress.seen:
            raise UserError(NOTHING_READABLE)
        mean_level = float(parts.router.levels.mean())  # of this epoch; ending it moves samples
        with clock.phase("trainable"):
            parts.router.end_epoch()
            parts.pruner.end_epoch()
            parts.step.end_epoch((epoch + 1) / total)
        _end_epoch(parts, progress, best, clock, epoch, left_out, mean_level)
        checkpoints.save(is_epoch_end=True)
        interrupt.check()


def _train_batch(parts, progress, indices, inputs, level, share_done):
    if not indices:  # all images of the batch turned out to be unreadable
        return
    losses, is_selected = parts.step(inputs, parts.labels[indices], BatchGate(parts.gate, indices), share_done, level)
    loss_sum = float(losses.sum())
    if not math.isfinite(loss_sum):
        names = ", ".join(parts.describe_sample(index) for index in indices[:8])
        raise RunFailed(f"the loss is not a finite number after {progress.batch} batches of epoch {progress.epoch + 1} on: {names}; "
                        "lower optimizer.lr and add resume=none, or look at these images")
    parts.router.update(indices, losses, is_selected)
    progress.loss_sum += loss_sum
    progress.seen += len(indices)
    progress.selected += len(indices) if is_selected is None else int(is_selected.sum())


def _end_epoch(parts, progress, best, clock, epoch, left_out, mean_level):
    """left_out: how many samples the pruner kept from this epoch. mean_level: of the samples in it."""
    with clock.evaluation():
        accuracy, loss = parts.validate(parts.step.trainable)
    if is_better(accuracy, loss, progress):
        progress.best_accuracy, progress.best_loss, progress.best_epoch = accuracy, loss, epoch + 1
        best.clear()
        best.update({name: tensor.detach().clone() for name, tensor in parts.step.trainable.state().items()})
    seen = max(1, progress.seen)
    row = {
        "epoch": epoch + 1, "learning_rate": f"{learning_rate(parts.settings, epoch / parts.epochs):.6g}",
        "train_loss": round(progress.loss_sum / seen, 6), "selected_share": round(progress.selected / (seen + left_out), 4),
        "mean_level": round(mean_level, 4),
        "val_accuracy": None if accuracy is None else round(accuracy, 6), "val_loss": None if loss is None else round(loss, 6),
        "train_seconds": round(clock.train_seconds, 3),
    }
    phases = clock.phases
    row.update({f"{name}_seconds": round(phases.get(name, 0.0), 3) for name in PHASES})
    row["evaluation_seconds"] = round(clock.evaluation_seconds, 3)
    progress.rows.append(row)
    progress.epoch, progress.batch, progress.loss_sum, progress.seen, progress.selected = epoch + 1, 0, 0.0, 0, 0
    LOG.info("epoch %d/%d: validation accuracy %s, train loss %.4f, %.1f s of training so far", epoch + 1, parts.epochs,
             "n/a" if accuracy is None else f"{100 * accuracy:.2f} %", row["train_loss"], row["train_seconds"])


def is_better(accuracy, loss, progress):
    """More validation images right, or as many at a lower loss. Without validation images the last epoch counts."""
    if accuracy is None or progress.best_accuracy is None:
        return True
    return (accuracy, -loss) > (progress.best_accuracy, -progress.best_loss)


class Saver:
    """Takes and restores checkpoints of a loop's parts."""

    def __init__(self, parts, progress, best, clock, writer, run_folder, seconds):
        self._parts, self._progress, self._best, self._clock = parts, progress, best, clock
        self._writer, self._run_folder, self._seconds = writer, run_folder, seconds
        self._last = clock.wall_seconds

    def due(self):
        return self._clock.wall_seconds - self._last >= self._seconds

    def save(self, is_epoch_end=False):
        with self._clock.phase("checkpoint"):
            step, progress = self._parts.step, self._progress
            tensors = {f"step/{name}": tensor for name, tensor in step.state().items()}
            tensors.update({f"trainable/{name}": tensor for name, tensor in step.trainable.state().items()})
            tensors.update({f"best/{name}": tensor for name, tensor in self._best.items()})
            tensors["random/torch"] = torch.get_rng_state()
            if torch.cuda.is_initialized():
                tensors["random/cuda"] = torch.cuda.get_rng_state(self._parts.labels.device)
            facts = {"progress": dict(vars(progress), rows=list(progress.rows)), "gate": self._parts.gate.state(),
                     "router": self._parts.router.state(), "pruner": self._parts.pruner.state(),
                     "labels": self._parts.labels.state(), "clock": self._clock.state()}
            rows = list(progress.rows)
            self._writer.save(tensors, facts, then=(lambda: self._run_folder.write_metrics(rows)) if is_epoch_end else lambda: None)
            self._last = self._clock.wall_seconds

    def restore(self, tensors, facts):
        step = self._parts.step
        step.restore(_below("step/", tensors))
        step.trainable.restore(_below("trainable/", tensors))
        self._best.update(_below("best/", tensors))
        torch.set_rng_state(tensors["random/torch"])
        if "random/cuda" in tensors and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(tensors["random/cuda"], self._parts.labels.device)
        self._parts.gate.restore(facts["gate"])
        self._parts.router.restore(facts["router"])
        self._parts.pruner.restore(facts["pruner"])
        self._parts.labels.restore(facts["labels"])
        vars(self._progress).update(facts["progress"])
        self._clock.restore(facts["clock"])
        self._last = self._clock.wall_seconds


def _below(prefix, tensors):
    """The tensors whose names start with `prefix`, under the rest of their names."""
    return {name[len(prefix):]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
