"""Every family of networks through the whole of `compile`: as plain PyTorch in float64, and through a program file to the bit."""

import pytest
import torch
from engine_networks import FAMILIES, WITH_BATCH_NORM, batch_of, family, loss_of, parts_of, with_lora
from engine_reference import LEARNING_RATE, Reference, assert_close, optimizer_of

import piebridge
from piebridge.engine.program import StepProgram
from piebridge.engine.update_rules import SGD, AdamW

RULES = {"full": SGD(0.9, 1e-3), "channels": AdamW(0.1, epsilon=1e-4), "lora": SGD(0.9)}
CASES = [(name, False, scheme) for name in FAMILIES for scheme in RULES] + [(name, True, "full") for name in WITH_BATCH_NORM]


@pytest.mark.parametrize("name, is_training, scheme", CASES)
def test_trains_as_plain_pytorch_and_through_a_file(one_thread, tmp_path, name, is_training, scheme):
    module = family(name).train(is_training)
    module = with_lora(module) if scheme == "lora" else module
    parts, rule, weights = parts_of(module, scheme), RULES[scheme], torch.tensor([0.4, 0.0, 0.3, 0.3], dtype=torch.float64)
    program = piebridge.engine.compile(module, loss_of(name), rule, parts, batch_of(name), is_training=is_training, cache=False)
    program.write(tmp_path / "program.safetensors")
    read = StepProgram.read(tmp_path / "program.safetensors")
    reference = Reference(module, loss_of(name), parts, optimizer_of(rule))
    for number in range(1, 4):
        inputs, targets = batch_of(name, seed=number)
        losses, outputs = program(inputs, targets, weights, LEARNING_RATE)
        expected = reference.backward((inputs, targets), weights)
        reference.update()
        assert_close(losses, expected[0])
        assert_close(outputs, expected[1])
        assert torch.equal(read(inputs, targets, weights, LEARNING_RATE)[0], losses)
    assert all(torch.equal(tensor, read.state()[key]) for key, tensor in program.state().items())
