"""The entry point: `python -m piebridge.training RUN [key=value ...]` is the same as `piebridge train RUN [key=value ...]`."""

import sys

if __name__ == "__main__":  # before torch is imported, so that the command line can say in one line that it is missing
    from piebridge.cli import main

    sys.exit(main(["train"] + sys.argv[1:]))

import functools
import gc
import logging
import os
import time
from collections import namedtuple
from pathlib import Path

import torch

from piebridge.config import load_config, training_keys
from piebridge.config_unread import warn_of_unread
from piebridge.core.assembly import Workplace, build_parts
from piebridge.core.bad_images import BadImages
from piebridge.core.checkpoint import CheckpointWriter, read_checkpoint
from piebridge.core.clock import Clock
from piebridge.core.dataset import open_dataset, verify_images
from piebridge.core.decisions import Decisions
from piebridge.core.device import PeakMemory, make_repeatable, resolve_device, synchronizer, warn_of_other_work
from piebridge.core.errors import Cancelled, RunFailed, UserError
from piebridge.core.few_shot import limit_labels
from piebridge.core.files import write_text
from piebridge.core.graph import INPUT
from piebridge.core.head_alone import train_head_first, train_head_last
from piebridge.core.interrupt import interruptible
from piebridge.core.loop import Progress, Saver, run_loop
from piebridge.core.network_file import check_runs, save_network
from piebridge.core.networks import load_network
from piebridge.core.packages import one_line
from piebridge.core.power import Meter
from piebridge.core.run_folder import RunFolder
from piebridge.core.run_record import costs_of, new_record, plan_of
from piebridge.core.safetensors_file import write_safetensors
from piebridge.core.validation import test_accuracy
from piebridge.from_engine import take_from_engine
from piebridge.run_paths import find_config

LOG = logging.getLogger(__name__)
Gauges = namedtuple("Gauges", "clock memory meter")


class RunResult:
    """What a run has to say: run.json's entries as attributes (`status`, `results`, `plan`, ...) and the run's `folder`."""

    def __init__(self, record, folder):
        self.folder = Path(str(folder))
        self.record = record

    def __getattr__(self, name):
        record = self.__dict__.get("record", {})
        if name not in record:
            raise AttributeError(f"a run has no '{name}'; it has {', '.join(record)}")
        return record[name]

    def __repr__(self):
        results = self.record["results"]
        return (f"RunResult({self.status}, {self.method} on {self.dataset}, test_accuracy={results['test_accuracy']}, "
                f"train_seconds={results['train_seconds']}, folder={str(self.folder)!r})")

    def load_network(self):
        """The tuned original, from its file."""
        return load_network(str(self.folder / "tuned.safetensors"))


def train(config_or_run, images=None, **overrides):
    """Run one experiment and return its RunResult.

    config_or_run: a Config, a configuration file, or a run such as `efficientnet_lite0/Clipart10/ours`. overrides: any keys of
    the configuration; keys of a section as dicts (`optimizer={"lr": 0.01}`) or dotted (`**{"optimizer.lr": 0.01}`). images: an
    iterable of (image, label) to train on as they come, each seen once; an image is a path or a PIL image, a label the name or number
    of one of the data set's classes; `stream={"samples": N}` says how many make an epoch; the data set validates and tests. Raises
    UserError for bad input, RunFailed for a run that fails by itself, Cancelled when it is interrupted (all is saved first).
    """
    config, folder = _configure(config_or_run, overrides)
    if images is not None and not config.stream.samples:
        raise UserError("train(images=...): how many of them make an epoch? add stream={'samples': N}")
    with interruptible() as interrupt:
        return _train_in(folder, config, interrupt, images)


def _configure(config_or_run, overrides):
    if hasattr(config_or_run, "as_dict"):
        if overrides:
            raise UserError(f"train(Config, {', '.join(overrides)}=...): a Config is complete; give overrides with a run or a file")
        config, default = config_or_run, Path("res") / "runs" / config_or_run.method
    else:
        path = find_config(config_or_run)
        config = load_config(path, overrides)
        default = Path(str(path)).parent
    warn_of_unread(config)
    if config.output is None and config.seed:
        default = default / f"seed_{config.seed}"
    return config, RunFolder(config.output or default)


