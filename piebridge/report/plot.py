"""Accuracy against training seconds, one line per method, as a PNG."""

import csv
import math
from pathlib import Path

from piebridge.core.errors import UserError
from piebridge.core.files import atomic_path
from piebridge.report.results import by_method, by_setting, describe_method, describe_setting

# Okabe and Ito's palette: told apart with every common kind of colour blindness. Markers repeat what the colour says.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw(runs, output):
    """Write a PNG with one panel per setting to `output` and return its path.

    Each line is a method: at each evaluation the mean over seeds of validation accuracy and of the training seconds so far;
    the band goes from the lowest to the highest seed. Raises UserError where there is nothing to draw, or no matplotlib.
    """
    figure_class, canvas_class = _matplotlib()
    panels = []
    for setting, members in by_setting(runs).items():
        methods = by_method(members)
        lines = [(describe_method(key, list(methods)), curve(group)) for key, group in methods.items()]
        panels.append((setting, [(label, points) for label, points in lines if points]))
    panels = [(setting, lines) for setting, lines in panels if lines]
    if not panels:
        raise UserError("nothing to draw: no finished run has a log.txt or metrics.csv with training seconds")
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = figure_class(figsize=(6.4 * columns, 4.2 * rows), dpi=130)
    canvas_class(figure)
    styles = _styles(panels)
    axes = [figure.add_subplot(rows, columns, number) for number in range(1, len(panels) + 1)]
    for panel_axes, (setting, lines) in zip(axes, panels):
        _draw_panel(panel_axes, setting, lines, styles)
    figure.tight_layout(pad=1.2)
    for panel_axes, (_, lines) in zip(axes, panels):  # only now do data have their final place on the page
        _label_lines(panel_axes, lines, styles)
    output = Path(str(output))
    with atomic_path(output) as temporary:
        figure.savefig(str(temporary), format="png")
    return output


def curve(runs):
    """Mean curve of runs that differ in their seed: [(seconds, mean accuracy, lowest, highest)], accuracies 0..1, seconds > 0."""
    series = [series for series in (read_series(run.folder) for run in runs) if series]
    points = []
    for entries in zip(*series):
        seconds = sum(entry[0] for entry in entries) / len(entries)
        accuracies = [entry[1] for entry in entries]
        if seconds > 0:
            points.append((seconds, sum(accuracies) / len(accuracies), min(accuracies), max(accuracies)))
    return points


def read_series(folder):
    """[(train seconds so far, validation accuracy)] of a run folder, from metrics.csv or else log.txt; [] without both."""
    metrics, log = folder / "metrics.csv", folder / "log.txt"
    try:
        if metrics.is_file():
            with open(str(metrics), newline="", encoding="utf-8") as stream:
                return [(float(row["train_seconds"]), float(row["val_accuracy"])) for row in csv.DictReader(stream)
                        if row["val_accuracy"] not in ("", "None")]
        if log.is_file():
            pairs = [line.split() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
            return [(float(seconds), float(accuracy)) for accuracy, seconds in pairs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: metrics.csv or log.txt cannot be read ({error}); remove the folder or run it again") from None
    return []


def _draw_panel(axes, setting, lines, styles):
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.12)  # room for the labels
    for label, points in lines:
        colour, marker = styles[label]
        seconds, mean, lowest, highest = (list(column) for column in zip(*points))
        axes.fill_between(seconds, _percent(lowest), _percent(highest), color=colour, alpha=0.15, linewidth=0)
        axes.plot(seconds, _percent(mean), color=colour, marker=marker, markersize=4, linewidth=1.6)
    axes.set_title(describe_setting(setting), fontsize=9, loc="left")
    axes.set_xlabel("training seconds (log scale)", fontsize=9)
    axes.set_ylabel("validation accuracy, %", fontsize=9)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelsize=8)
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label_lines(axes, lines, styles):
    """Name each line near its end, in its colour, where the name covers the fewest points and no other name."""
    points_drawn = axes.transData.transform([(point[0], 100 * point[1]) for _, points in lines for point in points])
    unit = axes.figure.dpi / 72.0  # pixels of a typographic point
    taken = []
    for label, points in lines:
        x, y = axes.transData.transform((points[-1][0], 100 * points[-1][1]))
        width, height = 5.6 * len(label) * unit, 10 * unit

        def cost(offset, x=x, y=y, width=width, height=height):
            box = _box(x + offset[0] * unit, y + offset[1] * unit, width, height)
            covered = sum(box[0] <= px <= box[2] and box[1] <= py <= box[3] for px, py in points_drawn)
            overlaps = sum(box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken)
            return covered + 100 * overlaps, abs(offset[0]) + abs(offset[1])

        right = 5 + 2.8 * len(label)  # the label's centre, so that it starts right of the end
        offset = min([(right, 0), (0, 11), (0, -11), (right, 9), (right, -9), (0, 22), (0, -22), (0, 33), (0, -33)], key=cost)
        taken.append(_box(x + offset[0] * unit, y + offset[1] * unit, width, height))
        axes.annotate(label, (points[-1][0], 100 * points[-1][1]), xytext=offset, textcoords="offset points", ha="center",
                      va="center", color=styles[label][0], fontsize=9, annotation_clip=False)


def _box(x, y, width, height):
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _styles(panels):
    """{label: (colour, marker)}: a method looks the same in every panel."""
    labels = list(dict.fromkeys(label for _, lines in panels for label, _ in lines))
    return {label: (COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]) for index, label in enumerate(sorted(labels))}


def _percent(values):
    return [100 * value for value in values]


def _matplotlib():
    """(Figure, canvas) without pyplot: no window, no state. Raises UserError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plot needs matplotlib: pip install matplotlib (it is also in the extra `plot`)") from None
    return Figure, FigureCanvasAgg
