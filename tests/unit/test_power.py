"""Joules, heat and power modes on faked boards: /sys and /etc below a folder, and a clock of our own."""

import threading

import pytest

from piebridge.core import doctor
from piebridge.core.clock import Clock
from piebridge.core.heat import Heat
from piebridge.core.power import Meter
from piebridge.core.power_sensors import find_sensor, power_mode

IIO = "sys/bus/i2c/drivers/ina3221x/0-0041/iio:device1/"
HWMON = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/"
RAPL = "sys/class/powercap/intel-rapl:0/"


class FakeTime:
    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def metered(root, device_type="cpu"):
    """A meter that no thread disturbs: (clock, meter, time); `meter.tick()` takes its readings."""
    time = FakeTime()
    clock = Clock(now=time)
    meter = Meter(clock, device_type, root, now=time)
    clock.start_energy()
    meter.tick()
    return clock, meter, time


def test_constant_power_is_watts_times_seconds(tmp_path):
    """TX2, JetPack 4: the rail that everything hangs on is taken, in milliwatts."""
    write(tmp_path, {IIO + "rail_name_0": "VDD_IN", IIO + "in_power0_input": 7500, IIO + "rail_name_1": "VDD_SYS_CPU",
                     IIO + "in_power1_input": 2000})
    clock, meter, time = metered(tmp_path)
    assert meter.sensor_names == ["VDD_IN"]
    for name, seconds in (("decode", 0.25), ("frozen", 0.75)):
        with clock.phase(name):
            time.seconds += seconds
    meter.tick()
    with clock.evaluation():
        time.seconds += 2
        record = meter.record()
    assert record["energy_j"] == pytest.approx(7.5)
    assert record["energy_phases"] == {"decode": 1.875, "evaluation": 15.0, "frozen": 5.625, "other": 0.0}


def test_power_that_rises_linearly_is_exact(tmp_path):
    """Orin Nano, JetPack 5 and later: millivolts times milliamperes; 5 V, from 1 A to 3 A in 2 s: 20 J."""
    write(tmp_path, {HWMON + "in1_label": "VDD_IN", HWMON + "in1_input": 5000, HWMON + "curr1_input": 1000, HWMON + "in2_label": "VDD_SOC",
                     HWMON + "in2_input": 5000, HWMON + "curr2_input": 400})
    clock, meter, time = metered(tmp_path)
    assert meter.sensor_names == ["VDD_IN"]
    with clock.phase("frozen"):
        for step in range(1, 21):
            time.seconds += 0.1
            write(tmp_path, {HWMON + "curr1_input": 1000 + 100 * step})
            meter.tick()
    assert clock.joules["frozen"] == pytest.approx(20.0)


def test_a_module_without_a_common_rail_is_the_sum_of_its_rails(tmp_path):
    """AGX Orin: three rails on one monitor, one and sums on the other; what is not connected and sums of shunts do not count."""
    other = HWMON.replace("1-0040", "1-0041").replace("hwmon3", "hwmon4")
    rails = {HWMON: [("VDD_GPU_SOC", 2000), ("VDD_CPU_CV", 1000), ("VIN_SYS_5V0", 3000)],
             other: [("NC", 9000), ("VDDQ_VDD2_1V8AO", 500), ("", 77)]}
    for folder, entries in rails.items():
        for number, (name, milliamperes) in enumerate(entries, 1):
            write(tmp_path, {folder + f"in{number}_label": name, folder + f"in{number}_input": 5000,
                             folder + f"curr{number}_input": milliamperes})
        write(tmp_path, {folder + "in7_label": "sum of shunt voltages", folder + "in7_input": 12, folder + "curr4_input": 99000})
    clock, meter, time = metered(tmp_path)
    assert meter.sensor_names == ["VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"]
    time.seconds += 2
    assert meter.record()["energy_j"] == pytest.approx((2 + 1 + 3 + 0.5) * 5 * 2)


def test_a_counter_of_energy_that_wraps(tmp_path):
    psys = RAPL.replace(":0", ":1")
    write(tmp_path, {RAPL + "name": "package-0", RAPL + "energy_uj": 9_000_000, RAPL + "max_energy_range_uj": 10_000_000,
                     RAPL + "intel-rapl:0:0/name": "core", psys + "name": "psys", psys + "energy_uj": 5,
                     psys + "max_energy_range_uj": 10 ** 9})
    clock, meter, time = metered(tmp_path)
    assert meter.sensor_names == ["package-0"]
    with clock.phase("trainable"):
        for microjoules in (9_500_000, 500_000, 2_500_000):  # 0.5 J, 1 J over the end, 2 J
            time.seconds += 0.1
            write(tmp_path, {RAPL + "energy_uj": microjoules})
            meter.tick()
    assert clock.joules["trainable"] == pytest.approx(3.5)


def test_two_packages_add_up_and_a_gpu_is_not_theirs(tmp_path):
    for number in (0, 1):
        folder = RAPL.replace(":0", f":{number}")
        write(tmp_path, {folder + "name": f"package-{number}", folder + "energy_uj": 0, folder + "max_energy_range_uj": 10 ** 9})
    clock, meter, time = metered(tmp_path)
    time.seconds += 1
    write(tmp_path, {RAPL + "energy_uj": 3_000_000, RAPL.replace(":0", ":1") + "energy_uj": 4_000_000})
    assert meter.record()["energy_j"] == 7.0
    assert Meter(Clock(), "cuda", tmp_path).sensor_names is None


