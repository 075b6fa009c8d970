"""The page of facts about the machine, on a faked /proc and /sys where the real one has nothing to show."""

import json
import os
import subprocess
import sys

import pytest

from piebridge.cli import main
from piebridge.core import doctor


@pytest.fixture(scope="module")
def facts():
    return doctor.examine()


def test_facts_of_this_machine(facts):
    import torch

    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["device"]["cores"] == len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 ** 20
    assert facts["memory"]["total_mib"] == pytest.approx(memory, rel=0.01)
    assert json.loads(json.dumps(facts)) == facts


def test_the_page_has_a_line_for_each_fact(facts):
    lines = doctor.render(facts).splitlines()
    labels = [line.split("  ")[0] for line in lines[:lines.index("")]]
    for label in ("python", "torch", "pillow", "device", "cores", "memory", "swap", "disk", "power mode", "power sensors",
                  "data Clipart10", "network efficientnet_lite0"):
        assert labels.count(label) == 1
    assert lines[lines.index("") + 1] in ("To do:", "All is well.")


def fake_board(root):
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: ARMv8 Processor rev 3 (v8l)\n",
        "proc/meminfo": "MemTotal:        8041216 kB\nMemFree:  1 kB\nMemAvailable:    1048576 kB\nSwapTotal:       0 kB\n",
        "etc/nv_tegra_release": "# R32 (release), REVISION: 7.1, BOARD: t186ref\n",
        "sys/bus/i2c/drivers/ina3221x/0-0041/iio:device1/in_power0_input": "2412\n",
        "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/in1_input": "5024\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_small_board_gets_advice(tmp_path):
    fake_board(tmp_path)
    facts = doctor.examine(tmp_path)
    assert facts["device"]["name"] == "ARMv8 Processor rev 3 (v8l)" or facts["device"]["type"] == "cuda"
    assert facts["memory"] == {"total_mib": 7852, "available_mib": 1024, "swap_mib": 0}
    assert facts["sensors"] == {"found": 2, "readable": 2}
    advice = "\n".join(facts["advice"])
    assert "1024 MiB of memory are free: close other programs, or train with loader.workers=0" in advice
    assert "no swap and little memory: zram swap helps" in advice


def test_nothing_can_be_read_and_the_page_still_stands(tmp_path):
    facts = doctor.examine(tmp_path)
    assert facts["memory"] == {"total_mib": None, "available_mib": None, "swap_mib": None}
    page = doctor.render(facts)
    assert "n/a MiB free of n/a MiB" in page
    assert "power sensors" in page and "0 of 0" not in page


def test_missing_and_broken_packages_are_told_apart(facts):
    packages = dict.fromkeys(doctor.PACKAGES, "1.0")
    packages.update(torch=None, PIL=None, timm=None, openvino=None, onnxruntime=doctor.BROKEN + "libgomp.so.1: cannot open")
    lines = doctor.advice(dict(facts, packages=packages))
    assert "torch is missing and needed: pip install torch" in lines
    assert "PIL is missing and needed: pip install pillow" in lines
    assert "onnxruntime does not load: libgomp.so.1: cannot open: reinstall it" in lines
    assert not any("timm" in line for line in lines)
    on_board = doctor.advice(dict(facts, packages=packages, jetson="# R32"))
    assert "torch is missing and needed: take NVIDIA's build for this JetPack (requirements/README.md)" in on_board


def test_it_works_where_no_package_is_installed():
    missing = list(doctor.NEEDED) + list(doctor.OPTIONAL) + ["pandas", "gdown"]
    code = (f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
            "from piebridge.cli import main; sys.exit(main(['doctor']))")
    output = subprocess.check_output([sys.executable, "-c", code], universal_newlines=True)
    assert "torch is missing and needed: pip install torch" in output


def test_the_verb_prints_it(facts, capsys):
    assert main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["packages"] == facts["packages"]
    assert set(printed) == set(facts)
