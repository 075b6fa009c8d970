"""A proxy set's figure and table for the documents, from its manifest alone: time against alignment, for each device.

    python doc/experiments/forge_report.py SET [DOCUMENT]     default doc/proxies.md

What lies between `<!-- forge_report NAME -->` and `<!-- end of forge_report NAME -->` in the document, NAME being the set folder's name, is
replaced; a document without these lines gets them at its end. The figure is written beside the document, as proxies_NAME.svg.
"""

import re
import statistics
import sys
from pathlib import Path

from piebridge.core.errors import UserError
from piebridge.core.files import atomic_path, write_text
from piebridge.core.proxy_manifest import read_manifest
from piebridge.forge.latency import BACKWARD, FORWARD
from piebridge.forge.profiling import WORDS, judgement
from piebridge.forge.set_facts import batch_sizes_of, level_facts, points_of
from piebridge.forge.show_set import LEVEL_HEADER, LEVEL_SIDES, device_rows, level_rows
from piebridge.forge.text_table import markdown_table
from piebridge.forge_settings import describe_forge_keys

DOCUMENT = Path(__file__).resolve().parent.parent / "proxies.md"
STYLES = {"float": ("#0072B2", "o"), "bf16": ("#009E73", "^"), "int8": ("#D55E00", "s")}  # Okabe and Ito's colours
ORIGINAL_STYLE = ("#000000", "*")


def report(folder, document=DOCUMENT):
    """Write the figure and the document's section; returns both paths."""
    folder, document = Path(str(folder)).resolve(), Path(str(document))
    manifest = read_manifest(folder)
    if not manifest["latency"]:
        raise UserError(f"{folder}: not measured on any device yet; run: piebridge forge --profile {folder}")
    figure = document.with_name(f"proxies_{folder.name}.svg")
    draw(manifest, figure)
    start, end = (f"<!-- {word}forge_report {folder.name} -->" for word in ("", "end of "))
    section = "\n".join([start, *section_lines(manifest, folder.name, figure.name), end])
    text = document.read_text(encoding="utf-8") if document.is_file() else "# Proxies\n"
    if start in text and end in text:
        text = re.sub(re.escape(start) + ".*?" + re.escape(end), lambda match: section, text, flags=re.DOTALL)
    else:
        text = text.rstrip("\n") + "\n\n" + section + "\n"
    write_text(document, text)
    return document, figure


def section_lines(manifest, name, figure):
    """Lines of Markdown: the figure, the table of levels, and one table for each device."""
    errors = {level.name: level.error for level in level_facts(manifest)}
    held_out = manifest["facts"].get("images", {}).get("held_out", "some")
    lines = [f"Made by `python doc/experiments/forge_report.py proxynetworks/{name}` from the set's manifest.", "",
             f"![Milliseconds per image against relative error at the head's tap, one panel for each device and direction]({figure})", "",
             f"The set: `{command(manifest, name)}`. On disk: {megabytes([manifest['original']])} MB the original, "
             f"{megabytes(manifest['proxies'])} MB what all proxies together have beside it.", "",
             f"At the head's tap, means over {held_out} held-out images: cosine and relative error, before and after alignment.", "",
             markdown_table([LEVEL_HEADER] + level_rows(manifest), LEVEL_SIDES)]
    for device, table in manifest["latency"].items():
        size, rows, sides = device_rows(manifest, table)
        versions = ", ".join(f"{package} {version}" for package, version in table["versions"].items() if version)
        lines += ["", f"**{device}**, {table['device']['threads']} threads, {versions}; batch {size}, milliseconds per image, medians of "
                  f"{_repeats(table, size)} interleaved calls, with interquartile ranges of {_spread(table, size)}.", "",
                  markdown_table(rows, sides)]
        sentences = judgement(table, errors)
        lines += [""] + [f"* {sentence}" for sentence in sentences] if sentences else []
    return lines


def megabytes(entries):
    return f"{sum(entry['bytes'] for entry in entries) / 1e6:.1f}"


def command(manifest, name):
    """The command that makes the set, with the settings that are not the defaults."""
    defaults = {key: default for key, default, _ in describe_forge_keys()}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in manifest["facts"].get("settings", {}).items()}
    words = [f"{key}={','.join(value) if isinstance(value, tuple) else value}" for key, value in given.items()
             if key != "overwrite" and value != defaults.get(key)]
    return " ".join([f"piebridge forge {manifest['original'].get('name', 'NETWORK')} --images DIR --out proxynetworks/{name}", *words])


def _cells(table, size):
    return [cells[str(size)] for measured in table["levels"].values() for directions in measured.values()
            for cells in directions.values() if str(size) in cells]


def _repeats(table, size):
    found = sorted({cell["repeats"] for cell in _cells(table, size)})
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _spread(table, size):
    """"up to 20 %, half of them up to 4 %"."""
    shares = sorted(100 * cell["iqr"] / cell["median"] for cell in _cells(table, size))
    return f"up to {shares[-1]:.0f} %, half of them up to {statistics.median(shares):.0f} %"


def draw(manifest, path):
    """An SVG with a panel for each device and direction: time (log scale) against relative error at the head's tap, every level by name."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the figure needs matplotlib: pip install 'piebridge[plot]'") from None
    levels = {level.name: level for level in level_facts(manifest)}
    errors = {name: level.error for name, level in levels.items()}
    panels = [(device, direction, size, points_of(table, errors, direction, size)) for device, table in manifest["latency"].items()
              for direction in (FORWARD, BACKWARD) for size in batch_sizes_of(table)[-1:]]
    panels = [panel for panel in panels if panel[3]]
    if not panels:
        raise UserError("nothing to draw: the set's facts have no alignment, or its latency tables no times")
    with matplotlib.rc_context({"svg.hashsalt": "piebridge", "svg.fonttype": "none"}):  # the same bytes each time
        figure = Figure(figsize=(6.4, 4.2 * len(panels)))
        FigureCanvasSVG(figure)
        for number, panel in enumerate(panels, start=1):
            _draw_panel(figure.add_subplot(len(panels), 1, number), *panel, levels)
        figure.tight_layout(pad=1.2)
        with atomic_path(path) as temporary:
            figure.savefig(str(temporary), format="svg", metadata={"Date": None, "Creator": None})


def _draw_panel(axes, device, direction, size, points, levels):
    axes.set_xscale("log")
    axes.margins(x=0.15, y=0.1)
    shown = set()
    for point in sorted(points, key=lambda each: -each.milliseconds):
        kind = "original" if point.error == 0 else levels[point.name].precision
        colour, marker = STYLES.get(kind, ORIGINAL_STYLE)
        axes.errorbar(point.milliseconds, point.error, xerr=2 * point.deviation, color=colour, marker=marker, markersize=6, linewidth=1,
                      linestyle="none", label=None if kind in shown else kind)
        axes.annotate(point.name, (point.milliseconds, point.error), xytext=(5, 3), textcoords="offset points", fontsize=7, color=colour)
        shown.add(kind)
    axes.set_title(f"{device}: {WORDS[direction]}, batch {size}", fontsize=9, loc="left")
    axes.set_xlabel("ms per image on the fastest backend (log scale; bars: two deviations of the median)", fontsize=8)
    axes.set_ylabel("relative error at the head's tap", fontsize=8)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="both", labelsize=7)
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=7, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main(arguments):
    if not 1 <= len(arguments) <= 2:
        sys.exit(__doc__)
    try:
        for path in report(*arguments):
            print(path)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
