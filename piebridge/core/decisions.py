"""What was decided and measured before the loop, kept so that a resumed run repeats it."""

from piebridge.core.files import read_json, write_json


class Decisions:
    """Named JSON values in a file, with the clock's reading beside them.

    A run that is killed before its first checkpoint has still decided, measured and cached: the next session repeats the decisions,
    not the measurements that led to them (no two runs share those), and goes on counting the time that they took.
    """

    def __init__(self, path, clock):
        self._path, self._clock = path, clock
        saved = read_json(path)
        is_whole = isinstance(saved, dict) and isinstance(saved.get("values"), dict) and _is_clock(saved.get("clock"))
        backend = saved["values"].get("backend", {"backend": ""}) if is_whole else None
        is_whole = is_whole and isinstance(backend, dict) and isinstance(backend.get("backend"), str)
        self.values = saved["values"] if is_whole else {}
        self.clock_state = saved["clock"] if is_whole else None

    def decide(self, name, make):
        """The recorded value of `name`, or what `make()` returns, which is recorded."""
        if name not in self.values:
            self.values[name] = make()
            self.save()
        return self.values[name]

    def update(self, name, value):
        """Record what is no decision but has to outlive the session."""
        self.values[name] = value
        self.save()

    def section(self, name):
        """The decisions of a part of the run, kept among this one's under `name`."""
        return _Section(self, name)

    def save(self):
        write_json(self._path, {"values": self.values, "clock": self._clock.state()})


class _Section(Decisions):
    def __init__(self, whole, name):
        self._whole = whole
        self.values = whole.values.setdefault(name, {})

    def save(self):
        self._whole.save()


def _is_clock(state):
    return isinstance(state, dict) and isinstance(state.get("seconds"), dict) and isinstance(state.get("wall_seconds"), (int, float))
