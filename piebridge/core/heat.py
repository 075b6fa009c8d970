"""How hot the machine became, and whether it slowed down for it."""

from pathlib import Path

from piebridge.core.power_sensors import read_line, read_number

PLAUSIBLE = range(-40000, 150000)  # millidegrees Celsius; sensors that are off show 0 K and the like
FIXED_ZONES = ("PMIC-Die",)  # shows 100 degrees for ever on Jetsons
FANS = ("fan", "Fan")


class Heat:
    """`look()` now and then, then `record()`. `root`: where /sys is looked for.

    Slowing down is seen in the processors' own counters of such events (x86), in cooling devices other than fans that are more
    active than when this was made, and in a highest allowed frequency below what it was then.
    """

    def __init__(self, root="/"):
        root = Path(str(root))
        self._zones = [folder / "temp" for folder in sorted(root.glob("sys/class/thermal/thermal_zone*"))
                       if _line(folder / "type") not in FIXED_ZONES]
        coolers = [folder / "cur_state" for folder in sorted(root.glob("sys/class/thermal/cooling_device*"))
                   if not any(word in (_line(folder / "type") or "") for word in FANS)]
        cores = root / "sys/devices/system/cpu"
        counters = sorted(cores.glob("cpu[0-9]*/thermal_throttle/*_throttle_count"))
        limits = sorted(cores.glob("cpufreq/policy*/scaling_max_freq"))
        self._first = {path: number for path in coolers + counters + limits for number in [_number(path)] if number is not None}
        self._limits = set(limits)
        self._highest = None
        self._reasons = []
        self.look()

    @property
    def is_blind(self):
        """Whether this machine shows nothing."""
        return self._highest is None and not self._first

    def look(self):
        """Read all of it: some dozen small files."""
        temperatures = [number for number in map(_number, self._zones) if number is not None and number in PLAUSIBLE]
        if temperatures:
            self._highest = max(temperatures + ([] if self._highest is None else [self._highest]))
        for path, first in self._first.items():
            number = _number(path)
            if number is not None and (number < first if path in self._limits else number > first):
                reason = f"{path.parent.name}/{path.name}" if path in self._limits or path.name == "cur_state" else path.name
                if reason not in self._reasons:
                    self._reasons.append(reason)

    def record(self):
        """{"max_celsius", "is_throttled", "signs"} for run.json; None where this machine shows none of it."""
        if self.is_blind:
            return None
        return {"max_celsius": None if self._highest is None else self._highest / 1000,
                "is_throttled": bool(self._reasons) if self._first else None, "signs": list(self._reasons)}


def _number(path):
    try:
        return read_number(path)
    except (OSError, ValueError):
        return None


def _line(path):
    try:
        return read_line(path)
    except OSError:
        return None
