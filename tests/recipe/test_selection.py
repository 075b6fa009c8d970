"""The methods that choose samples or features, through the real command line: what they leave behind, and a kill in the middle."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from piebridge.core.safetensors_file import read_safetensors

CHECKOUT = Path(__file__).resolve().parents[2]
METHODS = ("SelectiveBackprop", "InfoBatch", "Head2Toe", "LST")


def command(method, images, output, *overrides):
    return [sys.executable, "-m", "piebridge", "train", f"efficientnet_lite0/Clipart10/{method}", f"data={images}", f"output={output}",
            "epochs=3", "checkpoint.seconds=0.0"] + list(overrides)


def train(environment, method, images, output, *overrides):
    return subprocess.run(command(method, images, output, *overrides), env=environment, cwd=str(CHECKOUT), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=300)


@pytest.fixture(scope="module")
def finished(environment, images, tmp_path_factory):
    """The folder of a finished run, by method; made when it is first asked for."""
    folders = {}

    def run(method):
        if method not in folders:
            folders[method] = tmp_path_factory.mktemp("runs") / method
            done = train(environment, method, images, folders[method])
            assert done.returncode == 0, done.stderr
        return folders[method]

    return run


def rows_of(folder):
    with open(str(folder / "metrics.csv")) as stream:
        return list(csv.DictReader(stream))


def tensors_of(folder):
    return {name: tensor.numpy() for name, tensor in read_safetensors(folder / "trainable.safetensors")[0].items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_trains_and_its_file_is_the_network_that_was_tested(finished, method):
    from piebridge.core.networks import load_network

    folder = finished(method)
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "success" and record["method"] == method
    assert record["results"]["test_accuracy"] >= (0.5 if method != "LST" else 0.3)
    shares = [float(row["selected_share"]) for row in rows_of(folder)]
    if method == "SelectiveBackprop":
        assert all(0.2 < share < 0.9 for share in shares)
    elif method == "InfoBatch":  # nothing is known in the first epoch, and the last runs on everything
        assert shares[0] == shares[2] == 1 and 0.5 < shares[1] < 1
    else:
        assert shares == [1, 1, 1]
    tuned, trained = load_network(str(folder / "tuned.safetensors")).state_dict(), tensors_of(folder)
    for name, tensor in trained.items():
        assert np.array_equal(tuned[name].numpy(), tensor), name
    for name, tensor in load_network("efficientnet_lite0").state_dict().items():
        if not name.startswith("classifier."):
            assert np.array_equal(tuned[name].numpy(), tensor.numpy()), name
    if method == "Head2Toe":
        mask = trained["head2toe.mask"]
        assert set(mask) == {0.0, 1.0} and mask.sum() == round(0.1 * len(mask)) and trained["classifier.weight"].shape == (3, len(mask))


@pytest.mark.parametrize("method", ["SelectiveBackprop", "InfoBatch", "Head2Toe"])
def test_killed_and_resumed_gives_the_same_weights(environment, finished, images, tmp_path, method):
    folder = tmp_path / "killed"
    process = subprocess.Popen(command(method, images, folder), env=environment, cwd=str(CHECKOUT), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (folder / "metrics.csv").exists() and time.time() < deadline:
        assert process.poll() is None, "the run ended before its first epoch did"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = train(environment, method, images, folder)
    assert done.returncode == 0 and "going on from epoch" in done.stderr, done.stderr
    for name, tensor in tensors_of(folder).items():
        assert np.array_equal(tensor, tensors_of(finished(method))[name]), name


def test_audited_lots_and_the_unbiased_gate(environment, images, tmp_path):
    """The last block trained through two levels by lot; every third batch of the proxy is audited, and falling short gives it up."""
    done = train(environment, "ours", images, tmp_path / "out", "pet.kind=last_k", "pet.last_k=1", "loader.augment=flip", "step=eager",
                 "proxies.levels=['96px']", "proxies.use=all", "proxies.calibration_images=16", "router.kind=random", "router.lowers=true",
                 "router.audit=0.5", "router.audit_floor=0.999", "gate.kind=unbiased", "gate.full_epochs=0.34", "backend.name=eager")
    assert done.returncode == 0, done.stderr
    assert "level 1 is given up: its gradients have a mean cosine of " in done.stderr
    rows = rows_of(tmp_path / "out")
    assert 0 < float(rows[0]["mean_level"]) and float(rows[-1]["mean_level"]) == 0
    assert float(rows[0]["selected_share"]) < 1 and float(rows[-1]["selected_share"]) == 1
