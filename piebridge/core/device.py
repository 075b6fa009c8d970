"""The one device resolver, and what a process uses of memory."""

import contextlib
import logging
import os
import resource

import torch

from piebridge.core.errors import UserError
from piebridge.core.workers import processor_name, usable_cores

LOG = logging.getLogger(__name__)


def resolve_device(name):
    """`auto`, `cpu`, `cuda` or `cuda:N` -> torch.device. Raises UserError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise UserError(f"device={name}: not a device; write auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name}: torch {torch.__version__} sees no CUDA device; use device=auto to run on the CPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name}: only cpu and cuda devices are supported")
    return device


def make_repeatable(device):
    """Have a GPU's convolutions compute the same each time; on the CPU they do."""
    if device.type == "cuda":
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def warn_of_other_work(device):
    """Torch's kernels wait for each other by spinning, and crawl where their threads do not get a core each."""
    busy, cores = os.getloadavg()[0], usable_cores()
    if device.type == "cpu" and busy > 1.5 * cores:  # a run that has just ended leaves one per core
        LOG.warning("other work keeps this machine busy (load %.1f on %d cores): training may take many times as long; "
                    "OMP_WAIT_POLICY=PASSIVE in the environment makes it less bad", busy, cores)


def synchronizer(device):
    """A function that waits for `device`: a GPU works on after the call that started it has returned."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def describe_device(device):
    """Plain facts about the device for run.json."""
    facts = {"type": device.type, "name": processor_name(), "cores": usable_cores(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        facts["name"] = torch.cuda.get_device_name(device)
    return facts


@contextlib.contextmanager
def limited_threads(count):
    """Let torch use `count` threads; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_random_numbers(device):
    """A context: torch's random numbers that are drawn inside are drawn again afterwards."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class PeakMemory:
    """Peak resident memory of this process in MiB since it was made; on a GPU, the peak of torch's allocator there on top.

    Resident is what all libraries of the process hold (OpenVINO's copy of the weights too), and files that are mapped as far as
    they are in memory. Nothing here starts a process of its own, so there are no children to add.
    """

    def __init__(self, device):
        self._device = device
        try:  # forget the peak of what this process did before
            with open("/proc/self/clear_refs", "w") as stream:
                stream.write("5")
        except OSError:
            LOG.debug("the peak of the resident memory cannot be reset here; it counts from the start of the process")
        if device.type == "cuda":
            torch.cuda.init()  # nothing below it initialises a device that is named by its number
            torch.cuda.reset_peak_memory_stats(device)

    def mib(self):
        peak = _status_kib("VmHWM")
        if peak is None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1024 + (self.device_mib() or 0.0)

    def device_mib(self):
        """The GPU's part of it; None on the CPU."""
        if self._device.type != "cuda":
            return None
        return round(torch.cuda.max_memory_allocated(self._device) / 2 ** 20, 1)


def resident_mib():
    """What this process has in memory now, in MiB; its peak where that cannot be read."""
    now = _status_kib("VmRSS")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if now is None else now) / 1024


def _status_kib(key):
    try:
        with open("/proc/self/status") as stream:
            for line in stream:
                if line.startswith(key + ":"):
                    return int(line.split()[1])
    except OSError:
        pass
    return None
