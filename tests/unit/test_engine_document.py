"""The tables of doc/engine.md are those of the records, and nothing in them is typed by hand."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_tables_are_those_of_the_records():
    """Whoever changes a record runs `python doc/experiments/engine_report.py res/measured/x86_2_cores_engine`."""
    path = ROOT / "doc" / "experiments" / "engine_report.py"
    specification = importlib.util.spec_from_file_location("engine_report", str(path))
    report = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(report)
    table = report.render(ROOT / "res" / "measured" / "x86_2_cores_engine")
    assert table.count("\n") > 8 and table in (ROOT / "doc" / "engine.md").read_text(encoding="utf-8")
