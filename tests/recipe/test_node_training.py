"""The same file trains where there is no training runtime: Node.js with an inference library from npm, native or WebAssembly."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from piebridge.core.safetensors_file import write_safetensors
from piebridge.engine.capture import capture
from piebridge.engine.losses import cross_entropy
from piebridge.engine.onnx_file import read_state, write_state, write_step
from piebridge.engine.step_graph import BATCH, COUNT, LOSSES, RATE, STATE, TRAINED, WEIGHTS, Part
from piebridge.engine.update_rules import SGD

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "doc" / "examples" / "train_in_node.mjs"
STEPS, SAMPLES, LEARNING_RATE = 20, 4, 0.05
INSTALL_SECONDS, TRAINING_SECONDS = 180, 60


def _network():
    """A frozen stem, then a trained inverted residual, some channels of its first convolution, and a head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), nn.Conv2d(8, 16, 1), nn.Hardswish(), nn.Conv2d(16, 16, 3, 1, 1, groups=16),
                         nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


def _installed(package, folder):
    """The folder with the package in it; skips where Node.js, npm or the registry is missing."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node or npm is not installed")
    (folder / "package.json").write_text('{"private": true}')
    # a package's own scripts may fetch from elsewhere: onnxruntime-node's, kernels for CUDA
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", package]
    try:
        done = subprocess.run(command, cwd=str(folder), capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm install {package} took more than {INSTALL_SECONDS} s: no registry?")
    if done.returncode:
        pytest.skip(f"npm install {package} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return folder


def _tensors(step, module):
    named = dict(module.named_parameters())
    tensors = {(value.role, value.name): named[value.name].detach().clone() for value in step.inputs if value.name in named}
    tensors.update({("index", key): part.index for key, part in step.parts.items() if not part.is_whole})
    tensors.update({(STATE, value.name): torch.zeros(value.shape) for _, value in step.inputs_of(STATE)})
    return tensors


def _losses_in_torch(step, tensors, batches):
    losses = []
    for number in range(STEPS):
        batch = iter([batches["inputs"][number], batches["targets"][number]])
        given = {WEIGHTS: torch.full([SAMPLES], 1 / SAMPLES), RATE: torch.tensor(LEARNING_RATE), COUNT: torch.tensor(number + 1.0)}
        arguments = [next(batch) if value.role == BATCH else given.get(value.role, tensors.get((value.role, value.name)))
                     for value in step.inputs]
        for value, result in zip(step.outputs, step(*arguments)):
            part = step.parts.get(value.name)
            if value.role == LOSSES:
                losses.append(result.mean().item())
            elif value.role == TRAINED and not part.is_whole:
                tensors[TRAINED, value.name].index_copy_(part.dim, part.index, result)
            elif value.role in (TRAINED, STATE):
                tensors[value.role, value.name].copy_(result)
    return losses


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_node_trains_the_file(package, tmp_path):
    pytest.importorskip("onnx", reason="the package onnx is not installed")
    folder = _installed(package, tmp_path)
    module = _network()
    parts = {key: Part() for key in ("4.weight", "6.weight", "6.bias", "9.weight", "9.bias")}
    parts["2.weight"] = Part(0, torch.arange(0, 16, 2))
    example = torch.zeros(SAMPLES, 3, 32, 32), torch.zeros(SAMPLES, dtype=torch.int64)
    step = capture(module, cross_entropy, SGD(0.9), parts, example)
    tensors = _tensors(step, module)
    write_step(folder / "step.onnx", step, tensors)
    write_state(folder / "state.safetensors", step, tensors)
    batch = torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, 5, (SAMPLES,))
    batches = {"inputs": batch[0] + 0.1 * torch.randn(STEPS, SAMPLES, 3, 32, 32), "targets": batch[1].repeat(STEPS, 1)}
    write_safetensors(folder / "batches.safetensors", batches)
    command = ["node", str(SCRIPT), "step.onnx", "state.safetensors", "batches.safetensors", "tuned.safetensors", str(LEARNING_RATE)]
    done = subprocess.run(command, cwd=str(folder), capture_output=True, text=True, timeout=TRAINING_SECONDS)
    assert done.returncode == 0, done.stderr
    assert package in done.stderr

    found = [float(line) for line in done.stdout.split()]
    tuned = _tensors(step, module)
    read_state(folder / "tuned.safetensors", step, tuned)
    expected = _losses_in_torch(step, tensors, batches)
    assert found == pytest.approx(expected, rel=1e-4) and found[-1] < 0.9 * found[0]
    for key, tensor in tensors.items():
        torch.testing.assert_close(tuned[key], tensor, rtol=1e-3, atol=1e-5)


def test_the_script_says_what_it_needs(tmp_path):
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    done = subprocess.run(["node", str(SCRIPT)], cwd=str(tmp_path), capture_output=True, text=True, timeout=TRAINING_SECONDS)
    assert done.returncode == 2 and done.stderr.startswith("usage: node train_in_node.mjs")
    done = subprocess.run(["node", str(SCRIPT), *"abcd"], cwd=str(tmp_path), capture_output=True, text=True, timeout=TRAINING_SECONDS)
    assert done.returncode == 1 and "npm install --ignore-scripts onnxruntime-node" in done.stderr
