"""The method Sparse through the real command line: what it changes, a kill in the middle, a scheme of parts, a cache."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from piebridge.core.safetensors_file import read_safetensors

pytest.importorskip("torch.fx.experimental.proxy_tensor", reason="the engine needs a newer PyTorch")
CHECKOUT = Path(__file__).resolve().parents[2]
SCHEME = "channels: magnitude\nweights:\n  blocks.6.0.conv_pw: 1/4\n  blocks.6.0.conv_dw: 1/8\n  conv_head: 1\n"


def command(images, output, *overrides):
    return [sys.executable, "-m", "piebridge", "train", "efficientnet_lite0/Clipart10/Sparse", f"data={images}", f"output={output}",
            "epochs=3", "checkpoint.seconds=0.0", "backend.name=eager"] + list(overrides)


def train(environment, images, output, *overrides):
    return subprocess.run(command(images, output, *overrides), env=environment, cwd=str(CHECKOUT), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=300)


@pytest.fixture(scope="module")
def whole(environment, images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = train(environment, images, folder, f"pet.scheme={SCHEME}")
    assert done.returncode == 0, done.stderr
    return folder


def tensors_of(folder, name="trainable"):
    return {key: tensor.numpy() for key, tensor in read_safetensors(folder / f"{name}.safetensors")[0].items()}


def test_a_scheme_of_parts_changes_those_and_nothing_else(whole):
    from piebridge.core.networks import load_network

    record = json.loads((whole / "run.json").read_text())
    assert record["status"] == "success" and record["method"] == "Sparse" and record["results"]["test_accuracy"] >= 0.5
    assert record["plan"]["scheme"]["text"].startswith("weights:") and record["plan"]["compiled"]["seconds"] > 0
    assert record["plan"]["scheme"]["tensors"]["conv_head.weight"] == "whole"
    parts = json.loads((whole / "checkpoint" / "decisions.json").read_text())["values"]["parts"]
    assert [(key, part and (part[0], len(part[1]))) for key, part in parts.items()] == [
        ("blocks.6.0.conv_pw.weight", (1, 48)), ("blocks.6.0.conv_dw.weight", (0, 144)), ("conv_head.weight", None)]
    assert record["results"]["trainable_parameters"] == 48 * 1152 + 144 * 9 + 320 * 1280 + 3 * 1281
    original, tuned = load_network("efficientnet_lite0").state_dict(), load_network(str(whole / "tuned.safetensors")).state_dict()
    assert list(tuned) == list(original)
    for name, tensor in tuned.items():
        if name.startswith("classifier."):
            continue
        changed = (tensor != original[name]).numpy()
        assert changed.any() == (name in parts), name
        if parts.get(name):
            dim, channels = parts[name]
            axes = tuple(axis for axis in range(changed.ndim) if axis != dim)
            assert set(np.flatnonzero(changed.any(axis=axes))) <= set(channels), name
            part = tensors_of(whole)[name + "_part"]
            assert np.array_equal(tensor.numpy().take(channels, axis=dim), part)


def test_killed_and_resumed_gives_the_same_weights(environment, whole, images, tmp_path):
    folder = tmp_path / "killed"
    process = subprocess.Popen(command(images, folder, f"pet.scheme={SCHEME}"), env=environment, cwd=str(CHECKOUT),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (folder / "metrics.csv").exists() and time.time() < deadline:
        assert process.poll() is None, "the run ended before its first epoch did"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = train(environment, images, folder, f"pet.scheme={SCHEME}")
    assert done.returncode == 0 and "going on from epoch" in done.stderr, done.stderr
    for name, tensor in tensors_of(whole).items():
        assert np.array_equal(tensors_of(folder)[name], tensor), name


def test_the_eager_step_and_a_cache_give_nearly_the_same(environment, whole, images, tmp_path):
    """Adam's first steps follow the sign of a gradient, so roundings show: a few numbers in a thousand may differ."""
    done = train(environment, images, tmp_path / "eager", f"pet.scheme={SCHEME}", "step=eager", "cache.kind=features")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "eager" / "run.json").read_text())["plan"]
    assert plan["cache"]["kind"] == "features" and "compiled" not in plan
    for name, tensor in tensors_of(whole).items():
        other = tensors_of(tmp_path / "eager")[name]
        assert other.shape == tensor.shape and np.mean(np.abs(other - tensor) > 1e-4) < 0.01, name


@pytest.mark.parametrize("overrides, words", [
    (["pet.scheme=last_blok"], "last_blok: no such scheme (did you mean 'last_block'?)"),
    (["pet.kind=head"], "pet.kind=head contradicts"),
    (["gate.kind=loss"], "step=compiled: gate.kind=loss chooses samples by losses"),
    (["pet.scheme=bias: nothing.here"], "matches no")])
def test_what_cannot_be(environment, images, tmp_path, overrides, words):
    done = train(environment, images, tmp_path / "out", *overrides)
    assert done.returncode != 0 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
