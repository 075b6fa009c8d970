"""What a proxy set's manifest says of its levels, the original first; the one place that knows where in it things lie.

Beside the keys of core/proxy_manifest.py, facts are read: of a proxy "width" (share of the original's MACs that pruning leaves),
"dropped" (names of the blocks left out) and "alignment", {"before": ..., "after": ...}, each {tap: {"cosine", "relative_error"}} as
`measure_alignment` gives it on held-out images, but at the head's tap of the level as it runs (in int8, after its bridge map), elsewhere of
its network in float; of the set "tap" (the head's; without it the last tap listed counts) and "resolution" (of
the original). What is missing is shown as unknown.
"""

from dataclasses import dataclass

from piebridge.core.proxy_manifest import COUNT, MOST, NAME, OBJECT, TEXT, check_values, or_none, read_manifest
from piebridge.forge.pareto import Point, deviation_of_median

ORIGINAL = "original"
NUMBER = (lambda value: type(value) in (int, float) and abs(value) <= MOST, "a number")
MEASURED = (lambda value: type(value) in (int, float) and 0 < value <= MOST, "a number above 0")
TEXTS = (lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of texts")
SIZE = (lambda value: value.isdecimal() and len(value) < 10, "a batch size")


@dataclass(frozen=True)
class LevelFacts:
    """A level. resolution, macs, width: None where unknown; before, after: {"cosine", "relative_error"} at the head's tap, or None."""

    name: str
    resolution: int | None
    precision: str
    macs: int | None
    width: float | None = None
    dropped: tuple = ()
    before: dict | None = None
    after: dict | None = None

    @property
    def error(self):
        """Relative error at the head's tap as the level is used: 0 of the original, None where it was not measured."""
        measured = self.after or self.before
        return 0.0 if self.name == ORIGINAL else measured and measured["relative_error"]

    @property
    def text(self):
        """What it is: "192 px, int8, pruned to 76 %, 2 blocks dropped"."""
        parts = [f"{self.resolution} px"] if self.resolution else []
        parts += [self.precision] if self.precision != "float" else []
        parts += [f"pruned to {100 * self.width:.0f} %"] if self.width is not None and self.width < 1 else []
        parts += [f"{len(self.dropped)} block{'s' if len(self.dropped) > 1 else ''} dropped"] if self.dropped else []
        return ", ".join(parts) or "as it is"


def read_facts(folder):
    """The manifest of the set in a folder (a Path), with all that is shown of it checked. UserError names the file and the value."""
    manifest = read_manifest(folder)
    check_facts(folder, manifest)
    return manifest


def check_facts(folder, manifest):
    """UserError where a value of a set's manifest that is shown is not what it must be."""
    for values in (_facts(manifest), _tables(manifest["latency"])):
        check_values(folder / NAME, values)


def _facts(manifest):
    """(where, value, what it must be) of what is known of the levels."""
    yield "facts tap", manifest["facts"].get("tap"), or_none(TEXT)
    yield "facts resolution", manifest["facts"].get("resolution"), or_none(COUNT)
    for number, entry in enumerate(manifest["proxies"]):
        place, own = f"proxy {number}: facts", entry.get("facts") or {}
        for key, kind in (("width", NUMBER), ("dropped", TEXTS), ("alignment", OBJECT)):
            yield f"{place} {key}", own.get(key), or_none(kind)
        for when in ("before", "after"):
            by_tap = (own.get("alignment") or {}).get(when)
            yield f"{place} alignment {when}", by_tap, or_none(OBJECT)
            for tap, figures in (by_tap or {}).items():
                yield f"{place} alignment {when} {tap}", figures, OBJECT
                for key in ("cosine", "relative_error"):
                    yield f"{place} alignment {when} {tap} {key}", figures.get(key), NUMBER


def _tables(latency):
    """The same of what was measured on devices."""
    for device, table in latency.items():
        yield f"latency {device}", table, OBJECT
        for key in ("device", "levels"):
            yield f"latency {device} {key}", table.get(key), OBJECT
        yield f"latency {device} device threads", table["device"].get("threads"), COUNT
        yield from _cells(f"latency {device} levels", table["levels"], depth=4)


def _cells(place, entries, depth):
    """Of {level: {backend: {direction: {batch size: cell}}}}, or what is `depth` levels deep of it."""
    for key, value in entries.items():
        where = f"{place} {key}"
        yield where, value, OBJECT
        if depth > 1:
            yield from _cells(where, value, depth - 1)
            continue
        yield where, key, SIZE
        for name, kind in (("median", MEASURED), ("iqr", NUMBER), ("repeats", COUNT)):
            yield f"{where} {name}", value.get(name), kind


def level_facts(manifest):
    """LevelFacts of every level of a manifest, the original first."""
    original, facts = manifest["original"], manifest["facts"]
    levels = [LevelFacts(ORIGINAL, facts.get("resolution"), "float", original.get("macs"))]
    for entry in manifest["proxies"]:
        own = entry.get("facts") or {}
        alignment = own.get("alignment") or {}
        levels.append(LevelFacts(entry["name"], entry.get("resolution"), entry.get("precision", "float"), entry.get("macs"),
                                 own.get("width"), tuple(own.get("dropped") or ()),
                                 _at_tap(alignment.get("before"), facts.get("tap")), _at_tap(alignment.get("after"), facts.get("tap"))))
    return levels


def _at_tap(by_tap, tap):
    if not by_tap:
        return None
    return by_tap.get(tap) or list(by_tap.values())[-1]


def batch_sizes_of(table):
    """The batch sizes (int) of a latency table, ascending."""
    return sorted({int(size) for measured in table["levels"].values() for directions in measured.values()
                   for cells in directions.values() for size in cells})


def fastest(table, level, direction, batch_size):
    """(backend, cell) of the backend that is the fastest for a level in a latency table, or None where there is none."""
    cells = {backend: directions.get(direction, {}).get(str(batch_size))
             for backend, directions in table["levels"].get(level, {}).items()}
    cells = {backend: cell for backend, cell in cells.items() if cell}
    return min(cells.items(), key=lambda item: item[1]["median"]) if cells else None


def points_of(table, errors, direction, batch_size):
    """Points (see forge/pareto.py) of the levels in a table, each on its fastest backend; errors: {level: relative error or None}."""
    points = []
    for level in table["levels"]:
        found = fastest(table, level, direction, batch_size)
        if found and errors.get(level) is not None:
            _, cell = found
            points.append(Point(level, cell["median"], errors[level], deviation_of_median(cell["iqr"], cell["repeats"])))
    return points