def test_a_sensor_that_vanishes_makes_the_energy_unknown(tmp_path, caplog):
    write(tmp_path, {IIO + "rail_name_0": "VDD_IN", IIO + "in_power0_input": 1000})
    clock, meter, time = metered(tmp_path)
    time.seconds += 1
    meter.tick()
    assert clock.joules["other"] == 1.0
    (tmp_path / IIO / "in_power0_input").unlink()
    for _ in range(3):
        time.seconds += 1
        meter.tick()
    assert (meter.record()["energy_j"], meter.record()["energy_phases"]) == (None, None)
    assert [record.message for record in caplog.records] == [
        "the power sensor (VDD_IN) cannot be read any more ([Errno 2] No such file or directory: "
        f"'{tmp_path / IIO / 'in_power0_input'}'); the run's energy is not known"]


@pytest.mark.parametrize("text", ["", "n/a", "1.5e"])
def test_a_sensor_that_shows_no_number_is_none(tmp_path, text):
    write(tmp_path, {IIO + "rail_name_0": "VDD_IN", IIO + "in_power0_input": text})
    assert find_sensor(tmp_path) is None


def test_a_broken_sensor_gives_way_to_the_next(tmp_path):
    write(tmp_path, {IIO + "rail_name_0": "VDD_IN", IIO + "in_power0_input": "", RAPL + "name": "package-0", RAPL + "energy_uj": 1,
                     RAPL + "max_energy_range_uj": 10})
    assert find_sensor(tmp_path).names == ["package-0"]


def test_without_a_sensor_there_is_no_energy_no_thread_and_no_heat(tmp_path):
    before = threading.active_count()
    with Meter(Clock(), root=tmp_path) as meter:
        assert threading.active_count() == before
        assert meter.record() == {"energy_j": None, "energy_phases": None, "heat": None}


def test_the_thread_reads_by_itself_and_ends(tmp_path):
    write(tmp_path, {IIO + "rail_name_0": "VDD_IN", IIO + "in_power0_input": 2000})
    clock = Clock()
    before, waited = threading.active_count(), threading.Event()
    with Meter(clock, root=tmp_path) as meter:
        assert threading.active_count() == before + 1
        while not sum(clock.joules.values()):
            waited.wait(0.01)
        energy = meter.record()["energy_j"]
    assert threading.active_count() == before
    assert energy == pytest.approx(2.0 * clock.wall_seconds, rel=0.2)


ZONE, CORES = "sys/class/thermal/thermal_zone", "sys/devices/system/cpu/"


def heated(tmp_path, before, after):
    write(tmp_path, before)
    heat = Heat(tmp_path)
    write(tmp_path, after)
    heat.look()
    write(tmp_path, before)
    heat.look()
    return heat.record()


def test_the_highest_temperature_is_kept_and_impossible_ones_are_not(tmp_path):
    before = {ZONE + "0/type": "CPU-therm", ZONE + "0/temp": 41500, ZONE + "1/type": "PMIC-Die", ZONE + "1/temp": 100000,
              ZONE + "2/type": "off", ZONE + "2/temp": -256000, ZONE + "3/type": "GPU-therm", ZONE + "3/temp": 40000}
    assert heated(tmp_path, before, {ZONE + "3/temp": 71250}) == {"max_celsius": 71.25, "is_throttled": None, "signs": []}


@pytest.mark.parametrize("path, before, after, sign", [
    (CORES + "cpu0/thermal_throttle/package_throttle_count", 3, 4, "package_throttle_count"),
    (CORES + "cpufreq/policy0/scaling_max_freq", 2000000, 1200000, "policy0/scaling_max_freq"),
    ("sys/class/thermal/cooling_device2/cur_state", 0, 1, "cooling_device2/cur_state")])
def test_slowing_down_is_seen(tmp_path, path, before, after, sign):
    quiet = {path: before, path.rpartition("/")[0] + "/type": "cpufreq-cpu0"}
    assert heated(tmp_path, quiet, {}) == {"max_celsius": None, "is_throttled": False, "signs": []}
    assert heated(tmp_path, quiet, {path: after}) == {"max_celsius": None, "is_throttled": True, "signs": [sign]}


def test_a_fan_that_turns_is_no_slowing_down(tmp_path):
    folder = "sys/class/thermal/cooling_device0/"
    assert heated(tmp_path, {folder + "type": "pwm-fan", folder + "cur_state": 0}, {folder + "cur_state": 3}) is None


def test_power_modes(tmp_path):
    assert power_mode(tmp_path) is None
    write(tmp_path, {CORES + "cpu0/cpufreq/scaling_governor": "schedutil"})
    assert power_mode(tmp_path) == "schedutil governor"
    write(tmp_path, {"var/lib/nvpmodel/status": "pmode:0002 fmode:quiet",
                     "etc/nvpmodel.conf": "# modes\n< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=2 NAME=MODE_15W >\n"
                                          "< PM_CONFIG DEFAULT=0 >"})
    assert power_mode(tmp_path) == "MODE_15W (mode 2)"
    write(tmp_path, {"var/lib/nvpmodel/status": "pmode:0007"})
    assert power_mode(tmp_path) == "mode 7"


def test_the_doctor_says_when_the_sensors_are_closed(monkeypatch):
    facts = doctor.examine()
    facts["sensors"] = {"found": 1, "readable": 0}
    assert any("runs have no energy_j; RAPL is often root's alone: sudo chmod a+r" in line for line in doctor.advice(facts))
    facts["sensors"] = {"found": 1, "readable": 1}
    assert not any("energy_j" in line for line in doctor.advice(facts))
