"""Where a machine says what it draws: the INA3221 monitors of Jetson boards, RAPL on x86; and in which power mode it is.

A sensor has `names` (what it covers) and `joules(now)`: what was spent since the last call, the first one giving 0. OSError or
ValueError where it cannot be read any more. `root` is where /sys and /etc are looked for, so that a test can fake them.
"""

import re
from collections import namedtuple
from pathlib import Path

# what all the others of a board hang on; a module without such a rail (AGX) is the sum of its rails
TOTAL_RAILS = ("VDD_IN", "POM_5V_IN", "VIN")
NOT_CONNECTED = ("", "NC")

Rail = namedtuple("Rail", "name paths scale")  # watts = product of the files' numbers * scale
Counter = namedtuple("Counter", "name path range_microjoules")


class PowerRails:
    """Rails that show what they draw at the moment; joules by the trapezoidal rule, exact where power changes linearly."""

    def __init__(self, rails):
        total = [rail for rail in rails if rail.name in TOTAL_RAILS]
        self._rails = total[:1] or rails
        self.names = [rail.name for rail in self._rails]
        self._last = None  # (moment, watts)

    def joules(self, now):
        """now: seconds on a clock that never goes back."""
        watts = sum(self._watts(rail) for rail in self._rails)
        before, self._last = self._last, (now, watts)
        return 0.0 if before is None else (now - before[0]) * (watts + before[1]) / 2

    @staticmethod
    def _watts(rail):
        watts = rail.scale
        for path in rail.paths:
            watts *= read_number(path)
        return watts


class EnergyCounters:
    """Counters of microjoules that start again at 0 after their largest number (after some minutes at full load)."""

    def __init__(self, counters):
        self._counters = counters
        self.names = [counter.name for counter in counters]
        self._last = None

    def joules(self, now):
        numbers = [read_number(counter.path) for counter in self._counters]
        before, self._last = self._last, numbers
        if before is None:
            return 0.0
        spent = [new - old + (counter.range_microjoules if new < old else 0)
                 for counter, old, new in zip(self._counters, before, numbers)]
        return sum(spent) / 1e6


def find_sensor(root="/"):
    """The machine's power sensor, read once, or None where there is none or it may not be read (RAPL: often root alone may)."""
    root = Path(str(root))
    for kind, find in ((PowerRails, _iio_rails), (PowerRails, _hwmon_rails), (EnergyCounters, _rapl_counters)):
        try:
            found = find(root)
            if found:
                sensor = kind(found)
                sensor.joules(0.0)
                return kind(found)
        except (OSError, ValueError):
            continue
    return None


def _iio_rails(root):
    """JetPack 4: rail_name_N and in_powerN_input (mW), N from 0."""
    rails = []
    for path in sorted(root.glob("sys/bus/i2c/drivers/ina3221x/*/iio:device*/in_power*_input")):
        number = re.match(r"in_power(\d+)_input$", path.name).group(1)
        rails.append(Rail(read_line(path.with_name(f"rail_name_{number}")), [path], 1e-3))
    return _connected(rails)


def _hwmon_rails(root):
    """JetPack 5 and later: inN_label, inN_input (mV), currN_input (mA), N from 1; beyond the three channels come sums."""
    rails = []
    for path in sorted(root.glob("sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/curr[123]_input")):
        number = path.name[len("curr")]
        rails.append(Rail(read_line(path.with_name(f"in{number}_label")), [path.with_name(f"in{number}_input"), path], 1e-6))
    return _connected(rails)


def _connected(rails):
    return [rail for rail in rails if rail.name not in NOT_CONNECTED and "shunt" not in rail.name]


def _rapl_counters(root):
    """The processors' packages; their cores and the like are parts of them, `psys` and memory are not."""
    folders = sorted(root.glob("sys/class/powercap/intel-rapl:*"))
    return [Counter(read_line(folder / "name"), folder / "energy_uj", read_number(folder / "max_energy_range_uj"))
            for folder in folders if read_line(folder / "name").startswith("package")]


def power_mode(root="/"):
    """The Jetson's power mode as nvpmodel left it in its files, the frequency governor elsewhere, None where neither is there."""
    root = Path(str(root))
    try:
        number = int(re.search(r"pmode:(\d+)", (root / "var/lib/nvpmodel/status").read_text()).group(1))
        modes = re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", (root / "etc/nvpmodel.conf").read_text())
        return next((f"{name} (mode {number})" for known, name in modes if int(known) == number), f"mode {number}")
    except (OSError, AttributeError):
        pass
    try:
        return read_line(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") + " governor"
    except OSError:
        return None


def read_number(path):
    return int(read_line(path))


def read_line(path):
    with open(str(path), errors="replace") as stream:
        return stream.readline().strip()
