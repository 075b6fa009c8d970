"""Fresh results beside expected ones: accuracy within a stated tolerance, and speed-ups, which need no common device."""

import csv
import io
from collections import namedtuple

from piebridge.report.results import describe_method, describe_setting
from piebridge.report.table import aligned, times

COLUMNS = ("method", "n", "accuracy %", "expected", "points", "tolerance", "verdict", "ratio to PET", "expected", "ratio to FTAll",
           "expected")
# what each comparison is as a record, in CSV and JSON
RECORD = ("network", "dataset", "method", "pet", "variant", "verdict", "n", "test_accuracy", "test_accuracy_sd", "expected_test_accuracy",
          "difference_points", "tolerance_points", "ratio_to_pet", "expected_ratio_to_pet", "ratio_to_ftall", "expected_ratio_to_ftall",
          "epochs", "device", "conditions", "expected_epochs", "expected_device", "expected_conditions", "expected_file")
NOTE = ("Points: accuracy here - expected, in percentage points. Verdict: within the tolerance, better, outside (worse), not run.\n"
        "Ratio: seconds of the baseline / of this row, each on its own machine; seconds of different machines are not compared.")

# cell: expected results of one setting beside one setting that was run (None: nothing of it was run); comparisons: of each method
Cell = namedtuple("Cell", "expected_setting setting comparisons")
# expected: Expected; row: a table's Row or None; difference_points: float or None; tolerance_points: float
Comparison = namedtuple("Comparison", "expected row difference_points tolerance_points verdict")


def compare(rows, expected, tolerance_points=None):
    """[Cell]: every expected result beside what was run of it. tolerance_points: in place of those that the results state."""
    cells = []
    for expected_setting in dict.fromkeys((each.file, each.row.setting) for each in expected):
        members = [each for each in expected if (each.file, each.row.setting) == expected_setting]
        found = [row for row in rows if any(is_same_experiment(row, each.row) for each in members)]
        for setting in list(dict.fromkeys(row.setting for row in found)) or [None]:
            here = [row for row in found if row.setting == setting]
            cells.append(Cell(expected_setting[1], setting, [
                comparison for each in members for comparison in _comparisons(each, here, tolerance_points)]))
    return cells


def is_same_experiment(row, expected):
    """Whether a Row is what an expected Row is of. What the expected one leaves open may be anything, so may device and conditions."""
    return _names(row) == _names(expected) and not _disagreements(row, expected)


def verdict(difference_points, tolerance_points):
    """`within`, `better` or `outside`, for a difference in percentage points; `unknown` for None."""
    if difference_points is None:
        return "unknown"
    if abs(difference_points) <= tolerance_points:
        return "within"
    return "better" if difference_points > 0 else "outside"


def not_compared(rows, expected):
    """One line for each Row that no expected result is of, with the reason."""
    lines = []
    for row in rows:
        if not any(is_same_experiment(row, each.row) for each in expected):
            reasons = [", ".join(_disagreements(row, each.row)) for each in expected if _names(each.row) == _names(row)]
            lines.append(f"{row.method} ({row.pet}), {describe_setting(row.setting)}: "
                         f"{' or '.join(dict.fromkeys(reasons)) or 'no expected result'}")
    return lines


def render_text(cells, left_out=()):
    """The comparisons for a terminal; below them what was not run at all, and the lines of `left_out`."""
    blocks = []
    for cell in cells:
        if cell.setting is not None:
            keys = [_key(each) for each in cell.comparisons]
            lines = [f"here:      {describe_setting(cell.setting)}", f"expected:  {describe_setting(cell.expected_setting)}", ""]
            blocks.append("\n".join(lines + aligned([COLUMNS] + [_cells(each, keys) for each in cell.comparisons])))
    notes = [NOTE] if blocks else []
    waiting = {}
    for cell in cells:
        if cell.setting is None:
            waiting.setdefault(cell.expected_setting[0], {})[cell.expected_setting[1]] = None
    notes += ["Not run: " + "; ".join(f"{network} on {', '.join(datasets)}" for network, datasets in waiting.items())] if waiting else []
    return "\n\n".join(blocks + notes + (["Not compared:\n" + "\n".join("* " + line for line in left_out)] if left_out else []))


