"""Collecting run records, the comparison table and the plot, on run folders written by the code that runs write them with."""

import csv
import json

import pytest
from PIL import Image
from report_examples import DEVICE, write_run

from piebridge.core.errors import UserError
from piebridge.report.plot import curve, draw, read_series
from piebridge.report.results import collect, finished, left_out
from piebridge.report.table import DOCUMENT_COLUMNS, build_rows, render_markdown, render_text, write_csv


@pytest.fixture
def three_methods(tmp_path):
    for seed, (fast, slow, full) in enumerate([(4.0, 100.0, 200.0), (5.0, 120.0, 240.0), (6.0, 140.0, 280.0)]):
        tail = f"seed_{seed}" if seed else "."
        write_run(tmp_path / "ours" / tail, "ours", seed, accuracy=0.90 + 0.01 * seed, seconds=fast)
        write_run(tmp_path / "PET" / tail, "PET", seed, accuracy=0.88 + 0.01 * seed, seconds=slow)
        write_run(tmp_path / "FTAll" / tail, "FTAll", seed, accuracy=0.92, seconds=full, pet="all", parameters=3400000)
    return tmp_path


def test_means_spreads_and_ratios(three_methods):
    rows = {row.method: row for row in build_rows(collect(three_methods))}
    ours = rows["ours"]
    assert ours.n == 3
    assert ours.test_accuracy == pytest.approx((0.91, 0.01))  # the population's deviation would be 0.0082
    assert ours.train_seconds == pytest.approx((5.0, 1.0))
    assert ours.ratio_to_pet == pytest.approx(120 / 5)
    assert ours.ratio_to_ftall == pytest.approx(240 / 5)
    assert rows["FTAll"].ratio_to_pet == pytest.approx(0.5)
    assert rows["FTAll"].ratio_to_ftall == 1.0


def test_text_is_aligned_and_slowest_first(three_methods):
    runs = collect(three_methods)
    lines = render_text(build_rows(runs), runs).splitlines()
    assert lines[0] == "efficientnet_lite0 on Clipart10, 4 epochs, Board CPU, batch 4, 2 threads"
    table = lines[2:6]
    assert len({len(line) for line in table}) == 1
    assert [line.split()[0] for line in table] == ["method", "FTAll", "PET", "ours"]
    assert table[3].split() == ["ours", "3", "91.0", "+-", "1.0", "5.0", "+-", "1.0", "24.0x", "48.0x", "900", "12,810"]
    assert "sample standard deviation" in lines[7]
    assert "Not counted" not in "\n".join(lines)


def test_markdown_has_a_cell_per_column(three_methods):
    runs = collect(three_methods)
    text = render_markdown(build_rows(runs), runs)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {9}
    assert "| ours | 3 | 91.0 ± 1.0 | 5.0 ± 1.0 | 24.0x | 48.0x | 900 | 12,810 |" in table


def test_csv_has_plain_numbers(three_methods, tmp_path):
    write_csv(build_rows(collect(three_methods)), tmp_path / "table.csv")
    with open(tmp_path / "table.csv", newline="") as stream:
        rows = {row["method"]: row for row in csv.DictReader(stream)}
    assert float(rows["ours"]["test_accuracy_mean"]) == pytest.approx(0.91)
    assert float(rows["ours"]["train_seconds_sd"]) == pytest.approx(1.0)
    assert rows["FTAll"]["trainable_parameters"] == "3400000"
    assert rows["PET"]["device"] == "Board CPU"


def test_energy_phases_and_the_ratio_to_the_same_backend(three_methods):
    for seed, (energy, frozen) in enumerate([(10.0, 3.0), (20.0, 5.0)]):
        write_run(three_methods / f"fast_{seed}", "PET_fast", seed, seconds=60.0, energy=energy,
                  phases={"frozen": frozen, "probe": 0.03, "trainable": 300.0})
    rows = {row.method: row for row in build_rows(collect(three_methods))}
    assert rows["PET_fast"].energy_j == pytest.approx((15.0, 50 ** 0.5))
    assert rows["PET_fast"].phases == (("trainable", 300.0), ("frozen", 4.0), ("probe", 0.03))
    assert (rows["ours"].energy_j, rows["ours"].phases) == ((None, None), ())
    assert rows["ours"].ratio_to_pet_fast == pytest.approx(12.0) and rows["PET"].ratio_to_pet_fast == pytest.approx(0.5)
    text = render_markdown(list(rows.values()), [], DOCUMENT_COLUMNS)
    assert "| PET_fast | 2 | 90.0 ± 0.0 | 60.0 ± 0.0 | 2.00x | 1.00x | 4.00x | 900 | 15.0 ± 7.1 | trainable 300, frozen 4 |" in text
    assert "| ours | 3 | 91.0 ± 1.0 | 5.0 ± 1.0 | 24.0x | 12.0x | 48.0x | 900 | - | n/a |" in text
    assert "Energy: joules" in text


