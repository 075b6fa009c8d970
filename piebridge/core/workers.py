"""How many threads decode images: what the process may use, and none on a board that is short of memory."""

import logging
import os

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
    try:
        with open(str(meminfo)) as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