def render_csv(cells):
    """All comparisons as CSV with plain numbers (accuracies 0..1), `n/a` where unknown; ends with a line's end."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(RECORD)
    for record in records(cells):
        writer.writerow(["n/a" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in record.values()])
    return text.getvalue()


def records(cells):
    """[{name of RECORD: value}], one for each comparison; None is what is not known."""
    return [_record(comparison) for cell in cells for comparison in cell.comparisons]


def _record(comparison):
    expected, row = comparison.expected.row, comparison.row
    accuracy, spread = row.test_accuracy if row else (None, None)
    network, dataset, epochs, device, conditions, _ = row.setting if row else expected.setting[:2] + (None,) * 4
    method, pet, variant = _key(comparison)
    values = (network, dataset, method, pet or None, variant or None, comparison.verdict, row.n if row else 0, accuracy, spread,
              expected.test_accuracy[0], comparison.difference_points, comparison.tolerance_points,
              row.ratio_to_pet if row else None, expected.ratio_to_pet, row.ratio_to_ftall if row else None, expected.ratio_to_ftall,
              epochs, device, conditions) + expected.setting[2:5] + (str(comparison.expected.file),)
    return dict(zip(RECORD, values))


def _comparisons(expected, rows, tolerance_points):
    """A Comparison for each of `rows` that `expected` is about; one that was not run where there is none."""
    tolerance = expected.tolerance_points if tolerance_points is None else tolerance_points
    found = []
    for row in rows:
        if is_same_experiment(row, expected.row):
            difference = _difference_points(row.test_accuracy[0], expected.row.test_accuracy[0])
            found.append(Comparison(expected, row, difference, tolerance, verdict(difference, tolerance)))
    return found or [Comparison(expected, None, None, tolerance, "not run")]


def _difference_points(accuracy, expected):
    """Rounded, so that 0.9396 - 0.9196 are the 2 points that they are, and not a trifle more."""
    return None if accuracy is None or expected is None else round(100 * (accuracy - expected), 6)


def _names(row):
    return row.setting[:2] + (row.method,)  # network, data set, method


def _disagreements(row, expected):
    """In words, what an expected Row states and this Row of the same network, data set and method does not have."""
    stated = (("epochs", row.setting[2], expected.setting[2]), ("images", row.setting[5], expected.setting[5]),
              ("pet.kind", row.pet, expected.pet))
    return [f"{name} {found}, not {wanted}" for name, found, wanted in stated if wanted not in (None, "") and found != wanted]


def _key(comparison):
    """(method, pet, variant) of what was run, or else of what is expected."""
    row = comparison.row or comparison.expected.row
    return row.method, row.pet, row.variant


def _cells(comparison, keys):
    expected, row = comparison.expected.row, comparison.row
    difference = comparison.difference_points
    return (
        describe_method(_key(comparison), keys),
        str(row.n) if row else "-",
        _percent(*row.test_accuracy) if row else "-",
        _percent(expected.test_accuracy[0], None, 2),
        "-" if difference is None else f"{round(difference, 1) + 0.0:+.1f}",
        f"{comparison.tolerance_points:g}",
        comparison.verdict,
        times(row.ratio_to_pet) if row else "-", times(expected.ratio_to_pet),
        times(row.ratio_to_ftall) if row else "-", times(expected.ratio_to_ftall),
    )


def _percent(mean, spread, digits=1):
    if mean is None:
        return "n/a"
    return f"{100 * mean:.{digits}f}" + ("" if spread is None else f" +- {100 * spread:.{digits}f}")
