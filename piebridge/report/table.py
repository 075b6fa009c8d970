"""The comparison table: one row per method, means over seeds, ratios to the two baselines."""

import csv
import dataclasses
import io
import statistics
from dataclasses import dataclass
from typing import List, Optional, Tuple

from piebridge.core.files import write_text
from piebridge.report.results import by_folder, by_method, by_setting, describe_method, describe_setting, left_out

SPREAD_NOTE = ("Mean +- sample standard deviation over n seeds; memory: the most of them.\n"
               "Seconds leave out evaluation, and the start of Python and torch (1 to 2 s, the same for all).\n"
               "Ratio: the baseline's seconds / this row's; above 1 is faster.")
PHASES_NOTE = ("Energy: joules, where the device has a sensor. Phases: mean seconds by the clock, the longest first, those of a hundredth "
               "of the whole or more.")
COLUMNS = ("method", "n", "test accuracy %", "train seconds", "ratio to PET", "ratio to FTAll", "peak MiB",
           "trainable parameters")
DOCUMENT_COLUMNS = ("method", "n", "test accuracy %", "train seconds", "ratio to PET", "ratio to PET_fast", "ratio to FTAll", "peak MiB",
                    "energy J", "phases")
CSV_COLUMNS = ("network", "dataset", "epochs", "device", "conditions", "data", "method", "pet", "variant", "n", "test_accuracy_mean",
               "test_accuracy_sd", "train_seconds_mean", "train_seconds_sd",
               "ratio_to_pet", "ratio_to_ftall", "peak_mib", "trainable_parameters", "ratio_to_pet_fast", "energy_j_mean", "energy_j_sd")


@dataclass(frozen=True)
class Row:
    """One method in one setting. Pairs are (mean, sample standard deviation); None is what is not known.

    ratio_to_*: mean seconds of that baseline / mean seconds of this row. phases: ((name, mean seconds), ...), the longest first.
    """

    setting: Tuple
    method: str
    pet: str
    variant: str
    n: int
    test_accuracy: Tuple[Optional[float], Optional[float]]
    train_seconds: Tuple[Optional[float], Optional[float]]
    ratio_to_pet: Optional[float] = None
    ratio_to_ftall: Optional[float] = None
    peak_mib: Optional[float] = None
    trainable_parameters: Optional[int] = None
    ratio_to_pet_fast: Optional[float] = None
    energy_j: Tuple[Optional[float], Optional[float]] = (None, None)
    phases: Tuple = ()
    epochs: Optional[int] = None


def build_rows(runs: List, is_by_folder: bool = False) -> List[Row]:
    """Rows of all finished runs, setting by setting, slowest method first.

    is_by_folder: rows differ in more than the method, epochs included, and are named by the folder that holds their seeds.
    """
    rows = []
    for setting, members in by_setting(runs, is_by_folder).items():
        methods = by_folder(members) if is_by_folder else by_method(members)
        group_rows = with_ratios([_row(setting, key, group) for key, group in methods.items()])
        rows += sorted(group_rows, key=lambda row: -(row.train_seconds[0] or 0.0))
    return rows


def with_ratios(rows: List[Row]) -> List[Row]:
    """The rows of one setting with their ratios to the baselines among them."""
    seconds = {(row.method, row.pet, row.variant): row.train_seconds[0] for row in rows}
    return [dataclasses.replace(
        row,
        ratio_to_pet=_ratio(_only(seconds, "PET", row.pet) or _only(seconds, "PET"), row.train_seconds[0]),
        ratio_to_pet_fast=_ratio(_only(seconds, "PET_fast", row.pet) or _only(seconds, "PET_fast"), row.train_seconds[0]),
        ratio_to_ftall=_ratio(_only(seconds, "FTAll"), row.train_seconds[0])) for row in rows]


def render_text(rows: List[Row], runs: List) -> str:
    """The table for a terminal, and below it the runs that do not count."""
    blocks = []
    for setting, members in _settings(rows):
        blocks.append("\n".join([describe_setting(setting), ""] + aligned([COLUMNS] + [_cells(row, members, COLUMNS) for row in members])))
    return "\n\n".join(blocks + _notes(rows, runs))


