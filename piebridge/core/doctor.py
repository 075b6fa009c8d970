"""What this machine has and what is missing: versions, device, memory, power mode, sensors, data and network files.

`examine()` gives plain facts, `render()` the page for a person. Nothing here needs an optional package, and nothing raises: what
cannot be found out is None and reads n/a.
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from piebridge.core.packages import BROKEN, PROJECT_NAMES, imported_version, one_line, package_version
from piebridge.core.power_sensors import power_mode
from piebridge.core.workers import processor_name, read_proc, usable_cores

PACKAGES = ("torch", "torchvision", "numpy", "PIL", "yaml", "pandas", "tqdm", "gdown", "openvino", "onnxruntime", "onnx", "timm",
            "matplotlib")
NEEDED = ("torch", "torchvision", "numpy", "PIL", "yaml", "tqdm")
LOOKED_UP = ("pandas", "gdown", "onnx", "timm", "matplotlib")
OPTIONAL = {"openvino": "engine", "onnxruntime": "engine", "onnx": "engine", "timm": "forge", "matplotlib": "plot"}
LOW_MEMORY_MIB = 2048
LOW_DISK_GIB = 2
SENSOR_PATTERNS = (
    "sys/bus/i2c/drivers/ina3221x/*/iio:device*/in_power*_input",  # JetPack 4, mW
    "sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in*_input",  # JetPack 5 and later, mV
    "sys/class/powercap/intel-rapl:*/energy_uj",  # x86
)


def examine(root="/"):
    """Facts as a dict that JSON can hold. `root` is where /proc, /sys and /etc are looked for, so that a test can fake them."""
    root = Path(str(root))
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: (package_version if name in LOOKED_UP else imported_version)(name) for name in PACKAGES},
        "device": _device(root),
        "memory": _memory(root),
        "disk_free_gib": _disk_free_gib(Path.cwd()),
        "power_mode": _nvpmodel() or power_mode(root),
        "jetson": _first_line(root / "etc/nv_tegra_release"),
        "sensors": _sensors(root),
        "files": _files(),
    }
    facts["advice"] = advice(facts)
    return facts


def advice(facts):
    """What to do about what is missing or short, one line each, most urgent first."""
    lines = []
    packages, memory, is_jetson = facts["packages"], facts["memory"], bool(facts["jetson"])
    is_on_cpu = facts["device"]["type"] == "cpu"
    for name in NEEDED:
        if packages[name] is None:
            cure = "pip install " + PROJECT_NAMES.get(name, name)
            if is_jetson and name.startswith("torch"):
                cure = "take NVIDIA's build for this JetPack (requirements/README.md)"
            lines.append(f"{name} is missing and needed: {cure}")
    lines += [f"{name} {version}: reinstall it" for name, version in packages.items() if (version or "").startswith(BROKEN)]
    if is_on_cpu and not is_jetson and packages["openvino"] is None and packages["onnxruntime"] is None:
        lines.append("frozen layers run several times faster with a CPU backend: pip install openvino")
    if is_on_cpu and is_jetson and packages["torch"] is not None:
        lines.append("torch sees no GPU on this Jetson; pip has probably replaced NVIDIA's build: reinstall that one")
    free, total = memory["available_mib"], memory["total_mib"]
    if free is not None and free < LOW_MEMORY_MIB:
        lines.append(f"{free} MiB of memory are free: close other programs, or train with loader.workers=0 loader.batch_size=2")
    if memory["swap_mib"] == 0 and total is not None and total < 4 * LOW_MEMORY_MIB:
        lines.append("no swap and little memory: zram swap helps; swap on an SD card wears the card")
    disk = facts["disk_free_gib"]
    if disk is not None and disk < LOW_DISK_GIB:
        lines.append(f"{disk:.1f} GiB of disk are free here, and runs write checkpoints and caches: free some space")
    if facts["sensors"]["found"] and not facts["sensors"]["readable"]:
        lines.append("the power sensors may not be read by this user, so runs have no energy_j; RAPL is often root's alone: "
                     "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj (until the next start)")
    return lines + [f"{name}: {found['detail']}" for name, found in facts["files"].items() if not found["is_readable"]]


def render(facts):
    """The facts as aligned lines for a terminal."""
    device, memory, sensors = facts["device"], facts["memory"], facts["sensors"]
    rows = [("python", facts["python"]), ("platform", facts["platform"]), ("jetson", facts["jetson"] or "no")]
    for name in PACKAGES:
        missing = "not installed" + (f" (extra `{OPTIONAL[name]}`)" if name in OPTIONAL else "")
        rows.append((PROJECT_NAMES.get(name, name), facts["packages"][name] or missing))
    rows += [
        ("device", f"{device['type']}, {device['name']}"),
        ("cores", f"{device['cores']} usable, torch uses {_shown(device['threads'])}"),
        ("memory", f"{_shown(memory['available_mib'])} MiB free of {_shown(memory['total_mib'])} MiB"),
        ("swap", f"{_shown(memory['swap_mib'])} MiB"),
        ("disk", "n/a" if facts["disk_free_gib"] is None else f"{facts['disk_free_gib']:.1f} GiB free here"),
        ("power mode", facts["power_mode"] or "n/a"),
        ("power sensors", f"{sensors['readable']} of {sensors['found']} readable" if sensors["found"] else "n/a"),
    ]
    rows += [(name, found["detail"]) for name, found in facts["files"].items()]
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {value}" for label, value in rows]
    todo = ["To do:"] + ["* " + line for line in facts["advice"]] if facts["advice"] else ["All is well."]
    return "\n".join(lines + [""] + todo)


def _device(root):
    facts = {"type": "cpu", "name": processor_name(root / "proc/cpuinfo"), "cores": usable_cores(), "threads": None}
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            facts.update(type="cuda", name=", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
    return facts


def _memory(root):
    table = read_proc(root / "proc/meminfo")

    def mib(key):
        number = table.get(key, "").partition(" ")[0]
        return int(number) // 1024 if number.isdigit() else None

    return {"total_mib": mib("MemTotal"), "available_mib": mib("MemAvailable"), "swap_mib": mib("SwapTotal")}


def _disk_free_gib(folder):
    try:
        return shutil.disk_usage(str(folder)).free / 2.0 ** 30
    except OSError:
        return None


def _nvpmodel():
    """`nvpmodel -q` in one line, None where there is none."""
    if shutil.which("nvpmodel") is None:
        return None
    try:
        output = subprocess.check_output(["nvpmodel", "-q"], stderr=subprocess.STDOUT, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvpmodel -q failed: {one_line(error)}"
    return ", ".join(line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip())


def _sensors(root):
    found = [path for pattern in SENSOR_PATTERNS for path in sorted(root.glob(pattern))]
    return {"found": len(found), "readable": sum(1 for path in found if _first_line(path) is not None)}


def _files():
    """{name: {"is_readable", "detail"}} of the embedded data set and of the network that the shipped runs start from."""

    def embedded_set():
        from piebridge.core.data_catalogue import locate_dataset
        from piebridge.core.layouts import read_layout

        _, folder = locate_dataset("Clipart10")
        layout = read_layout(Path(str(folder)))
        return f"{len(layout.classes)} classes, {sum(len(part) for part in layout.parts.values())} images"

    def network():
        from piebridge.core.networks import load_network

        return f"{sum(parameter.numel() for parameter in load_network('efficientnet_lite0').parameters())} parameters"

    found = {}
    for name, read in (("data Clipart10", embedded_set), ("network efficientnet_lite0", network)):
        try:
            found[name] = {"is_readable": True, "detail": read()}
        except Exception as error:  # whatever it is, the page has to show it
            found[name] = {"is_readable": False, "detail": one_line(error, most=1000)}
    return found


def _first_line(path):
    try:
        with open(str(path), errors="replace") as stream:
            return stream.readline().strip()
    except OSError:
        return None


def _shown(value):
    return "n/a" if value is None else str(value)