def _train_in(folder, config, interrupt, images):
    device = resolve_device(config.device)
    make_repeatable(device)
    warn_of_other_work(device)
    clock = Clock(synchronizer(device))
    memory = PeakMemory(device)
    with Meter(clock, device.type) as meter:
        return _train_on(device, folder, config, interrupt, Gauges(clock, memory, meter), images)


def _train_on(device, folder, config, interrupt, gauges, images):
    clock = gauges.clock
    with clock.phase("setup"):
        if not config.overwrite:
            folder.refuse_finished()
        folder.refuse_foreign()
        folder.refuse_own(config.network)
        dataset, network = read_inputs(config)
        folder.refuse_inside(f"the images, data={config.data}", dataset.folder)
        fingerprint = network.fingerprint()
        interrupt.check()
    with folder.locked():
        record = dict(new_record(config, device, dataset, network, fingerprint), power_sensor=gauges.meter.sensor_names,
                      has_own_images=images is not None)
        checkpoint = _open_folder(folder, config, record)
        torch.manual_seed(config.seed)
        network.replace_head(dataset.classes)
        folder.write_record(record)
        write_text(folder.splits_file, dataset.as_csv())
        decisions = Decisions(folder.checkpoint_folder / "decisions.json", clock)
        if decisions.clock_state and not checkpoint:
            clock.restore(decisions.clock_state)
        known = list(dataset.bad_files) + decisions.values.get("bad_files", [])
        bad_images = BadImages(config.loader.max_bad_files, known, functools.partial(decisions.update, "bad_files"))
        work = Workplace(config, network.to(device), fingerprint, dataset, device, clock, folder, interrupt, decisions, bad_images,
                          images)
        try:
            _run(work, checkpoint, record)
            record["status"] = "success"
        except Cancelled as stop:
            record["status"] = "cancelled"
            raise Cancelled(f"{stop}; saved in {folder.path}, the same command goes on from there") from None
        except KeyboardInterrupt:
            record["status"] = "cancelled"
            raise
        except Exception as error:
            record["status"], record["error"] = "failed", one_line(error)
            raise _explained(error)  # noqa: B904 (the cause is in it; `from error` would make an error its own cause)
        finally:
            _conclude(record, work, gauges)
            folder.write_record(record)
        folder.drop_cache()
    return RunResult(record, folder.path)


