"""Energy and heat of a run, sampled beside it."""

import logging
import threading
import time

from piebridge.core.heat import Heat
from piebridge.core.power_sensors import EnergyCounters, find_sensor

LOG = logging.getLogger(__name__)

SECONDS = 0.1  # between two readings of the power
LOOKS = 10  # readings of the power for one look at temperatures and frequencies


class Meter:
    """Charges the clock's phases with what a sensor says was spent, ten times a second, from a thread that sleeps in between.

    A context manager: on entering the clock's energy starts, on leaving the thread has ended. Without a sensor, or with one that
    fails on the way, the energy is not known (None), never 0. On a GPU beside the processor a counter of the processor's energy
    would be a part that looks like the whole, and is not used. `tick()` is one reading; it may be called from any thread.
    """

    def __init__(self, clock, device_type="cpu", root="/", now=time.perf_counter):
        self._clock, self._now = clock, now
        self._sensor = find_sensor(root)
        if device_type != "cpu" and isinstance(self._sensor, EnergyCounters):
            self._sensor = None
        self.sensor_names = self._sensor.names if self._sensor else None
        self._heat = Heat(root)
        self._ticks = 0
        self._reading = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def __enter__(self):
        if self._sensor is not None:
            self._clock.start_energy()
            self.tick()
        if self._sensor is not None or not self._heat.is_blind:
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def tick(self):
        with self._reading:
            if self._sensor is None or self._ticks % LOOKS == 0:
                self._heat.look()
            self._ticks += 1
            if self._sensor is not None:
                self._clock.charge_energy(self._spent())

    def record(self):
        """{"energy_j", "energy_phases", "heat"} up to now: joules of training and by phase (evaluation among them), see Heat."""
        self.tick()
        self._heat.look()
        joules = self._clock.joules
        if joules is None:
            return {"energy_j": None, "energy_phases": None, "heat": self._heat.record()}
        phases = {name: round(spent, 3) for name, spent in sorted(joules.items())}
        trained = sum(spent for name, spent in joules.items() if name != "evaluation")
        return {"energy_j": round(trained, 3), "energy_phases": phases, "heat": self._heat.record()}

    def _spent(self):
        """Joules since the last reading, None from the moment that the sensor has failed."""
        try:
            return self._sensor.joules(self._now())
        except (OSError, ValueError) as error:
            LOG.warning("the power sensor (%s) cannot be read any more (%s); the run's energy is not known",
                        ", ".join(self.sensor_names), error)
            self._sensor = None
            return None

    def _run(self):
        while not self._ended.wait(SECONDS if self._sensor is not None else SECONDS * LOOKS):
            self.tick()
