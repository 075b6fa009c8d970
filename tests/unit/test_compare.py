"""`piebridge compare`: fresh runs, written by the code that runs write them with, beside published and other expected results."""

import csv
import io
import json
import math
from pathlib import Path

import pytest
from report_examples import write_run

from piebridge.cli import main
from piebridge.compare_verb import run
from piebridge.core.errors import UserError
from piebridge.report.compare import compare, render_text, verdict
from piebridge.report.expected import read_expected
from piebridge.report.results import collect
from piebridge.report.table import build_rows, write_csv

EXPECTED = Path(__file__).resolve().parent.parent.parent / "res" / "expected"
PAPER = EXPECTED / "jetson_tx2" / "paper.csv"
NETWORKS = ("resnet50", "mobilenet_v3_large", "vit_b_16")
DATASETS = ("Caltech101", "Caltech256", "DogsVsCats", "DTD")
METHODS = ("FTAll", "PET", "PruneTrain", "ElasticTrainer", "ours")


@pytest.fixture(scope="module")
def paper():
    """{(network, data set, method): row} of the published table."""
    expected = read_expected(PAPER)
    return {each.row.setting[:2] + (each.row.method,): each.row for each in expected}


def geometric_mean(values):
    return math.exp(sum(math.log(value) for value in values) / len(values))


def test_the_published_table_is_whole_and_gives_the_published_summary(paper):
    """The paper states, over its 12 cells: 1.77 x over PET and 4.26 x over FT-All in geometric mean, at most 2.52 x and 6.6 x."""
    assert sorted(paper) == sorted((network, data, method) for network in NETWORKS for data in DATASETS for method in METHODS)
    ours = [row for (_, _, method), row in paper.items() if method == "ours"]
    over_pet, over_ftall = [row.ratio_to_pet for row in ours], [row.ratio_to_ftall for row in ours]
    assert round(geometric_mean(over_pet), 2) == 1.77 and round(geometric_mean(over_ftall), 2) == 4.26
    assert round(max(over_pet), 2) == 2.52 and round(max(over_ftall), 1) == 6.6
    assert {row.setting[2] for row in paper.values()} == {12}
    row = paper["vit_b_16", "Caltech256", "FTAll"]
    assert (row.train_seconds[0] / 3600, row.test_accuracy[0]) == pytest.approx((17.01, 0.8561))


def test_the_released_row_gives_its_stated_speed_ups():
    rows = {each.row.method: each.row for each in read_expected(EXPECTED / "jetson_tx2" / "artifact.csv")}
    assert (round(rows["ours"].ratio_to_pet, 2), round(rows["ours"].ratio_to_ftall, 2)) == (1.48, 4.95)


def test_the_configurations_of_the_cells_state_what_the_table_has(paper):
    """Cost and expected accuracy at the head of each shipped configuration, in hours and percent as the paper prints them."""
    from piebridge.config import build_config, read_yaml
    from piebridge.run_paths import list_configs

    seen = 0
    for path in list_configs().values():
        config = build_config(read_yaml(path), {}, str(path))
        row = paper.get((config.network, config.data, config.method))
        if row:
            text = path.read_text(encoding="utf-8")
            assert f"at batch 4: {row.train_seconds[0] / 3600:.2f} h\n" in text, path
            assert f"test accuracy: {100 * row.test_accuracy[0]:.2f} % (" in text, path
            assert (config.epochs, config.loader.batch_size, config.loader.augment) == (12, 4, "crop_flip"), path
            assert row.pet in ("", config.pet.kind), path
            seen += 1
    assert seen >= 36


