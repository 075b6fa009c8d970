"""What run.json says of a run: where it ran, on what, what was decided, and what it took."""

import platform
from pathlib import Path

from piebridge.core.device import describe_device
from piebridge.core.packages import package_version
from piebridge.core.power_sensors import power_mode

# the decisions that run.json reports
PLAN = ("strategy", "scheme", "head_first", "head_last", "backend", "proxies", "levels_used", "cache", "gate", "compiled")


def new_record(config, device, dataset, network, fingerprint):
    """The record of a run that begins."""
    return {
        "status": "running", "method": config.method, "network": network.description["name"], "dataset": dataset.name,
        "pet": config.pet.kind, "seed": config.seed, "device": describe_device(device), "power_mode": power_mode(),
        "config": config.as_dict(),
        "versions": _versions(), "commit": _commit(), "data_sha256": dataset.fingerprint, "network_sha256": fingerprint,
        "bad_files": [list(entry) for entry in dataset.bad_files],
        "results": {"test_accuracy": None, "val_accuracy": None, "best_epoch": None, "train_seconds": None, "wall_seconds": None,
                    "phases": {}, "peak_mib": None, "peak_device_mib": None, "trainable_parameters": None, "trainable_share": None,
                    "energy_j": None, "energy_phases": None},
        "labels": {name: dataset.split[name] for name in ("labelled", "unlabelled")} if config.splits.shots else None,
        "heat": None, "plan": None,
    }


def plan_of(decisions, clock):
    """What was decided, and beside what was predicted of the frozen networks' time what it came to."""
    plan = {name: decisions.values[name] for name in PLAN if name in decisions.values}
    if "strategy" in plan:
        plan["strategy"] = dict(plan["strategy"], measured_seconds=round(clock.train_seconds, 3))
    phases = clock.phases
    return dict(plan, measured_frozen_seconds=round(phases.get("frozen", 0.0) + phases.get("decode", 0.0), 3))


def costs_of(clock, memory):
    """What a run took, for its results. clock: Clock; memory: PeakMemory."""
    phases = {name: round(seconds, 4) for name, seconds in sorted(clock.phases.items())}
    return {"train_seconds": round(clock.train_seconds, 4), "wall_seconds": round(clock.wall_seconds, 4), "phases": phases,
            "evaluation_seconds": round(clock.evaluation_seconds, 4), "peak_mib": round(memory.mib(), 1),
            "peak_device_mib": memory.device_mib()}


def _versions():
    return {"python": platform.python_version(), "system": platform.platform(),
            **{name: package_version(name) for name in ("torch", "torchvision", "numpy", "openvino", "onnxruntime")}}


def _commit():
    """The checkout's commit, or None outside one. Read from .git: starting a program would cost more than reading two files."""
    git = Path(__file__).resolve().parents[2] / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        name = head[len("ref: "):]
        if (git / name).is_file():
            return (git / name).read_text(encoding="utf-8").strip()
        packed = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(" " + name)), None)
    except (OSError, UnicodeDecodeError):  # no checkout, or a worktree, whose .git is a file
        return None
