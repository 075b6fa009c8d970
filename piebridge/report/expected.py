"""Expected results: tables as `piebridge table` writes them, of another machine or of a publication, read from CSV."""

import csv
import math
from collections import namedtuple
from pathlib import Path

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.report.table import CSV_COLUMNS, Row, with_ratios

NEEDED = ("network", "dataset", "method", "test_accuracy_mean", "train_seconds_mean")
TOLERANCE = "tolerance_points"  # the one column that a table does not have
DEFAULT_TOLERANCE = 2.0  # percentage points of test accuracy

Expected = namedtuple("Expected", "row tolerance_points file")  # a table's Row, points, path


def read_expected(path):
    """[Expected] of a CSV file, or of every CSV file in a folder and below, in the files' order.

    Accuracies are 0..1. Columns are those of `piebridge table` and `tolerance_points`; only NEEDED have to be there, and `n/a` or an
    empty cell is what is not known. Ratios are computed from the seconds, within a file and a setting. UserError names file and line.
    """
    path = Path(str(path))
    files = sorted(path.glob("**/*.csv")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: no CSV file here or below; give expected results, such as res/expected/jetson_tx2")
    return [expected for file in files for expected in _read_file(file)]


def _read_file(path):
    try:
        with open(str(path), newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, strict=True, restkey="")
            _check_columns(path, reader.fieldnames or [])
            entries = [_entry(values, f"{path}:{reader.line_num}") for values in reader]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder of expected results") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not CSV: {error}") from None
    if not entries:
        raise UserError(f"{path}: holds no row of expected results")
    by_setting, tolerances = {}, {}
    for row, tolerance, line in entries:
        key = row.setting + (row.method, row.pet, row.variant)
        if key in tolerances:
            raise UserError(f"{line}: {row.method} with {row.setting[0]} on {row.setting[1]} is given twice")
        tolerances[key] = tolerance
        by_setting.setdefault(row.setting, []).append(row)
    return [Expected(row, tolerances[row.setting + (row.method, row.pet, row.variant)], path)
            for rows in by_setting.values() for row in with_ratios(rows)]


def _check_columns(path, columns):
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise UserError(f"{path}: lacks the column {missing[0]}; expected results are a table as `piebridge table` writes it")
    known = CSV_COLUMNS + (TOLERANCE,)
    for position, name in enumerate(columns):
        if name not in known:
            raise UserError(f"{path}: unknown column '{name}'{closest(name, known)}")
        if name in columns[:position]:
            raise UserError(f"{path}: the column {name} is given twice")


def _entry(values, line):
    """(Row without ratios, tolerance in points, line) of one line's cells."""
    if "" in values or None in values.values():
        raise UserError(f"{line}: has {'more' if '' in values else 'fewer'} cells than the first line has names")
    for name in ("network", "dataset", "method"):
        if not values[name].strip():
            raise UserError(f"{line}: {name} is empty")

    def text(name):
        return values.get(name, "").strip()

    def number(name, most=math.inf):
        return _number(text(name), name, most, line)

    epochs, n, tolerance = number("epochs"), number("n"), number(TOLERANCE, 100)
    setting = (text("network"), text("dataset"), None if epochs is None else int(epochs), text("device") or "n/a", text("conditions"),
               text("data"))
    row = Row(setting, text("method"), text("pet"), text("variant"), 1 if n is None else int(n),
              (number("test_accuracy_mean", 1), number("test_accuracy_sd", 1)), (number("train_seconds_mean"), number("train_seconds_sd")))
    return row, DEFAULT_TOLERANCE if tolerance is None else tolerance, line


def _number(text, name, most, line):
    if text in ("", "n/a"):
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    is_whole = name in ("epochs", "n")
    if not 0 <= value < math.inf or (is_whole and value != int(value)):
        raise UserError(f"{line}: {name}: '{text}' is not a {'whole ' if is_whole else ''}number of at least 0")
    if value > most:
        hint = "; accuracies go from 0 to 1" if most == 1 else ""
        raise UserError(f"{line}: {name}: {text} is above {most}{hint}")
    return value
