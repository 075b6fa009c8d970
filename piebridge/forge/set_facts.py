"""What a proxy set's manifest says of its levels, the original first; the one place that knows where in it things lie.

Beside the keys of core/proxy_manifest.py, facts are read: of a proxy "width" (share of the original's MACs that pruning leaves),
"dropped" (names of the blocks left out) and "alignment", {"before": ..., "after": ...}, each {tap: {"cosine", "relative_error"}} as
`measure_alignment` gives it on held-out images, but at the head's tap of the level as it runs (in int8, after its bridge map), elsewhere of
its network in float; of the set "tap" (the head's; without it the last tap listed counts) and "resolution" (of
the original). What is missing is shown as unknown.
"""

from dataclasses import dataclass

from piebridge.forge.pareto import Point, deviation_of_median

ORIGINAL = "original"


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