def _conclude(record, work, gauges):
    """Fill in what only the end of a run knows, however it ended."""
    record["plan"] = plan_of(work.decisions, work.clock)
    record["bad_files"] = [list(entry) for entry in work.bad_images.found.items()]
    energy = gauges.meter.record()
    record["heat"] = energy.pop("heat")
    record["results"].update(costs_of(work.clock, gauges.memory), **energy)
    record["ended"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def read_inputs(config):
    """(dataset, network) that a configuration names, checked. UserError for what cannot be read or does not run."""
    dataset = verify_images(open_dataset(config.data, config.splits), config.loader.max_bad_files, config.loader.workers,
                            config.loader.max_megapixels)
    dataset = limit_labels(dataset, config.splits.shots, config.splits.seed, keeps_unlabelled=config.pseudo.kind != "none")
    network = load_network(config.network, trust_pickle=config.trust_pickle)
    if os.path.isfile(config.network):
        check_runs(network, config.network)
    return dataset, network


def _run(work, checkpoint, record):
    """Train, save, evaluate the saved file; fills `record`."""
    _train_and_save(work, checkpoint, record)
    with work.clock.evaluation():
        gc.collect()  # the networks, segments and caches of the training make room for an evaluation in eager torch
        accuracy = record["results"]["test_accuracy"] = test_accuracy(work.folder.tuned_file, work)
    LOG.info("the tuned original, reloaded from %s: test accuracy %s; %.1f s of training", work.folder.tuned_file,
             "n/a (no test images)" if accuracy is None else f"{100 * accuracy:.2f} %", work.clock.train_seconds)
    plan = work.decisions.values.get("strategy")
    if plan is not None:
        LOG.info("strategy %s was predicted to take %.1f s and took %.1f s", plan["name"], plan["predicted_seconds"],
                 work.clock.train_seconds)


def _train_and_save(work, checkpoint, record):
    """Prepare, loop, bridge, save. Nothing of it is held any more on return."""
    folder, clock, config = work.folder, work.clock, work.config
    take_from_engine(work)
    if config.pet.head_first and not checkpoint:
        train_head_first(work)
    parts = build_parts(work)
    trainable = parts.step.trainable
    record["results"].update(trainable_parameters=trainable.count(), trainable_share=trainable.share())
    LOG.info("%s trains %s numbers, %.3g %% of the network, from %s on", config.pet.kind, f"{trainable.count():,}", 100 * trainable.share(),
             "the image" if trainable.tap == INPUT else f"node {trainable.tap}")
    progress, best = Progress(), {}
    writer = CheckpointWriter(folder.checkpoint_folder)
    try:
        saver = Saver(parts, progress, best, clock, writer, folder, config.checkpoint.seconds)
        if checkpoint:
            try:
                saver.restore(*checkpoint)
            except (KeyError, ValueError, TypeError, RuntimeError) as error:
                raise UserError(f"{folder.checkpoint_folder}: does not fit this run ({one_line(error)[:120]}); "
                                "add resume=none to start anew") from None
            LOG.info("going on from epoch %d, batch %d", progress.epoch + 1, progress.batch)
        with clock.evaluation():
            parts.validate.prepare()
        run_loop(parts, progress, best, clock, saver, work.interrupt)
    finally:
        with clock.phase("checkpoint"):
            writer.close()
    folder.write_metrics(progress.rows)
    trainable.restore(best)
    if config.pet.head_last:
        train_head_last(work, trainable, progress)
    with clock.phase("checkpoint"):
        write_safetensors(folder.trainable_file, trainable.state(), {"pet": config.pet.kind})
        save_network(trainable.bridged(), folder.tuned_file)
    record["results"].update(val_accuracy=progress.best_accuracy, best_epoch=progress.best_epoch)
    record["labels"] = parts.labels.record() or record["labels"]


def _open_folder(folder, config, record):
    """Decide between a fresh start and a continuation; returns the checkpoint to go on from, or None."""
    if not config.overwrite:
        folder.refuse_finished()  # once more, behind the lock
    previous = folder.record()
    if config.resume == "none" or not previous or previous.get("status") == "success":
        folder.clear()
        return None
    old, new = [dict(training_keys(each.get("config", {})), data=each.get("data_sha256"), network=each.get("network_sha256"),
                     images="given" if each.get("has_own_images") else "the data set's") for each in (previous, record)]
    changed = [f"{key} {_short(old.get(key))} -> {_short(new.get(key))}" for key in sorted(set(old) | set(new))
               if old.get(key) != new.get(key)]
    if changed:
        raise UserError(f"{folder.path}: holds an unfinished run of another configuration ({'; '.join(changed[:4])}); "
                        "add resume=none to start anew, or output=DIR to keep it")
    return read_checkpoint(folder.checkpoint_folder)


def _short(value):
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "..."


def _explained(error):
    """Errors of the machine as one line; the rest stays what it is."""
    if isinstance(error, (UserError, RunFailed)):
        return error
    if isinstance(error, OSError):
        return RunFailed(f"{error.filename or 'the disk'}: {error.strerror or error}; the last checkpoint is whole, and once "
                         "that is mended the same command goes on from it")
    is_memory = isinstance(error, RuntimeError) and ("out of memory" in str(error) or "can't allocate memory" in str(error))
    if is_memory or isinstance(error, MemoryError):
        return RunFailed("out of memory: start anew with a smaller loader.batch_size (and resume=none), or close other programs")
    return error