def test_unknown_values_are_named_so_and_never_zero(tmp_path):
    write_run(tmp_path / "ours", "ours", accuracy=None, seconds=None, peak_mib=None, parameters=None)
    runs = collect(tmp_path)
    rows = build_rows(runs)
    assert render_text(rows, runs).splitlines()[3].split() == ["ours", "1"] + ["n/a"] * 6
    write_csv(rows, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().splitlines()[1].endswith("ours,head,,1" + ",n/a" * 11)


def test_a_table_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "table.csv", tmp_path / "file" / "deeper" / "table.csv"):
        with pytest.raises(UserError, match="is no folder, and cannot become one; choose another name"):
            write_csv([], place)


def test_only_success_counts_and_the_rest_is_listed(three_methods):
    write_run(three_methods / "extra" / "a", "ours", seed=3, status="failed", accuracy=0.1)
    write_run(three_methods / "extra" / "b", "ours", seed=4, status="cancelled")
    write_run(three_methods / "extra" / "c", "ours", seed=5, status="running")
    (three_methods / "extra" / "d").mkdir()
    (three_methods / "extra" / "d" / "run.json").write_text('{"status": "succ')
    runs = collect(three_methods)
    assert {row.method: row.n for row in build_rows(runs)}["ours"] == 3
    text = render_text(build_rows(runs), runs)
    for name, reason in (("a", "failed"), ("b", "cancelled"), ("c", "running"), ("d", "unreadable")):
        assert f"* {three_methods / 'extra' / name}: {reason}" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10 ** 400, "many", True, [], {}])
def test_a_number_that_cannot_be_is_not_known(tmp_path, value):
    path = write_run(tmp_path / "ours", "ours") / "run.json"
    record = json.loads(path.read_text())
    record["results"].update(dict.fromkeys(["test_accuracy", "train_seconds", "peak_mib", "trainable_parameters", "energy_j"], value))
    record["results"]["phases"] = {"frozen": value}
    path.write_text(json.dumps(record))
    runs = collect(tmp_path)
    rows = build_rows(runs)
    assert render_text(rows, runs).splitlines()[3].split() == ["ours", "1"] + ["n/a"] * 6
    assert "| - | n/a |" in render_markdown(rows, runs, DOCUMENT_COLUMNS)


def test_a_record_that_is_only_brackets_is_unreadable(tmp_path):
    write_run(tmp_path / "ours", "ours")
    (tmp_path / "ours" / "run.json").write_text("[" * 100000)
    assert [run.status for run in collect(tmp_path)] == ["unreadable"]


def test_nothing_finished_still_gives_a_table(tmp_path):
    write_run(tmp_path / "ours", "ours", status="running")
    runs = collect(tmp_path)
    assert "No run has finished yet" in render_text(build_rows(runs), runs)


def test_other_epochs_devices_and_data_are_not_averaged(three_methods):
    write_run(three_methods / "long", "PET", seed=9, seconds=1e6, epochs=99)
    write_run(three_methods / "board", "PET", seed=9, seconds=1e6, device={"type": "cuda", "name": "TX2"})
    write_run(three_methods / "data", "PET", seed=9, seconds=1e6, dataset="DTD")
    write_run(three_methods / "batch", "PET", seed=9, seconds=1e6, loader={"batch_size": 32})
    write_run(three_methods / "threads", "PET", seed=9, seconds=1e6, device=dict(DEVICE, threads=1))
    rows = build_rows(collect(three_methods))
    assert sorted(row.n for row in rows if row.method == "PET") == [1, 1, 1, 1, 1, 3]
    assert [row.ratio_to_pet for row in rows if row.method == "ours"] == [pytest.approx(24.0)]


