"""What this machine has, as /proc says it, and how many threads decode images: none on a board that is short of memory."""

import logging
import os
import platform

from piebridge.core.errors import UserError

LOG = logging.getLogger(__name__)

_LOW_MEMORY_BYTES = 1 << 30


def resolve_workers(workers, meminfo="/proc/meminfo"):
    """The number of decoding threads: a whole number as given, or "auto" by cores and free memory."""
    if workers == "auto":
        available = available_memory(meminfo)
        if available is not None and available < _LOW_MEMORY_BYTES:
            LOG.info("images are decoded by the main thread: only %d MiB of memory are free", available >> 20)
            return 0
        return usable_cores()
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise UserError(f"loader.workers={workers}: give a whole number of at least 0, or auto")
    return workers


def usable_cores():
    """Cores this process may run on, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(meminfo="/proc/meminfo"):
    """Bytes that can be had without swapping, or None where the system does not say."""
    kib = read_proc(meminfo).get("MemAvailable", "").partition(" ")[0]
    return int(kib) * 1024 if kib.isdigit() else None


def processor_name(cpuinfo="/proc/cpuinfo"):
    """The processor's name, or a board's, or at least the kind of processor."""
    facts = read_proc(cpuinfo)
    return next((facts[key] for key in ("model name", "Model", "Hardware") if key in facts), platform.machine())


def read_proc(path):
    """{key: value} of a `key : value` file such as those in /proc; of a key that comes again, its first value."""
    facts = {}
    try:
        with open(str(path), errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if value.strip():
                    facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return facts
