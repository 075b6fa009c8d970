"""The records of runs: every run.json below a folder, and the groups of runs that may be compared."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from piebridge.core.dotted_keys import dotted
from piebridge.core.errors import UserError

# keys of a configuration that change neither what is learnt nor what it costs, or that a row averages over
_FREE = ("seed", "output", "resume", "overwrite", "method", "network", "data", "epochs", "device", "pet.kind", "loader.workers",
         "checkpoint.seconds", "trust_pickle")
MOST = 10 ** 15  # of any number in a record
KEPT = "measured"  # ask for this folder, or one below it, to see what is in it
_CONDITIONS = ("loader.batch_size", "loader.augment", "splits.val_fraction", "splits.test_fraction", "splits.seed")


@dataclass(frozen=True)
class Run:
    """What a report needs of one run.json. Accuracies are 0..1; None stands for what the record does not know."""

    folder: Path
    status: str  # success, running, failed, cancelled; "unreadable" for a damaged record
    method: str = "n/a"
    network: str = "n/a"
    dataset: str = "n/a"
    pet: str = "n/a"
    device: str = "n/a"
    conditions: str = ""  # what else has to agree for a comparison, in words
    data: str = ""  # hash of the images' names and labels
    config: Tuple = ()  # ((key, text), ...) of what a method may vary
    ended: str = ""  # when, as the record says it
    epochs: Optional[int] = None
    seed: Optional[int] = None
    test_accuracy: Optional[float] = None
    train_seconds: Optional[float] = None
    peak_mib: Optional[float] = None
    trainable_parameters: Optional[int] = None
    energy_j: Optional[float] = None
    phases: Tuple = ()  # ((name, seconds), ...), which add up to train_seconds

    @property
    def setting(self) -> Tuple:
        """Runs are compared with each other only where these agree."""
        return self.network, self.dataset, self.epochs, self.device, self.conditions, self.data


def collect(folder: Path) -> List[Run]:
    """All runs below `folder`, in order of their paths, but for records of other machines that are kept in a folder `measured`.

    Raises UserError where there is none.
    """
    folder = Path(str(folder))
    paths = [path for path in sorted(folder.glob("**/run.json")) if KEPT not in path.relative_to(folder).parts]
    runs = [read_run(path) for path in paths]
    if not runs:
        raise UserError(f"{folder}: no run.json here or below; train something first, for example: "
                        "piebridge train efficientnet_lite0/Clipart10/ours")
    return runs


def read_run(path: Path) -> Run:
    """The Run in a run.json. A file that is damaged gives a Run whose status is `unreadable`."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        results = record.get("results") or {}
        config = record.get("config") or {}
        settings = {key: str(value) for key, value in dotted(config)}
        return Run(
            folder=path.parent,
            status=str(record["status"]),
            method=_text(record.get("method")),
            network=_text(record.get("network")),
            dataset=_text(record.get("dataset")),
            pet=_text(record.get("pet")),
            device=_text(record.get("device")),
            conditions=_conditions(settings, record.get("device")),
            data=str(record.get("data_sha256") or "")[:8],
            config=tuple(item for item in settings.items() if item[0] not in _FREE + _CONDITIONS),
            ended=str(record.get("ended") or ""),
            epochs=_number(config.get("epochs")),
            seed=_number(record.get("seed")),
            test_accuracy=_number(results.get("test_accuracy")),
            train_seconds=_number(results.get("train_seconds")),
            peak_mib=_number(results.get("peak_mib")),
            trainable_parameters=_number(results.get("trainable_parameters")),
            energy_j=_number(results.get("energy_j")),
            phases=tuple((name, seconds) for name, seconds in (results.get("phases") or {}).items() if _number(seconds) is not None),
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return Run(folder=path.parent, status="unreadable")


def finished(runs: List[Run]) -> List[Run]:
    """The runs that count: those with status success, and of runs that differ in nothing but their folder, the one that ended last."""
    newest: Dict[Tuple, Run] = {}
    for run in runs:
        if run.status == "success":
            key = run.setting + (run.method, run.pet, run.config, run.seed)
            if key not in newest or _age(run) >= _age(newest[key]):
                newest[key] = run
    return [run for run in runs if run in newest.values()]


def left_out(runs: List[Run]) -> List[str]:
    """One line for each run that does not count: its folder, and why."""
    counted = finished(runs)
    lines = []
    for run in runs:
        if run not in counted:
            reason = f"a newer run of seed {run.seed} counts" if run.status == "success" else run.status
            lines.append(f"{run.folder}: {reason}")
    return lines


def by_setting(runs: List[Run], is_any_length: bool = False) -> Dict[Tuple, List[Run]]:
    """Finished runs by (network, dataset, epochs, device, conditions, data), in order of first appearance; epochs "" for any number."""
    groups: Dict[Tuple, List[Run]] = {}
    for run in finished(runs):
        network, dataset, epochs, *rest = run.setting
        groups.setdefault((network, dataset, "" if is_any_length else epochs, *rest), []).append(run)
    return groups


def by_folder(runs: List[Run]) -> Dict[Tuple[str, str, str], List[Run]]:
    """Runs by the folder that their seeds share: (its name, pet, "")."""
    groups: Dict[Tuple[str, str, str], List[Run]] = {}
    for run in runs:
        groups.setdefault((run.folder.parent.name, run.pet, ""), []).append(run)
    return groups


def by_method(runs: List[Run]) -> Dict[Tuple[str, str, str], List[Run]]:
    """Runs of one setting by (method, pet, variant): where a method was run with several configurations, what sets them apart."""
    groups: Dict[Tuple[str, str, str], List[Run]] = {}
    for run in runs:
        alike = [dict(other.config) for other in runs if (other.method, other.pet) == (run.method, run.pet)]
        varied = [(key, text) for key, text in run.config if any(other.get(key, text) != text for other in alike)]
        variant = ", ".join(f"{key}={text}" for key, text in varied)
        groups.setdefault((run.method, run.pet, variant), []).append(run)
    return groups


def describe_setting(setting: Tuple) -> str:
    network, dataset, epochs, device, conditions, _ = setting
    length = "n/a epochs" if epochs is None else f"{epochs} epoch{'' if epochs == 1 else 's'}" if epochs else ""
    return ", ".join(part for part in (f"{network} on {dataset}", length, device, conditions) if part)


def describe_method(key, keys):
    """The name of a row among others: a method, and in brackets what else tells it from another row of the method."""
    method, pet, variant = key
    kinds = {other[1] for other in keys if other[0] == method}
    details = ([pet] if len(kinds) > 1 else []) + ([variant] if variant else [])
    return f"{method} ({', '.join(details)})" if details else method


def _age(run):
    """Orders runs by their end; records that do not tell it come first, in the order of their files."""
    return run.ended, (run.folder / "run.json").stat().st_mtime


def _conditions(config, device):
    """Batch size, augmentation, threads and unusual splits, as far as the record has them."""
    parts = [f"batch {config['loader.batch_size']}"] if "loader.batch_size" in config else []
    parts += [f"augment {config['loader.augment']}"] if config.get("loader.augment", "none") != "none" else []
    threads = device.get("threads") if isinstance(device, dict) else None
    parts += [f"{threads} threads"] if threads else []
    usual = {"splits.val_fraction": "0.1", "splits.test_fraction": "0.2", "splits.seed": "0"}
    parts += [f"{key}={config[key]}" for key in usual if config.get(key, usual[key]) != usual[key]]
    return ", ".join(parts)


def _text(value):
    """A short text for a value that is a text, or a record with a type and a name."""
    if isinstance(value, dict):
        value = value.get("name") or value.get("kind") or value.get("type")
    return "n/a" if value is None else str(value)


def _number(value):
    """The value if it is a number that can have been measured, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) <= MOST else None
