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


def test_energy_goes_to_the_phases_by_their_shares_of_the_time():
    time = FakeTime()
    clock = Clock(now=time)
    assert clock.joules is None and clock.state()["joules"] is None
    time.passes(5)  # before the meter
    clock.start_energy()
    with clock.phase("decode"):
        time.passes(1)
    with clock.phase("frozen"):
        time.passes(2)
        clock.charge_energy(6.0)  # in the middle of a phase
        time.passes(1)
        with clock.evaluation():
            time.passes(3)
    clock.charge_energy(8.0)
    assert clock.joules == {"other": 0, "decode": 2, "frozen": 4 + 2, "evaluation": 6}
    clock.charge_energy(0.5)  # no time has passed
    assert clock.joules["other"] == 0.5 and sum(clock.joules.values()) == 14.5


def test_the_energy_of_a_run_is_that_of_all_its_sessions():
    time = FakeTime()
    first, second, unmetered = (Clock(now=time) for _ in range(3))
    first.start_energy()
    with first.phase("decode"):
        time.passes(5)
    first.charge_energy(10.0)
    second.start_energy()
    second.restore(first.state())
    with second.phase("frozen"):
        time.passes(1)
    second.charge_energy(3.0)
    assert {name: joules for name, joules in second.joules.items() if joules} == {"decode": 10, "frozen": 3}
    assert second.phases["decode"] == 5
    unmetered.restore(first.state())
    assert unmetered.joules is None
    second.restore(unmetered.state())
    assert second.joules is None
    second.charge_energy(1.0)
    assert second.joules is None


def test_energy_that_is_not_known_once_is_not_known():
    clock = Clock()
    clock.start_energy()
    clock.charge_energy(1.0)
    clock.charge_energy(None)
    clock.charge_energy(1.0)
    assert clock.joules is None
