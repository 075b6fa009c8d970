"""Ctrl-C and SIGTERM: noted at once, acted on between two steps; real signals, to this process and to another one."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from piebridge.core.errors import Cancelled
from piebridge.core.interrupt import interruptible

ENDLESS = """
import sys, time
from piebridge.console import exit_status
from piebridge.core.interrupt import interruptible

def work():
    with interruptible() as interrupt:
        print("ready", flush=True)
        while True:
            time.sleep({pause})
            {check}

sys.exit(exit_status(work))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_waits_for_the_end_of_the_step(name):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with interruptible() as interrupt:
        interrupt.check()
        os.kill(os.getpid(), getattr(signal, name))
        assert interrupt.signal_name == name  # and the step goes on
        with pytest.raises(Cancelled, match=f"interrupted by {name}"):
            interrupt.check()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_second_signal_does_not_wait():
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was only noted")
    assert signal.getsignal(signal.SIGINT) is handler


def test_another_thread_gets_no_handlers_and_no_error():
    handler, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with interruptible() as interrupt:
            seen.append(signal.getsignal(signal.SIGINT))
            interrupt.check()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]


def end_with(code, *signals):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert process.stdout.readline() == "ready\n"
    for each in signals:
        process.send_signal(each)
    _, error = process.communicate(timeout=30)
    return process.returncode, error


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_process_ends_with_130_and_one_line(name):
    code = ENDLESS.format(pause=0.01, check="interrupt.check()")
    assert end_with(code, getattr(signal, name)) == (130, f"piebridge: interrupted by {name}\n")


def test_a_process_that_never_gets_to_the_end_of_its_step_ends_at_the_second_signal():
    assert end_with(ENDLESS.format(pause=60, check=""), signal.SIGTERM, signal.SIGINT) == (130, "piebridge: interrupted\n")
