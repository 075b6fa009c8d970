"""Levels in memory: two at most, the next one built by a thread, errors and interruptions, and the same results to the bit."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from forge_examples import Tower, images, network_of, noisy

from piebridge.core.backends import build_segment
from piebridge.core.clock import Clock
from piebridge.core.level_loader import LOADING, THREAD_NAME, DoubleBuffer, Resident
from piebridge.core.loader import in_batches
from piebridge.core.sources import Level, LevelSource

pytestmark = pytest.mark.usefixtures("one_thread")


class FakeSegment:
    """Multiplies by its factor; `alive` counts those that exist."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, tensor):
        return tensor * self.factor


class Factory:
    """Builds FakeSegments and remembers how many were alive at once, in which threads they were built, and how often."""

    def __init__(self, seconds=0.0):
        self.references, self.most, self.threads, self.built, self.seconds = [], 0, [], [], seconds

    def of(self, factor):
        def build():
            time.sleep(self.seconds)
            segment = FakeSegment(factor)
            self.references.append(weakref.ref(segment))
            self.threads.append(threading.current_thread().name)
            self.built.append(factor)
            self.count()
            return segment
        return build

    def count(self):
        self.most = max(self.most, sum(reference() is not None for reference in self.references))
        return self.most


def threads_left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.mark.parametrize("seconds", [0.0, 0.01])
@pytest.mark.parametrize("is_threaded", [True, False])
def test_two_levels_at_most_are_in_memory(is_threaded, seconds):
    factory, buffer = Factory(seconds), DoubleBuffer(is_threaded)
    segments = [buffer.open(factory.of(factor)) for factor in range(6)]
    assert factory.most == 2
    for order in ([0, 1, 2, 3, 4, 5], [0, 2, 5], [3], [1, 0, 4, 0]):
        with buffer.visiting([segments[number] for number in order]):
            for number in order:
                buffer.load(segments[number])
                for _ in range(3):
                    assert float(segments[number](torch.ones(1))) == number
                    factory.count()
        assert not threads_left()
    assert factory.most == 2
    is_apart = [name.startswith(THREAD_NAME) for name in factory.threads[6:]]
    assert sum(is_apart) == (9 if is_threaded else 0)  # 5, 2 and 3 transitions, the last one to what is still there


def test_two_levels_are_never_built_again():
    factory, buffer = Factory(), DoubleBuffer()
    segments = [buffer.open(factory.of(factor)) for factor in (1, 2)]
    for _ in range(3):
        with buffer.visiting(segments):
            for segment in segments:
                segment(torch.ones(1))
    assert factory.built == [1, 2]


def test_the_next_level_is_built_while_the_current_one_is_in_use():
    factory, buffer = Factory(), DoubleBuffer()
    segments = [buffer.open(factory.of(factor)) for factor in range(4)]
    with buffer.visiting(segments):
        for number, segment in enumerate(segments):
            segment(torch.ones(1))
            deadline = time.time() + 10
            while number < 3 and factory.built[-1] != number + 1 and time.time() < deadline:
                time.sleep(0.001)
            assert factory.built[-1] == min(number + 1, 3)


def test_what_nobody_expected_is_built_all_the_same():
    factory, buffer = Factory(0.01), DoubleBuffer()
    segments = [buffer.open(factory.of(factor)) for factor in range(4)]
    with buffer.visiting(segments[:2]):
        for number in (0, 3, 1, 2, 0):
            assert float(segments[number](torch.ones(1))) == number
            factory.count()
    assert float(segments[3](torch.ones(1))) == 3 and factory.most == 2


def fails():
    raise OSError("the disk is gone")


def test_an_error_of_the_thread_is_raised_where_the_level_is_wanted_and_ends_the_thread():
    factory, buffer, is_broken = Factory(), DoubleBuffer(), []
    second = buffer.open(lambda: fails() if is_broken else factory.of(2)())
    first, third = [buffer.open(factory.of(factor)) for factor in (1, 3)]
    is_broken.append(True)
    with pytest.raises(OSError, match="the disk is gone"), buffer.visiting([first, second, third]):
        assert float(first(torch.ones(1))) == 1  # which needs nothing of the second
        second(torch.ones(1))
    assert not threads_left()
    is_broken.clear()
    assert float(second(torch.ones(1))) == 2 and float(third(torch.ones(1))) == 3  # what failed is not remembered
    assert factory.count() == 2


