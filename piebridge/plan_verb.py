"""`piebridge plan RUN`: what each way of training would cost here. Trains nothing."""

import tempfile
from pathlib import Path

import torch

from piebridge.config import load_config
from piebridge.config_unread import warn_of_unread
from piebridge.core.assembly import Workplace
from piebridge.core.bad_images import BadImages
from piebridge.core.clock import Clock
from piebridge.core.decisions import Decisions
from piebridge.core.device import make_repeatable, resolve_device, synchronizer, warn_of_other_work
from piebridge.core.errors import UserError
from piebridge.core.interrupt import interruptible
from piebridge.core.planner import as_record, describe
from piebridge.core.planning import make_plan
from piebridge.core.run_folder import RunFolder
from piebridge.core.tuning import tuning_of
from piebridge.from_engine import take_from_engine
from piebridge.run_paths import find_config
from piebridge.training import read_inputs


def plan(config_or_run, **overrides):
    """(lines of text, JSON values): every strategy's predicted seconds, memory and disk, and the cheapest within the limits of `plan.ram`,
    `plan.disk` and `plan.exact`; measured for about `plan.seconds`.

    config_or_run, overrides: as of `piebridge.train`. UserError for bad input.
    """
    config = load_config(find_config(config_or_run), overrides)
    warn_of_unread(config)
    if config.step == "compiled":
        raise UserError("piebridge plan: does not know what step=compiled costs; add step=eager")
    device = resolve_device(config.device)
    make_repeatable(device)
    warn_of_other_work(device)
    clock = Clock(synchronizer(device))
    with clock.phase("setup"):
        dataset, network = read_inputs(config)
    with interruptible() as interrupt, tempfile.TemporaryDirectory() as folder:
        decisions = Decisions(Path(folder) / "decisions.json", clock)
        torch.manual_seed(config.seed)
        fingerprint = network.fingerprint()
        network.replace_head(dataset.classes)
        bad_images = BadImages(config.loader.max_bad_files, list(dataset.bad_files), lambda found: None)
        work = Workplace(config, network.to(device), fingerprint, dataset, device, clock, RunFolder(folder), interrupt, decisions,
                         bad_images)
        take_from_engine(work)
        _, chosen, predictions = make_plan(work, tuning_of(work.network, config, work.parts), config.plan.seconds)
    return describe(chosen, predictions), as_record(chosen, predictions)
