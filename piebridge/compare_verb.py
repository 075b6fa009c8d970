"""`piebridge compare`: finished runs beside expected results, as text, CSV or JSON."""

import json

from piebridge.core.errors import UserError
from piebridge.report.compare import compare, not_compared, records, render_csv, render_text
from piebridge.report.expected import read_expected
from piebridge.report.results import collect, left_out
from piebridge.report.table import build_rows


def run(folder, expected_path, tolerance_points=None, form="text"):
    """What the verb prints. form: text, csv or json; tolerance_points: in place of those that the expected results state.

    UserError for a tolerance out of range, a folder without runs, and expected results that cannot be read.
    """
    if tolerance_points is not None and not 0 <= tolerance_points <= 100:
        raise UserError(f"--tolerance {tolerance_points:g}: percentage points, from 0 to 100")
    runs = collect(folder)
    expected, rows = read_expected(expected_path), build_rows(runs)
    cells = compare(rows, expected, tolerance_points)
    if form == "json":
        return json.dumps(records(cells), indent=2, ensure_ascii=False)
    if form == "csv":
        return render_csv(cells).rstrip("\n")
    return render_text(cells, not_compared(rows, expected) + left_out(runs))
