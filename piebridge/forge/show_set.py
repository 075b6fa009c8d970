"""A proxy set as tables, from its manifest alone: what each level is and how well aligned, and what it takes on each device."""

from piebridge.forge.latency import BACKWARD, FORWARD
from piebridge.forge.set_facts import ORIGINAL, batch_sizes_of, fastest, level_facts
from piebridge.forge.show import millions
from piebridge.forge.text_table import text_table

UNKNOWN = "-"
LEVEL_HEADER = ("", "level", "what it is", "MACs", "share", "cosine", "aligned", "relative error", "aligned")
LEVEL_SIDES = "right left left right right right right right right"


def render_set(manifest):
    """Text: a table of levels, and one for each device, of the largest batch that was measured on it."""
    original = manifest["original"]
    name = f"{original.get('name', 'a network')}: {len(manifest['proxies'])} proxies"
    text = [name, "At the head's tap on held-out images: cosine and relative error, before and after alignment.", "",
            text_table([LEVEL_HEADER] + level_rows(manifest), LEVEL_SIDES)]
    for device, table in manifest["latency"].items():
        size, rows, sides = device_rows(manifest, table)
        title = f"{device}, {table['device']['threads']} threads, batch {size}: milliseconds per image, medians"
        text += ["", title, text_table(rows, sides)]
    if not manifest["latency"]:
        text += ["", "Not measured on any device yet: piebridge forge --profile SET"]
    return "\n".join(text)


def level_rows(manifest):
    """A row of LEVEL_HEADER for each level, the original first."""
    levels = level_facts(manifest)
    whole = levels[0].macs
    rows = []
    for number, level in enumerate(levels):
        share = f"{100 * level.macs / whole:.0f} %" if level.macs and whole else UNKNOWN
        rows.append((str(number), level.name, level.text, millions(level.macs) if level.macs else UNKNOWN, share,
                     _figure(level.before, "cosine"), _figure(level.after, "cosine"), _figure(level.before, "relative_error"),
                     _figure(level.after, "relative_error")))
    return rows


def device_rows(manifest, table):
    """(largest batch size, rows with a header, sides): forward on each backend, with backward on the fastest; shares of the original's."""
    size = max(batch_sizes_of(table), default=None)
    names = [level.name for level in level_facts(manifest)]
    backends = list(dict.fromkeys(backend for name in names for backend in table["levels"].get(name, {})))
    rows = [("level", *backends, "fastest", "share", "with backward", "share")]
    for name in names:
        measured = table["levels"].get(name, {})
        cells = [measured.get(backend, {}).get(FORWARD, {}).get(str(size)) for backend in backends]
        forward, backward = (_fastest_and_share(table, name, direction, size) for direction in (FORWARD, BACKWARD))
        rows.append((name, *[f"{cell['median']:.4g}" if cell else UNKNOWN for cell in cells], *forward, *backward))
    return size, rows, "left " + "right " * (len(rows[0]) - 1)


def _fastest_and_share(table, name, direction, size):
    found, original = (fastest(table, each, direction, size) for each in (name, ORIGINAL))
    if not found:
        return UNKNOWN, UNKNOWN
    share = f"{100 * found[1]['median'] / original[1]['median']:.0f} %" if original else UNKNOWN
    return f"{found[1]['median']:.4g}", share


def _figure(measured, key):
    return UNKNOWN if measured is None else f"{measured[key]:.3f}"