def test_a_level_that_cannot_be_built_at_first_is_refused_at_once():
    with pytest.raises(OSError):
        DoubleBuffer().open(fails)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_ends_the_thread(error):
    factory, buffer = Factory(0.05), DoubleBuffer()
    segments = [buffer.open(factory.of(factor)) for factor in range(3)]
    with pytest.raises(error), buffer.visiting(segments):
        segments[0](torch.ones(1))
        raise error
    assert not threads_left()
    assert factory.count() == 2
    assert float(segments[1](torch.ones(1))) == 1  # and the buffer is as good as before


def test_names():
    assert isinstance(LOADING["resident"](True), Resident) and isinstance(LOADING["double_buffer"](False), DoubleBuffer)


SIGNALLED = """
import os, signal, threading, torch
from forge_examples import Tower, network_of
from piebridge.core.backends import build_segment

def build():
    return build_segment("openvino", network, 16, 2)

seen, network = [], network_of(Tower()).float()
signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
first, second = build(), build()
del first  # the first in is the first out
del second
os.kill(os.getpid(), signal.SIGTERM)
held = [build()]
thread = threading.Thread(target=held.clear)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
print(len(seen))
"""


def test_a_signal_does_no_harm_after_levels_were_dropped():
    """OpenVINO gives a thread a stack for its signal handlers; that of a level that was dropped must not be what is left."""
    pytest.importorskip("openvino")
    here = Path(__file__).resolve().parent
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here.parents[1]), str(here)]), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", SIGNALLED], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


# In the source ----------------------------------------------------------------------------------------------------------

class MemoryLoader:
    """Batches of images that are in memory."""

    def __init__(self, stored):
        self._stored = stored

    def batches(self, index_lists, view_seed=None):
        for indices in index_lists:
            yield indices, self._stored[indices]


def source_with(loading, backend, count=5):
    original = network_of(Tower()).float()
    networks = [original] + [noisy(original, 0.1, seed) for seed in range(1, count)]
    stored = images(24).float()
    levels = [Level(str(number), MemoryLoader(stored), loading.open(lambda network=network: build_segment(backend, network, 16, 4)))
              for number, network in enumerate(networks)]
    return LevelSource(levels, list(range(24)), lambda epoch: None, torch.device("cpu"), Clock(), loading)


ORDER = [(0, [0, 1]), (1, [2]), (3, [3]), (4, [4, 5])]  # level, batches


def streamed(source, stop_after=None):
    levels = [0] * 24
    batches = in_batches(24, 4)
    for level, numbers in ORDER:
        for number in numbers:
            for index in batches[number]:
                levels[index] = level
    found = []
    with contextlib.closing(source.stream(batches, 0, levels)) as stream:
        for indices, values, _ in stream:
            found.append((indices, values.clone()))
            if len(found) == stop_after:
                break
    return found


@pytest.mark.parametrize("backend", ["eager", "folded", "openvino"])
def test_values_are_the_same_to_the_bit_with_and_without(backend):
    if backend == "openvino":
        pytest.importorskip("openvino")
    is_threaded = backend == "openvino"
    resident, buffered = [source_with(LOADING[name](is_threaded), backend) for name in ("resident", "double_buffer")]
    for _ in range(2):  # two epochs: levels that were dropped come back
        for (indices, values), (other_indices, other_values) in zip(streamed(resident), streamed(buffered)):
            assert indices == other_indices and torch.equal(values, other_values)
    assert not threads_left()


def test_a_stream_that_is_closed_early_leaves_no_thread():
    source = source_with(DoubleBuffer(), "eager")
    assert len(streamed(source, stop_after=3)) == 3
    assert not threads_left()
