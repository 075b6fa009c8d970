"""Steps compiled by TorchInductor, when they run and ahead of it. Needs a C++ compiler, and half a minute for each."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "engine"))
from onnx_examples import compared, step_of  # noqa: E402

from piebridge.engine.inductor_step import InductorStep, PackagedStep, write_package  # noqa: E402
from piebridge.engine.step_graph import TRAINED  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler is installed")


@pytest.mark.parametrize("name, scheme", [("lite0", "channels"), ("encoder", "bias")])
def test_compiled_when_it_runs(one_thread, name, scheme):
    torch.compiler.reset()
    error, _ = compared(InductorStep, *step_of(name, scheme))
    assert error < 1e-5


@pytest.mark.parametrize("name, scheme", [("lite0", "channels"), ("decoder", "full")])
def test_compiled_ahead_of_time(one_thread, tmp_path, name, scheme):
    def packaged(step, tensors):
        # what the package was made with does not matter: it works on the live tensors
        others = {key: torch.zeros_like(tensor) if key[0] == TRAINED else tensor for key, tensor in tensors.items()}
        write_package(tmp_path / "step.pt2", step, others)
        assert [each.name for each in tmp_path.iterdir()] == ["step.pt2"]
        return PackagedStep(step, tensors, tmp_path / "step.pt2")

    error, _ = compared(packaged, *step_of(name, scheme))
    assert error < 1e-5