def test_the_table_of_this_machine_is_that_of_its_records(tmp_path):
    write_csv(build_rows(collect(EXPECTED.parent / "measured" / "x86_2_cores")), tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == (EXPECTED / "x86_2_cores" / "table.csv").read_text()


CELL = """network,dataset,epochs,device,conditions,method,pet,test_accuracy_mean,train_seconds_mean,tolerance_points
efficientnet_lite0,Clipart10,4,Board,batch 4,FTAll,all,0.92,1000,1
efficientnet_lite0,Clipart10,4,Board,batch 4,PET,head,0.90,400,
efficientnet_lite0,Clipart10,4,Board,batch 4,PruneTrain,,0.91,900,2
efficientnet_lite0,Clipart10,4,Board,batch 4,ours,head,0.8705,250,2
efficientnet_lite0,DTD,4,Board,batch 4,PET,head,0.5,40,2
"""


@pytest.fixture
def cell(tmp_path):
    """(folder of fresh runs, file of expected results)."""
    path = tmp_path / "expected.csv"
    path.write_text(CELL)
    runs = tmp_path / "runs"
    for seed, accuracy in enumerate((0.88, 0.90)):
        write_run(runs / f"PET_{seed}", "PET", seed, accuracy=accuracy, seconds=100.0)
        write_run(runs / f"ours_{seed}", "ours", seed, accuracy=accuracy + 0.001, seconds=20.0)
    write_run(runs / "FTAll", "FTAll", pet="all", accuracy=0.9, seconds=300.0)
    return runs, path


def by_method(folder, path, **options):
    return {record["method"]: record for record in json.loads(run(folder, path, form="json", **options))
            if record["dataset"] == "Clipart10"}


def test_accuracies_and_ratios_side_by_side(cell):
    found = by_method(*cell)
    ours = found["ours"]
    assert (ours["n"], ours["test_accuracy"], ours["expected_test_accuracy"]) == (2, pytest.approx(0.891), 0.8705)
    assert (ours["difference_points"], ours["tolerance_points"], ours["verdict"]) == (pytest.approx(2.05), 2.0, "better")
    assert (ours["ratio_to_pet"], ours["expected_ratio_to_pet"]) == (pytest.approx(5.0), pytest.approx(1.6))
    assert (ours["ratio_to_ftall"], ours["expected_ratio_to_ftall"]) == (pytest.approx(15.0), pytest.approx(4.0))
    assert (found["PET"]["verdict"], found["PET"]["tolerance_points"], found["PET"]["difference_points"]) == ("within", 2.0, -1.0)
    assert (found["FTAll"]["verdict"], found["FTAll"]["difference_points"]) == ("outside", -2.0)  # one point is stated
    absent = found["PruneTrain"]
    assert (absent["verdict"], absent["n"], absent["test_accuracy"], absent["ratio_to_pet"]) == ("not run", 0, None, None)
    assert absent["expected_ratio_to_ftall"] == pytest.approx(1000 / 900)


def test_a_tolerance_of_ones_own_goes_before_the_stated_ones(cell):
    assert {name: each["verdict"] for name, each in by_method(*cell, tolerance_points=2.05).items()} == {
        "FTAll": "within", "PET": "within", "PruneTrain": "not run", "ours": "within"}


@pytest.mark.parametrize("accuracy, expected, tolerance, word", [
    (0.9396, 0.9196, 2.0, "within"), (0.9397, 0.9196, 2.0, "better"), (0.8996, 0.9196, 2.0, "within"), (0.8995, 0.9196, 2.0, "outside"),
    (0.5, 0.5, 0.0, "within")])
def test_the_tolerance_itself_is_within(tmp_path, accuracy, expected, tolerance, word):
    """Exactly: 0.9396 - 0.9196 is a trifle more than 0.02 in binary."""
    write_run(tmp_path / "run", "PET", accuracy=accuracy)
    path = tmp_path / "expected.csv"
    path.write_text("network,dataset,method,test_accuracy_mean,train_seconds_mean,tolerance_points\n"
                    f"efficientnet_lite0,Clipart10,PET,{expected},10,{tolerance}\n")
    assert by_method(tmp_path, path)["PET"]["verdict"] == word


def test_what_is_not_known_has_no_verdict(tmp_path, cell):
    assert verdict(None, 2.0) == "unknown"
    write_run(tmp_path / "unknown", "ours", accuracy=None, seconds=None)
    found = by_method(tmp_path / "unknown", cell[1])["ours"]
    assert (found["verdict"], found["difference_points"], found["ratio_to_pet"]) == ("unknown", None, None)


def test_text_names_both_machines_and_what_was_left(cell):
    folder, path = cell
    write_run(folder / "short", "ours", epochs=1, accuracy=0.1)
    write_run(folder / "norm", "ours", pet="norm", accuracy=0.1)
    write_run(folder / "fast", "PET_fast", accuracy=0.1)
    write_run(folder / "failed", "PET", seed=7, status="failed")
    text = run(folder, path)
    assert text.splitlines()[0] == "here:      efficientnet_lite0 on Clipart10, 4 epochs, Board CPU, batch 4, 2 threads"
    assert text.splitlines()[1] == "expected:  efficientnet_lite0 on Clipart10, 4 epochs, Board, batch 4"
    table = text.splitlines()[3:8]
    assert len({len(line) for line in table}) == 1
    assert table[4].split() == ["ours", "2", "89.1", "+-", "1.4", "87.05", "+2.0", "2", "better", "5.00x", "1.60x", "15.0x", "4.00x"]
    assert table[3].split() == ["PruneTrain", "-", "-", "91.00", "-", "2", "not", "run", "-", "0.44x", "-", "1.11x"]
    assert "Not run: efficientnet_lite0 on DTD\n" in text
    for line in ("ours (head), efficientnet_lite0 on Clipart10, 1 epoch, Board CPU, batch 4, 2 threads: epochs 1, not 4",
                 "ours (norm), efficientnet_lite0 on Clipart10, 4 epochs, Board CPU, batch 4, 2 threads: pet.kind norm, not head",
                 "PET_fast (head), efficientnet_lite0 on Clipart10, 4 epochs, Board CPU, batch 4, 2 threads: no expected result",
                 f"{folder / 'failed'}: failed"):
        assert f"* {line}\n" in text + "\n"


def test_each_machine_has_a_table_of_its_own(cell):
    folder, path = cell
    write_run(folder / "other", "PET", seconds=9.0, accuracy=0.9, device={"type": "cuda", "name": "Another"})
    cells = compare(build_rows(collect(folder)), read_expected(path))
    assert [(each.setting and each.setting[3]) for each in cells] == ["Board CPU", "Another", None]
    verdicts = [[each.verdict for each in found.comparisons] for found in cells[1:]]
    assert verdicts == [["not run", "within", "not run", "not run"], ["not run"]]
    assert render_text(cells).count("here:  ") == 2


def test_the_table_of_another_machine_is_an_expected_result(cell, tmp_path):
    """Its hash of the images is stated, so a set of other images under the same name is not compared."""
    folder, _ = cell
    write_csv(build_rows(collect(folder)), tmp_path / "other" / "table.csv")
    assert {each["verdict"] for each in by_method(folder, tmp_path / "other").values()} == {"within"}
    write_run(tmp_path / "mine", "PET", images="22bb")
    assert "PET (head), efficientnet_lite0 on Clipart10, 4 epochs, Board CPU, batch 4, 2 threads: images 22bb, not 11aa" in run(
        tmp_path / "mine", tmp_path / "other")


def test_csv_has_the_records_that_json_has(cell):
    folder, path = cell
    rows = list(csv.DictReader(io.StringIO(run(folder, path, form="csv"))))
    for row, record in zip(rows, json.loads(run(folder, path, form="json"))):
        for name, value in record.items():
            assert row[name] == "n/a" if value is None else row[name] == (f"{value:.6g}" if isinstance(value, float) else str(value))
    assert len(rows) == 5 and rows[-1]["verdict"] == "not run"


def test_the_verb_ends_well_whatever_the_verdicts(cell, capsys):
    folder, path = cell
    for options, start in (([], "here:  "), (["--csv"], "network,dataset,"), (["--json", "--tolerance", "0"], "[\n  {")):
        assert main(["compare", str(folder), str(path)] + options) == 0
        output = capsys.readouterr()
        assert output.out.startswith(start) and output.err == ""


@pytest.mark.parametrize("options, message", [
    (["--tolerance", "-1"], "--tolerance -1: percentage points, from 0 to 100"),
    (["--tolerance", "nan"], "--tolerance nan: percentage points, from 0 to 100"),
    (["--csv", "--json"], "argument --json: not allowed with argument --csv; see `piebridge compare --help`"),
    (["more"], "unexpected word 'more'; see `piebridge compare --help`")])
def test_bad_usage(cell, capsys, options, message):
    folder, path = cell
    assert main(["compare", str(folder), str(path)] + options) == 2
    assert capsys.readouterr() == ("", f"piebridge: {message}\n")


def test_nothing_to_compare(cell, tmp_path, capsys):
    folder, path = cell
    (tmp_path / "empty").mkdir()
    for words, message in (([tmp_path / "nowhere", path], "nowhere: no such folder; name one that holds run folders"),
                           ([tmp_path / "empty", path], "empty: no run.json here or below; train something first"),
                           ([folder, tmp_path / "nowhere.csv"], "nowhere.csv: no such file or folder of expected results"),
                           ([folder, tmp_path / "empty"], "empty: no CSV file here or below; give expected results, such as res/expected")):
        assert main(["compare"] + [str(word) for word in words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


HEADER = "network,dataset,method,test_accuracy_mean,train_seconds_mean"


@pytest.mark.parametrize("text, message", [
    ("", "e.csv: lacks the column network; expected results are a table as `piebridge table` writes it"),
    ("network,dataset,method,test_accuracy_mean\nn,d,m,0.5\n", "e.csv: lacks the column train_seconds_mean"),
    (f"{HEADER},tolerance_point\n", "e.csv: unknown column 'tolerance_point' (did you mean 'tolerance_points'?)"),
    (f"{HEADER},n,n\n", "e.csv: the column n is given twice"),
    (f"{HEADER}\n", "e.csv: holds no row of expected results"),
    (f"{HEADER}\nn,d,m,0.5,9\nn,d,m,91.96,9\n", "e.csv:3: test_accuracy_mean: 91.96 is above 1; accuracies go from 0 to 1"),
    (f"{HEADER}\nn,d,m,0.5,fast\n", "e.csv:2: train_seconds_mean: 'fast' is not a number of at least 0"),
    (f"{HEADER}\nn,d,m,nan,9\n", "e.csv:2: test_accuracy_mean: 'nan' is not a number of at least 0"),
    (f"{HEADER}\nn,d,m,0.5,inf\n", "e.csv:2: train_seconds_mean: 'inf' is not a number of at least 0"),
    (f"{HEADER},epochs\nn,d,m,0.5,9,1.5\n", "e.csv:2: epochs: '1.5' is not a whole number of at least 0"),
    (f"{HEADER},tolerance_points\nn,d,m,0.5,9,200\n", "e.csv:2: tolerance_points: 200 is above 100"),
    (f"{HEADER}\nn,d, ,0.5,9\n", "e.csv:2: method is empty"),
    (f"{HEADER}\nn,d,m,0.5\n", "e.csv:2: has fewer cells than the first line has names"),
    (f"{HEADER}\nn,d,m,0.5,9,8\n", "e.csv:2: has more cells than the first line has names"),
    (f"{HEADER}\nn,d,m,0.5,9\nn,d,m,0.6,9\n", "e.csv:3: m with n on d is given twice"),
    (f'{HEADER}\n"n,d,m,0.5,9\n', "e.csv: not CSV: unexpected end of data"),
    (b"\xff\xfe\x00\x01", "e.csv: not CSV: 'utf-8' codec can't decode byte"),
])
def test_bad_expected_results_are_named_with_their_line(tmp_path, text, message):
    path = tmp_path / "e.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        read_expected(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_not_known_may_be_left_empty(tmp_path):
    (tmp_path / "e.csv").write_text(f"{HEADER},pet,epochs\nn,d,m,n/a,,,\n")
    (expected,) = read_expected(tmp_path / "e.csv")
    assert (expected.row.test_accuracy[0], expected.row.train_seconds[0], expected.row.setting[2]) == (None, None, None)
    assert expected.tolerance_points == 2.0
