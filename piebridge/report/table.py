"""The comparison table: one row per method, means over seeds, ratios to the two baselines."""

import csv
import io
import statistics
from dataclasses import dataclass
from typing import List, Optional, Tuple

from piebridge.core.files import write_text
from piebridge.report.results import by_method, by_setting, describe_method, describe_setting, left_out

SPREAD_NOTE = ("Mean +- sample standard deviation over n seeds; memory: the most of them.\n"
               "Seconds leave out evaluation, and the start of Python and torch (1 to 2 s, the same for all).\n"
               "Ratio: the baseline's seconds / this row's; above 1 is faster.")
COLUMNS = ("method", "n", "test accuracy %", "train seconds", "ratio to PET", "ratio to FTAll", "peak MiB",
           "trainable parameters")
CSV_COLUMNS = ("network", "dataset", "epochs", "device", "conditions", "data", "method", "pet", "variant", "n", "test_accuracy_mean",
               "test_accuracy_sd", "train_seconds_mean", "train_seconds_sd",
               "ratio_to_pet", "ratio_to_ftall", "peak_mib", "trainable_parameters")


@dataclass(frozen=True)
class Row:
    """One method in one setting. Pairs are (mean, sample standard deviation); None is what is not known."""

    setting: Tuple
    method: str
    pet: str
    variant: str
    n: int
    test_accuracy: Tuple[Optional[float], Optional[float]]
    train_seconds: Tuple[Optional[float], Optional[float]]
    ratio_to_pet: Optional[float]
    ratio_to_ftall: Optional[float]
    peak_mib: Optional[float]
    trainable_parameters: Optional[int]


def build_rows(runs: List) -> List[Row]:
    """Rows of all finished runs, setting by setting, slowest method first."""
    rows = []
    for setting, members in by_setting(runs).items():
        methods = by_method(members)
        seconds = {key: _mean_and_spread([run.train_seconds for run in group])[0] for key, group in methods.items()}
        group_rows = [_row(setting, key, group, seconds) for key, group in methods.items()]
        rows += sorted(group_rows, key=lambda row: -(row.train_seconds[0] or 0.0))
    return rows


def render_text(rows: List[Row], runs: List) -> str:
    """The table for a terminal, and below it the runs that do not count."""
    blocks = []
    for setting, members in _settings(rows):
        cells = [COLUMNS] + [_cells(row, members) for row in members]
        widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
        lines = [describe_setting(setting), ""]
        for line in cells:
            padded = [line[0].ljust(widths[0])] + [text.rjust(width) for text, width in zip(line[1:], widths[1:])]
            lines.append("  ".join(padded))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks + _notes(rows, runs))


def render_markdown(rows: List[Row], runs: List) -> str:
    """The same as Markdown, for documents."""
    blocks = []
    for setting, members in _settings(rows):
        lines = [f"**{describe_setting(setting)}**", "", "| " + " | ".join(COLUMNS) + " |"]
        lines.append("|---|" + "---:|" * (len(COLUMNS) - 1))
        lines += ["| " + " | ".join(_cells(row, members)).replace("+-", "±") + " |" for row in members]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks + [note.replace("+-", "±") for note in _notes(rows, runs)])


def write_csv(rows: List[Row], path: object) -> None:
    """The table as CSV with plain numbers (accuracies 0..1), `n/a` where unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        values = row.setting + (row.method, row.pet, row.variant, row.n) + row.test_accuracy + row.train_seconds + (
            row.ratio_to_pet, row.ratio_to_ftall, row.peak_mib, row.trainable_parameters)
        writer.writerow(["n/a" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in values])
    write_text(path, text.getvalue())


def _row(setting, key, group, seconds):
    method, pet, variant = key
    own = _mean_and_spread([run.train_seconds for run in group])
    return Row(
        setting=setting,
        method=method,
        pet=pet,
        variant=variant,
        n=len(group),
        test_accuracy=_mean_and_spread([run.test_accuracy for run in group]),
        train_seconds=own,
        ratio_to_pet=_ratio(_only(seconds, "PET", pet) or _only(seconds, "PET"), own[0]),
        ratio_to_ftall=_ratio(_only(seconds, "FTAll"), own[0]),
        peak_mib=_most([run.peak_mib for run in group]),
        trainable_parameters=_most([run.trainable_parameters for run in group]),
    )


def _only(seconds, method, pet=None):
    """The seconds of `method` (with a PET kind) if it was run in one way; which one to take is not ours to guess."""
    found = [value for (name, kind, _), value in seconds.items() if name == method and pet in (None, kind)]
    return found[0] if len(found) == 1 else None


def _ratio(baseline, own):
    return baseline / own if baseline is not None and own else None


def _mean_and_spread(values):
    """(mean, sample standard deviation); unknown where any value is, and no spread of a single run."""
    if not values or any(value is None for value in values):
        return None, None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def _most(values):
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _settings(rows):
    settings = list(dict.fromkeys(row.setting for row in rows))
    return [(setting, [row for row in rows if row.setting == setting]) for setting in settings]


def _cells(row, members):
    mean, spread = row.test_accuracy
    percent = (None if mean is None else 100 * mean, None if spread is None else 100 * spread)
    return (
        describe_method((row.method, row.pet, row.variant), [(other.method, other.pet, other.variant) for other in members]),
        str(row.n),
        _pair(percent, 1),
        _pair(row.train_seconds, 1),
        _times(row.ratio_to_pet),
        _times(row.ratio_to_ftall),
        "n/a" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
        "n/a" if row.trainable_parameters is None else f"{row.trainable_parameters:,}",
    )


def _pair(pair, digits):
    mean, spread = pair
    if mean is None:
        return "n/a"
    return f"{mean:,.{digits}f}" + ("" if spread is None else f" +- {spread:.{digits}f}")


def _times(ratio):
    return "n/a" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def _notes(rows, runs):
    skipped = left_out(runs)
    notes = [SPREAD_NOTE] if rows else ["No run has finished yet."]
    return notes + (["Not counted:\n" + "\n".join("* " + line for line in skipped)] if skipped else [])