def aligned(cells: List) -> List[str]:
    """Lines of equally long rows of text: the first column to the left, the others to the right, two spaces between them."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join([line[0].ljust(widths[0])] + [text.rjust(width) for text, width in zip(line[1:], widths[1:])]) for line in cells]


def render_markdown(rows: List[Row], runs: List, columns: Tuple[str, ...] = COLUMNS) -> str:
    """The same as Markdown, for documents; `columns` are of COLUMNS and DOCUMENT_COLUMNS."""
    blocks = []
    for setting, members in _settings(rows):
        lines = [f"**{describe_setting(setting)}**", "", "| " + " | ".join(columns) + " |"]
        lines.append("|---|" + "".join("---|" if column == "phases" else "---:|" for column in columns[1:]))
        lines += ["| " + " | ".join(_cells(row, members, columns)).replace("+-", "±") + " |" for row in members]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks + [note.replace("+-", "±") for note in _notes(rows, runs, columns)])


def write_csv(rows: List[Row], path: object) -> None:
    """The table as CSV with plain numbers (accuracies 0..1), `n/a` where unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        values = row.setting + (row.method, row.pet, row.variant, row.n) + row.test_accuracy + row.train_seconds + (
            row.ratio_to_pet, row.ratio_to_ftall, row.peak_mib, row.trainable_parameters, row.ratio_to_pet_fast) + row.energy_j
        writer.writerow(["n/a" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in values])
    write_text(path, text.getvalue())


def _row(setting, key, group):
    method, pet, variant = key
    return Row(
        setting=setting,
        method=method,
        pet=pet,
        variant=variant,
        n=len(group),
        test_accuracy=_mean_and_spread([run.test_accuracy for run in group]),
        train_seconds=_mean_and_spread([run.train_seconds for run in group]),
        peak_mib=_most([run.peak_mib for run in group]),
        trainable_parameters=_most([run.trainable_parameters for run in group]),
        energy_j=_mean_and_spread([run.energy_j for run in group]),
        phases=_mean_phases([dict(run.phases) for run in group]),
        epochs=group[0].epochs,
    )


def _mean_phases(group):
    """((phase, mean seconds), ...), the longest first; a run without a phase spent nothing in it. Unknown where a run has none at all."""
    if not all(group):
        return ()
    names = {name for phases in group for name in phases}
    means = {name: statistics.mean(phases.get(name, 0.0) for phases in group) for name in names}
    return tuple(sorted(means.items(), key=lambda item: (-item[1], item[0])))


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


def _cells(row, members, columns):
    mean, spread = row.test_accuracy
    percent = (None if mean is None else 100 * mean, None if spread is None else 100 * spread)
    texts = {
        "method": describe_method((row.method, row.pet, row.variant), [(other.method, other.pet, other.variant) for other in members]),
        "epochs": "n/a" if row.epochs is None else str(row.epochs),
        "n": str(row.n),
        "test accuracy %": _pair(percent, 1),
        "train seconds": _pair(row.train_seconds, 1),
        "ratio to PET": times(row.ratio_to_pet),
        "ratio to PET_fast": times(row.ratio_to_pet_fast),
        "ratio to FTAll": times(row.ratio_to_ftall),
        "peak MiB": "n/a" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
        "trainable parameters": "n/a" if row.trainable_parameters is None else f"{row.trainable_parameters:,}",
        "energy J": "-" if row.energy_j[0] is None else _pair(row.energy_j, 1),
        "phases": _phase_words(row.phases),
    }
    return tuple(texts[column] for column in columns)


def _phase_words(phases):
    total = sum(seconds for _, seconds in phases)
    shown = [f"{name} {seconds:,.0f}" if seconds >= 100 else f"{name} {seconds:.3g}" for name, seconds in phases if seconds >= total / 100]
    return ", ".join(shown) or "n/a"


def _pair(pair, digits):
    mean, spread = pair
    if mean is None:
        return "n/a"
    return f"{mean:,.{digits}f}" + ("" if spread is None else f" +- {spread:.{digits}f}")


def times(ratio):
    return "n/a" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def _notes(rows, runs, columns=COLUMNS):
    skipped = left_out(runs)
    notes = [SPREAD_NOTE + ("\n" + PHASES_NOTE if "phases" in columns else "")] if rows else ["No run has finished yet."]
    return notes + (["Not counted:\n" + "\n".join("* " + line for line in skipped)] if skipped else [])
