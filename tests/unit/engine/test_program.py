"""Step programs against plain PyTorch: the same 20 steps in float64, resuming to the bit, small batches, and what is refused."""

import copy

import pytest
import torch
from program_examples import BATCH_SIZE, Plain, batches, everything, network, program_of, some_channels
from torch import nn

from piebridge.core.errors import UserError
from piebridge.engine.program import StepProgram
from piebridge.engine.update_rules import SGD, AdamW

pytestmark = pytest.mark.usefixtures("one_thread")
RULES = {"sgd": SGD(), "momentum": SGD(0.9, 1e-2), "adamw": AdamW(0.05)}
RATE = 0.05


def assert_same_training(program, plain, data, **arguments):
    for images, labels in data:
        losses, _ = program(images, labels, rate=RATE, **arguments)
        torch.testing.assert_close(losses, plain(images, labels, **arguments), rtol=1e-9, atol=1e-9)
    tuned = program.load_into(copy.deepcopy(plain.module))
    for (key, one), (_, other) in zip(tuned.state_dict().items(), plain.module.state_dict().items()):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", ["whole", "parts", "training", "clip", "channels_last"])
def test_twenty_steps_are_those_of_plain_pytorch(rule, kind):
    module = network()
    parts = some_channels() if kind == "parts" else everything(module)
    settings = {"is_training": kind == "training", "clip": 0.5 if kind == "clip" else None}
    program = program_of(module, rule, parts, is_channels_last=kind == "channels_last", **settings)
    assert_same_training(program, Plain(module, rule, parts, RATE, **settings), batches(20))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_accumulates_over_batches(rule):
    module = network()
    program = program_of(module, rule, accumulation=3)
    plain = Plain(module, rule, everything(module), RATE, accumulation=3)
    assert_same_training(program, plain, batches(12))
    assert program.update_count == 4


def test_weighs_samples():
    module = network()
    weights = torch.tensor([0.5, 0.0, 0.2, 1.3], dtype=torch.float64)
    assert_same_training(program_of(module), Plain(module, SGD(), everything(module), RATE), batches(5), weights=weights)


def test_trains_a_smaller_batch_as_it_is():
    module = network()
    program, plain = program_of(module, SGD(0.9)), Plain(module, SGD(0.9), everything(module), RATE)
    small = batches(1, size=3)[0]
    losses, outputs = program(*small, rate=RATE)
    assert losses.shape == (3,) and outputs.shape == (3, 5)
    plain(*small)
    assert_same_training(program, plain, batches(2) + batches(1, size=1))


def test_refuses_to_fill_up_where_samples_mix():
    program = program_of(network(), is_training=True)
    with pytest.raises(UserError, match="a batch of 3 samples, compiled for 4; it cannot be filled up, as batch norm '1' takes"):
        program(*batches(1, size=3)[0])


def test_leaves_the_module_alone():
    module = network()
    before = copy.deepcopy(module.state_dict())
    program = program_of(module, is_training=True)
    program(*batches(1)[0])
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_gives_the_same_bits(tmp_path, accumulation):
    module = network(dropout=0.4)
    settings = {"parts": some_channels(), "is_training": True, "accumulation": accumulation, "seed": 3}
    data = batches(7)
    whole = program_of(module, AdamW(), **settings)
    killed = program_of(module, AdamW(), **settings)
    for batch in data[:3]:
        whole(*batch)
        killed(*batch)
    killed.write_state(tmp_path / "state.safetensors")
    resumed = program_of(module, AdamW(), **settings).read_state(tmp_path / "state.safetensors")
    for batch in data[3:]:
        assert torch.equal(whole(*batch)[0], resumed(*batch)[0])
    for name, tensor in whole.state().items():
        assert torch.equal(tensor, resumed.state()[name]), name


def test_draws_by_seed_and_step():
    module, batch = network(dropout=0.5), batches(1)[0]
    first, again, other = [program_of(module, seed=seed, is_training=True) for seed in (1, 1, 2)]
    outputs = [program(*batch, rate=0.0)[1] for program in (first, again, other, first)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[3])


def test_the_state_is_what_changes_and_no_more():
    program = program_of(network(), SGD(0.9), some_channels())
    shapes = {name: tuple(tensor.shape) for name, tensor in program.state().items()}
    parts = {"5.weight": (6, 3, 1, 1), "3.weight": (2, 1, 3, 3), "9.weight": (2, 24), "9.bias": (5,)}
    wanted = {f"trained/{key}": shape for key, shape in parts.items()}
    wanted.update({f"state/{key}/velocity": shape for key, shape in parts.items()}, step_count=(1,))
    assert shapes == wanted
    before = program.state()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    program(*batches(1)[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in kept.items())  # a copy


def test_refuses_the_state_of_another_program():
    program = program_of(network(), SGD(0.9), some_channels())
    state = program.state()
    with pytest.raises(UserError, match="the state has no 'trained/9.bias'; it is another program's"):
        program.restore({name: tensor for name, tensor in state.items() if name != "trained/9.bias"})
    with pytest.raises(UserError, match="the state has 'trained/more', which this program does not train"):
        program.restore(dict(state, **{"trained/more": torch.zeros(1)}))
    with pytest.raises(UserError, match=r"'trained/9.bias' of the state is torch.float64 \[4\], this program's torch.float64 \[5\]"):
        program.restore(dict(state, **{"trained/9.bias": torch.zeros(4).double()}))


@pytest.mark.parametrize("change, message", [
    (lambda images, labels: (images.float(), labels), r"inputs is torch.float32, compiled for torch.float64; convert it with .to\(torch"),
    (lambda images, labels: (images[..., :8], labels), r"inputs has the shape \[4, 3, 16, 8\], compiled for \[4, 3, 16, 16\]; bring it to"),
    (lambda images, labels: (images, labels[:2]), r"targets has the shape \[2\], compiled for \[4\]"),
    (lambda images, labels: (images.repeat(2, 1, 1, 1), labels), "a batch of 8 samples, compiled for 4; split it, or compile with"),
    (lambda images, labels: (images[:0], labels[:0]), "a batch of 0 samples, compiled for 4"),
    (lambda images, labels: ((images, images), labels), "takes inputs, targets, and 3 tensors were given"),
    (lambda images, labels: (images, labels, torch.ones(3)), r"weights has the shape \[3\], for 4 samples; give one per sample"),
])
def test_names_what_does_not_fit(change, message):
    with pytest.raises(UserError, match="step program: " + message):
        program_of(network())(*change(*batches(1)[0]))


def test_refuses_a_module_without_its_tensors():
    program = program_of(network())
    with pytest.raises(UserError, match="'0.weight' is .* here, and in the module: no such tensor"):
        program.load_into(nn.ReLU())
    with pytest.raises(UserError, match=r"'0.weight' is \[8, 3, 3, 3\] here, and in the module: \[2, 3\]"):
        program.load_into(nn.Sequential(nn.Linear(3, 2)))


def test_refuses_graphs_that_do_not_accumulate():
    program = program_of(network())
    facts = dict(program.facts, settings=dict(program.facts["settings"], accumulation=2))
    with pytest.raises(UserError, match="accumulation=2 with the graphs update"):
        StepProgram(program.steps, program._tensors, facts)


def test_knows_its_batch_size():
    assert program_of(network()).batch_size == BATCH_SIZE
