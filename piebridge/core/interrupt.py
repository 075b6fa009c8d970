"""Ctrl-C and SIGTERM end a run between two steps, never inside one."""

import contextlib
import logging
import signal
import threading

from piebridge.core.errors import Cancelled

LOG = logging.getLogger(__name__)


class Interrupt:
    """`check()` raises Cancelled once a signal has come; a second signal stops at once, as Python does by itself."""

    def __init__(self):
        self.signal_name = None

    def check(self):
        if self.signal_name:
            raise Cancelled(f"interrupted by {self.signal_name}")

    def _receive(self, number, frame):
        if self.signal_name:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        LOG.info("%s: saving and stopping after this step; once more stops at once", self.signal_name)


@contextlib.contextmanager
def interruptible():
    """Yield an Interrupt that listens to SIGINT and SIGTERM (in the main thread only; Python allows no other)."""
    interrupt = Interrupt()
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, interrupt._receive)
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
