"""The records of runs: every run.json below a folder, and the groups of runs that may be compared."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from piebridge.core.errors import UserError


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
    epochs: Optional[int] = None
    seed: Optional[int] = None
    test_accuracy: Optional[float] = None
    train_seconds: Optional[float] = None
    peak_mib: Optional[float] = None
    trainable_parameters: Optional[int] = None

    @property
    def setting(self) -> Tuple:
        """Runs are compared with each other only where these agree."""
        return self.network, self.dataset, self.epochs, self.device


def collect(folder: Path) -> List[Run]:
    """All runs below `folder`, in order of their paths. Raises UserError where there is none."""
    folder = Path(str(folder))
    runs = [read_run(path) for path in sorted(folder.glob("**/run.json"))]
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
        return Run(
            folder=path.parent,
            status=str(record["status"]),
            method=_text(record.get("method")),
            network=_text(record.get("network")),
            dataset=_text(record.get("dataset")),
            pet=_text(record.get("pet")),
            device=_text(record.get("device")),
            epochs=_number(config.get("epochs")),
            seed=_number(record.get("seed")),
            test_accuracy=_number(results.get("test_accuracy")),
            train_seconds=_number(results.get("train_seconds")),
            peak_mib=_number(results.get("peak_mib")),
            trainable_parameters=_number(results.get("trainable_parameters")),
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return Run(folder=path.parent, status="unreadable")


def finished(runs: List[Run]) -> List[Run]:
    """The runs that count: those with status success, and of runs that differ in nothing but their folder, the newest one."""
    newest: Dict[Tuple, Run] = {}
    for run in runs:
        if run.status == "success":
            key = run.setting + (run.method, run.pet, run.seed)
            if key not in newest or _written(run) >= _written(newest[key]):
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


def by_setting(runs: List[Run]) -> Dict[Tuple, List[Run]]:
    """Finished runs by (network, dataset, epochs, device), in order of first appearance."""
    groups: Dict[Tuple, List[Run]] = {}
    for run in finished(runs):
        groups.setdefault(run.setting, []).append(run)
    return groups


def by_method(runs: List[Run]) -> Dict[Tuple[str, str], List[Run]]:
    """Runs of one setting by (method, pet)."""
    groups: Dict[Tuple[str, str], List[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.pet), []).append(run)
    return groups


def describe_setting(setting: Tuple) -> str:
    network, dataset, epochs, device = setting
    length = "n/a epochs" if epochs is None else f"{epochs} epoch{'' if epochs == 1 else 's'}"
    return f"{network} on {dataset}, {length}, {device}"


def _written(run):
    return (run.folder / "run.json").stat().st_mtime


def _text(value):
    """A short text for a value that is a text, or a record with a type and a name."""
    if isinstance(value, dict):
        value = value.get("name") or value.get("kind") or value.get("type")
    return "n/a" if value is None else str(value)


def _number(value):
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
