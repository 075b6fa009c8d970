"""The engine through the real command line, on EfficientNet-Lite0 with small images."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = ("image_size=64", "batch_size=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs `piebridge` with a cache of its own and one thread, in a folder of its own."""
    folder = tmp_path_factory.mktemp("engine")
    environment = dict(os.environ, PIEBRIDGE_CACHE=str(folder / "cache"), OMP_NUM_THREADS="1", PYTHONPATH=str(CHECKOUT),
                       PIEBRIDGE_DATASETS=str(CHECKOUT / "datasets"))

    def run_here(*words):
        done = subprocess.run([sys.executable, "-m", "piebridge", *words], env=environment, cwd=str(folder), capture_output=True,
                              text=True, timeout=600)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    run_here.folder = folder
    return run_here


def test_show_says_what_is_trained_and_every_byte(run):
    done = run("engine", "show", "efficientnet_lite0", "scheme=last_block", *SMALL, "--out", "memory.png")
    assert done.returncode == 0, done.stderr
    for words in ("efficientnet_lite0, scheme last_block: trains ", "backward", "peak of the step", "weights, frozen", "arena",
                  "nodes; the backward"):
        assert words in done.stdout, words
    assert (run.folder / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_search_compile_and_bench(run):
    found = run("engine", "search", "efficientnet_lite0", "data=Clipart10", "--memory", "2MiB", "batches=2", *SMALL, "--out", "lite0.yaml")
    assert found.returncode == 0, found.stderr
    assert "planned extra memory" in found.stdout
    scheme = yaml.safe_load((run.folder / "lite0.yaml").read_text())
    assert scheme["name"] == "searched"
    compiled = run("engine", "compile", "efficientnet_lite0", "scheme=lite0.yaml", "classes=10", "candidates=reference", *SMALL,
                      "--out", "step.safetensors")
    assert compiled.returncode == 0 and "compiled in" in compiled.stdout, compiled.stderr
    assert (run.folder / "step.safetensors").stat().st_size > 1000
    figures = run("engine", "bench", "efficientnet_lite0", "scheme=lite0.yaml", "classes=10", "turns=1", "candidates=reference", *SMALL,
                  "--json")
    assert figures.returncode == 0, figures.stderr
    (row,) = json.loads(figures.stdout)
    assert row["network"] == "efficientnet_lite0"
    for name in ("eager_full_ms", "eager_scheme_ms", "step_ms", "pytorch_full_extra_mib", "masked_full_extra_mib", "sparse_extra_mib",
                 "planned_peak_mib", "measured_peak_mib"):
        assert row[name] > 0, name
    assert row["sparse_extra_mib"] <= 2 and abs(row["planned_peak_mib"] / row["measured_peak_mib"] - 1) < 0.05


@pytest.mark.parametrize("words, message", [
    (("show",), "engine show: name one network, such as efficientnet_lite0 (given: none)"),
    (("show", "efficientnet_lite1"), "efficientnet_lite1"),
    (("show", "efficientnet_lite0", "scheme=last_blok"), "last_block"),
    (("search", "efficientnet_lite0"), "engine search efficientnet_lite0: give --memory SIZE, such as 64MiB, and data=NAME|DIR"),
    (("search", "efficientnet_lite0", "data=Clipart10", "--memory", "much"), "'much' is not a size"),
    (("search", "efficientnet_lite0", "data=Clipart10", "--memory", "1KiB", "batches=1", *SMALL), "KiB"),
    (("compile", "efficientnet_lite0"), "engine compile efficientnet_lite0: give --out FILE"),
    (("bench", "efficientnet_lite0", "turn=3"), "turns"),
    (("dance",), "invalid choice")])
def test_bad_usage_is_one_line(run, words, message):
    done = run("engine", *words)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("piebridge: ")]) == 1, done.stderr
