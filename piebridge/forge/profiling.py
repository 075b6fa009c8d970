"""`piebridge forge --profile SET`: every level of a set measured on this device, noted in its manifest, and judged."""

import logging

from piebridge.core.device import resolve_device
from piebridge.core.errors import UserError
from piebridge.core.proxy_set import load_proxy_set
from piebridge.forge.latency import BACKWARD, BATCH_SIZES, FORWARD, measure, original_level
from piebridge.forge.pareto import noise
from piebridge.forge.set_facts import ORIGINAL, batch_sizes_of, check_facts, fastest, level_facts, points_of
from piebridge.forge.text_table import text_table

LOG = logging.getLogger(__name__)
SECONDS = 300.0
WORDS = {FORWARD: "forward", BACKWARD: "forward + backward"}


def profile_set(folder, seconds=SECONDS, batch_sizes=BATCH_SIZES, device="auto", backends=None):
    """Measure the set in a folder (see forge/latency.py), write the table into its manifest, and return the text to print.

    UserError: no proxy set, one without proxies, or what `measure` refuses.
    """
    proxy_set = load_proxy_set(folder)
    if not proxy_set.proxies:
        raise UserError(f"{folder}: holds no proxies, only an original; make some with: piebridge forge NETWORK --images DIR --out SET")
    check_facts(proxy_set.folder, proxy_set.manifest)  # measuring takes long
    device = resolve_device(device)
    for network in [proxy_set.original] + [proxy.network for proxy in proxy_set.proxies]:
        network.to(device)
    table = measure([original_level(proxy_set.original)] + proxy_set.proxies, seconds, batch_sizes, backends)
    proxy_set.update_manifest(table["device"]["name"], table)
    return render_latency(table, {level.name: level.error for level in level_facts(proxy_set.manifest)})


def not_worth(table, errors, directions=(FORWARD, BACKWARD)):
    """{level: a sentence} of the levels that are of no use on the device of a latency table.

    errors: {level: relative error at the head's tap}; levels without one are not judged. A level is of no use at a batch size when
    another one that is at least as well aligned is as fast, but for noise; and of no use at all when that is so at every batch size
    and direction in which it was measured. The sentence tells of the first direction, at the largest batch.
    """
    reasons = {}  # level: [a sentence, or None where it is of use], one for each batch size and direction
    for direction in directions:
        for batch_size in reversed(batch_sizes_of(table)):
            kept = []
            for point in sorted(points_of(table, errors, direction, batch_size), key=lambda each: (each.error, each.milliseconds)):
                rivals = [other for other in kept if other.milliseconds <= point.milliseconds + noise(other, point)]
                rival = min(rivals, key=lambda other: other.milliseconds, default=None)
                if rival is None:
                    kept.append(point)
                reasons.setdefault(point.name, []).append(rival and _reason(point, rival, WORDS[direction], batch_size))
    return {level: sentences[0] for level, sentences in reasons.items() if None not in sentences}


def _reason(point, rival, direction, batch_size):
    alignment = (f"is better aligned (relative error {rival.error:.3g} against {point.error:.3g})" if rival.error < point.error
                 else f"is as well aligned (relative error {point.error:.3g})")
    speed = "takes no longer but for noise" if rival.milliseconds > point.milliseconds - noise(rival, point) else "is faster"
    return (f"{point.name} is not worth having here: {rival.name} {alignment} and {speed} ({direction}, batch {batch_size}: "
            f"{rival.milliseconds:.3g} ms against {point.milliseconds:.3g} ms per image)")


def render_latency(table, errors):
    """Text: the levels, each on its fastest backend; the original on every backend; what was refused; what is not worth having."""
    sizes, device = batch_sizes_of(table), table["device"]
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items() if version)
    repeats = [cell["repeats"] for measured in table["levels"].values() for directions in measured.values()
               for cells in directions.values() for cell in cells.values()]
    lines = [f"{device['name']}: {device['type']}, {device['cores']} cores, {device['threads']} threads; {versions}",
             f"Milliseconds per image: median +- interquartile range of {min(repeats, default=0)} to {max(repeats, default=0)} calls; "
             "in brackets the share of the original's.", ""]
    header, sides = ("level", *[f"batch {size}" for size in sizes], "fastest on"), "left " + "right " * len(sizes) + "left"
    for direction in (FORWARD, BACKWARD):
        rows = [header] + [_level_row(table, level, direction, sizes) for level in table["levels"]]
        lines += [f"{WORDS[direction].capitalize()}, each level on its fastest backend", text_table(rows, sides), ""]
    lines += ["The original on every backend", text_table(*_backend_rows(table, sizes)), ""]
    return "\n".join(lines + _refusals(table) + judgement(table, errors)).rstrip()


def judgement(table, errors):
    """A sentence for each level that is not worth having, and a line on those that are of use for a backward alone."""
    useless, slow = not_worth(table, errors), not_worth(table, errors, [FORWARD])
    others = [level for level in slow if level not in useless]
    only_backward = [f"Worth having only where a backward runs through them: {', '.join(others)}."] if others else []
    return list(useless.values()) + only_backward


def _level_row(table, level, direction, sizes):
    cells, backends = [], []
    for size in sizes:
        found, original = (fastest(table, name, direction, size) for name in (level, ORIGINAL))
        share = f" ({100 * found[1]['median'] / original[1]['median']:3.0f} %)" if found and original else ""
        cells.append(_cell(found[1]) + share if found else "-")
        backends += [found[0]] if found else []
    return (level, *cells, ", ".join(dict.fromkeys(backends)) or "-")


def _backend_rows(table, sizes):
    header, rows = ["backend"], []
    columns = [(direction, size) for direction in (FORWARD, BACKWARD) for size in sizes]
    header += [f"{WORDS[direction]}, batch {size}" for direction, size in columns]
    for backend, directions in table["levels"].get(ORIGINAL, {}).items():
        found = [directions.get(direction, {}).get(str(size)) for direction, size in columns]
        rows.append([backend] + [_cell(cell) if cell else "-" for cell in found])
    return [header] + rows, "left " + "right " * len(columns)


def _cell(cell):
    return f"{cell['median']:.4g} +- {cell['iqr']:.2g}"


def _refusals(table):
    """A line for each reason, with the levels and backends that it is true of."""
    places = {}
    for each in table["refused"]:
        where = each["level"] if each["backend"] is None else f"{each['level']} on {each['backend']}"
        places.setdefault(each["reason"], {})[where] = None
    return [f"Refused: {', '.join(where)}: {reason}" for reason, where in places.items()]