def test_other_images_under_the_same_name_are_not_averaged(three_methods):
    write_run(three_methods / "mine", "PET", seed=9, seconds=1e6, images="22bb")
    assert sorted(row.n for row in build_rows(collect(three_methods)) if row.method == "PET") == [1, 3]


def test_records_that_are_kept_count_only_where_they_are_asked_for(three_methods):
    write_run(three_methods / "measured" / "board", "PET", seed=9)
    assert {row.method: row.n for row in build_rows(collect(three_methods))}["PET"] == 3
    assert [run.seed for run in collect(three_methods / "measured")] == [9]


def test_a_seed_that_was_run_twice_counts_once(three_methods):
    older = write_run(three_methods / "again", "ours", seed=1, seconds=9000.0, ended="2026-11-29T10:00:00Z")
    runs = collect(three_methods)
    assert len(finished(runs)) == 9
    assert left_out(runs) == [f"{older}: a newer run of seed 1 counts"]


def test_another_learning_rate_is_a_row_of_its_own(three_methods):
    write_run(three_methods / "rate", "ours", seed=7, seconds=1.0, optimizer={"lr": 0.01})
    runs = collect(three_methods)
    assert {row.variant: row.n for row in build_rows(runs) if row.method == "ours"} == {"optimizer.lr=0.001": 3, "optimizer.lr=0.01": 1}
    assert "ours (optimizer.lr=0.01)" in render_text(build_rows(runs), runs)


def test_pet_kinds_are_rows_of_their_own(three_methods):
    write_run(three_methods / "norm", "ours", pet="norm", seconds=50.0)
    write_run(three_methods / "norm_PET", "PET", pet="norm", seconds=500.0)
    runs = collect(three_methods)
    rows = {(row.method, row.pet): row for row in build_rows(runs)}
    assert rows["ours", "norm"].ratio_to_pet == pytest.approx(10.0)
    assert rows["ours", "head"].ratio_to_pet == pytest.approx(24.0)
    assert rows["FTAll", "all"].ratio_to_pet is None  # against which of the two kinds is not ours to guess
    assert "ours (norm)" in render_text(build_rows(runs), runs)


def test_a_folder_without_runs_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match="no run.json here or below; train something first"):
        collect(tmp_path)


def test_series_come_from_metrics_or_from_the_published_log(tmp_path):
    folder = write_run(tmp_path, "ours", seconds=8.0)
    from_metrics = read_series(folder)
    assert [seconds for seconds, _ in from_metrics] == [2.0, 4.0, 6.0, 8.0]
    (folder / "metrics.csv").unlink()
    for read, expected in zip(read_series(folder), from_metrics):
        assert read == pytest.approx(expected, abs=1e-4)
    (folder / "log.txt").write_text("0.5 1.0\nnonsense\n")
    with pytest.raises(UserError, match="log.txt cannot be read"):
        read_series(folder)
    (folder / "log.txt").unlink()
    assert read_series(folder) == []


def test_the_curve_is_the_mean_over_seeds(tmp_path):
    for seed, (accuracy, seconds) in enumerate([(0.8, 8.0), (0.9, 16.0)]):
        write_run(tmp_path / str(seed), "ours", seed, accuracy=accuracy, seconds=seconds)
    seconds, mean, lowest, highest = curve(collect(tmp_path))[-1]
    assert seconds == pytest.approx(12.0)
    assert highest - lowest == pytest.approx(0.1)
    assert mean == pytest.approx((lowest + highest) / 2)


def test_the_plot_is_a_png_with_ink_in_each_methods_colour(three_methods, tmp_path):
    pytest.importorskip("matplotlib")
    path = draw(collect(three_methods), tmp_path / "plot.png")
    with Image.open(path) as image:
        assert image.format == "PNG" and min(image.size) > 400
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= colours


def test_nothing_to_draw_is_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    folder = write_run(tmp_path, "ours")
    for name in ("metrics.csv", "log.txt"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="nothing to draw"):
        draw(collect(tmp_path), tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()
