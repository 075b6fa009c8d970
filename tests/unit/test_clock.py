"""The clock, on a clock of our own."""

import pytest

from piebridge.core.clock import Clock


class FakeTime:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def passes(self, seconds):
        self.seconds += seconds


def test_phases_are_exclusive_and_evaluation_is_left_out():
    time = FakeTime()
    clock = Clock(now=time)
    time.passes(1)
    with clock.phase("cache"):
        time.passes(2)
        with clock.phase("decode"):
            time.passes(4)
        time.passes(8)
        with clock.evaluation():
            time.passes(16)
            with clock.phase("decode"):  # decoding for an evaluation is evaluation
                time.passes(32)
    assert clock.phases == {"other": 1, "cache": 10, "decode": 4}
    assert clock.train_seconds == 15
    assert clock.evaluation_seconds == 48
    assert clock.wall_seconds == 63


def test_a_restored_clock_goes_on():
    time = FakeTime()
    first = Clock(now=time)
    with first.phase("decode"):
        time.passes(5)
    state = first.state()
    second = Clock(now=time)
    time.passes(2)
    second.restore(state)
    assert second.train_seconds == 7 and second.phases["decode"] == 5 and second.wall_seconds == 7


def test_the_device_is_waited_for_before_each_reading():
    time = FakeTime()
    queued = [3.0]
    clock = Clock(synchronize=lambda: time.passes(queued.pop()) if queued else None, now=time)
    with clock.phase("frozen"):
        queued.append(7.0)  # work that the accelerator has been given
    assert clock.phases["frozen"] == 7.0


def test_a_phase_ends_with_an_exception():
    time = FakeTime()
    clock = Clock(now=time)
    with pytest.raises(KeyError):
        with clock.phase("decode"):
            time.passes(1)
            raise KeyError
    time.passes(1)
    assert clock.phases == {"other": 1, "decode": 1}
