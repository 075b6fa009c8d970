"""The tables of a document: what is between its marks comes from records, and from nowhere else."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from report_examples import write_run

from piebridge.cli import main
from piebridge.core.errors import UserError
from piebridge.report.results_document import render_document, update_document

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "doc" / "results.md"
END = "<!-- end of records -->"


def test_the_results_are_those_of_the_records():
    """Whoever changes a table by hand, or a record, has to run `piebridge table --document doc/results.md`."""
    text = RESULTS.read_text(encoding="utf-8")
    assert render_document(text, RESULTS) == text
    assert len(re.findall("<!-- records(?: by folder)?:", text)) == 3
    assert all(f"## {name}\n" in text for name in ("Cacheable", "Not cacheable", "Hybrid"))


def test_one_command_makes_them(tmp_path):
    shutil.copytree(str(ROOT / "res" / "measured"), str(tmp_path / "res" / "measured"))
    text = RESULTS.read_text(encoding="utf-8")
    (tmp_path / "doc").mkdir()
    (tmp_path / "doc" / "results.md").write_text("".join(line + "\n" for line in text.splitlines() if not line.startswith("| ")),
                                                 encoding="utf-8")
    command = [sys.executable, "-m", "piebridge", "table", "--document", "doc/results.md"]
    done = subprocess.run(command, cwd=str(tmp_path), env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"doc/results.md\n"
    assert (tmp_path / "doc" / "results.md").read_text(encoding="utf-8") == text


@pytest.fixture
def document(tmp_path):
    write_run(tmp_path / "res" / "a run" / "ours", "ours", seconds=10.0)
    write_run(tmp_path / "res" / "b" / "PET", "PET", seconds=50.0)
    path = tmp_path / "doc" / "results.md"
    path.parent.mkdir()
    path.write_text(f"# Mine\n\n<!-- records: '../res/a run' ../res/b ../res -->\nold | lines\n{END}\n\nwords\n\n"
                    f"<!-- records: -->\n{END}\nmore words\n")
    return path


def test_tables_are_made_where_they_are_marked_and_nothing_else_changes(document, capsys):
    assert main(["table", "--document", str(document)]) == 0
    assert capsys.readouterr().out == f"{document}\n"
    first, second = document.read_text(encoding="utf-8").split("words\n\n")
    assert first.startswith("# Mine\n\n<!-- records: '../res/a run' ../res/b ../res -->\n**efficientnet_lite0 on Clipart10, 4 epochs")
    assert "| ours | 1 | 90.0 | 10.0 | 5.00x | n/a | n/a | 900 | - | n/a |" in first and "old" not in first
    assert first.count("| PET |") == 1, "a run that two folders hold counts once"
    assert second == f"<!-- records: -->\nNot measured yet.\n{END}\nmore words\n"


def test_writing_twice_changes_nothing(document):
    written = update_document(document).read_bytes()
    before = document.stat().st_mtime_ns
    assert update_document(document).read_bytes() == written and document.stat().st_mtime_ns == before


def test_rows_by_folder_may_differ_in_their_epochs(tmp_path):
    for name, epochs, seconds in (("PET_fast", 12, 60.0), ("PET_fast_short", 4, 20.0), ("ours", 5, 10.0)):
        for seed in (0, 1):
            method = name.replace("_short", "")
            write_run(tmp_path / "res" / name / f"seed_{seed}", method, seconds=seconds, seed=seed, epochs=epochs)
    path = tmp_path / "results.md"
    text = render_document(f"<!-- records by folder: res -->\n{END}\n", path)
    assert text.startswith("<!-- records by folder: res -->\n**efficientnet_lite0 on Clipart10, ")
    assert "epochs, " not in text.splitlines()[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    shown = [dict(zip(rows[0], row)) for row in rows[1:]]
    assert [(row["method"], row["epochs"], row["n"], row["ratio to PET_fast"]) for row in shown] == [
        ("PET_fast", "12", "2", "1.00x"), ("PET_fast_short", "4", "2", "3.00x"), ("ours", "5", "2", "6.00x")]
    assert render_document(text, path) == text


def test_folders_are_relative_to_the_document(document, monkeypatch, tmp_path):
    update_document(document)
    text = document.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path / "doc")
    assert render_document(text, Path("results.md")) == text


@pytest.mark.parametrize("text, message", [
    ("no marks\n", "d.md: has no table to write; mark its place with a line `<!-- records: FOLDER ... -->` and a line"),
    ("<!-- records: -->\n", "d.md: a line `<!-- records: FOLDER ... -->` lacks its line `<!-- end of records -->`"),
    (f"<!-- records: -->\n<!-- records: -->\n{END}\n", "d.md: a line `<!-- records: FOLDER ... -->` lacks its line"),
    (f"<!-- records: nowhere -->\n{END}\n", "nowhere: no such folder of records"),
    (f"<!-- records: 'a -->\n{END}\n", "d.md: records: 'a: a quote is not closed"),
    (f"<!-- records: . -->\n{END}\n", "no run.json here or below"),
])
def test_what_a_document_lacks_is_said_and_leaves_it_alone(tmp_path, text, message):
    path = tmp_path / "d.md"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        update_document(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_text() == text


def test_records_of_runs_that_have_not_finished_are_refused(document):
    write_run(document.parent.parent / "res" / "c", "PET_fast", status="cancelled")
    with pytest.raises(UserError, match="res/c: cancelled; a document shows finished runs: finish it, or move it away"):
        update_document(document)


def test_bad_usage(tmp_path, capsys):
    assert main(["table", "--document", str(tmp_path / "nowhere.md")]) == 2
    assert capsys.readouterr().err == f"piebridge: {tmp_path / 'nowhere.md'}: cannot be read: No such file or directory\n"
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe")
    assert main(["table", "--document", str(tmp_path / "binary.md")]) == 2
    assert "binary.md: cannot be read: it is not UTF-8 text" in capsys.readouterr().err
    for words in (["res"], ["--markdown"], ["output=x.csv"]):
        assert main(["table", "--document", "doc/results.md"] + words) == 2
        assert "--document FILE: the document names the folders itself" in capsys.readouterr().err
