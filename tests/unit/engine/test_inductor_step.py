"""The module that TorchInductor gets, run as it stands; what it compiles is tested in tests/slow."""

import pytest
from engine_reference import tensors_of
from onnx_examples import compared, step_of

from piebridge.core.errors import UserError
from piebridge.engine.inductor_step import PackagedStep, StepModule, write_package
from piebridge.engine.step_arguments import given_tensors


class ModuleStep:
    def __init__(self, step, tensors):
        self.step, self.module = step, StepModule(step, tensors)

    def run(self, *arguments):
        return self.module(*given_tensors(self.step, *arguments))


@pytest.mark.parametrize("name, scheme, is_training", [("lite0", "channels", False), ("resnet", "full", True), ("decoder", "bias", False)])
def test_the_module_updates_the_live_tensors(one_thread, name, scheme, is_training):
    error, _ = compared(ModuleStep, *step_of(name, scheme, is_training=is_training))
    assert error == 0.0


def test_files_that_are_none(one_thread, tmp_path):
    step, module, _ = step_of("lite0", "bias")
    tensors = tensors_of(step, module)
    with pytest.raises(UserError, match="step.bin: a package is named .pt2; choose another name"):
        write_package(tmp_path / "step.bin", step, tensors)
    (tmp_path / "step.pt2").write_bytes(b"no package")
    with pytest.raises(UserError, match="step.pt2: not a package of a step"):
        PackagedStep(step, tensors, tmp_path / "step.pt2")
    with pytest.raises(UserError, match="missing.pt2: no such file"):
        PackagedStep(step, tensors, tmp_path / "missing.pt2")
