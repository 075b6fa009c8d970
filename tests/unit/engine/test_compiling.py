"""`piebridge.engine.compile`: names, settings, the passes' effect on training (none), and the cache of compiled programs."""

import copy
import logging
import os
import subprocess
import sys

import pytest
import torch
from program_examples import Plain, batches, everything, network, some_channels
from torch import nn

import piebridge
from piebridge.core.errors import UserError
from piebridge.engine.passes import PASSES
from piebridge.engine.program_cache import ProgramCache
from piebridge.engine.step_graph import TRAINED
from piebridge.engine.update_rules import SGD, AdamW

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "programs"


def compiled(module, **settings):
    return piebridge.engine.compile(module, example=batches(1)[0], **settings)


def assert_same_training(program, plain, number=8, rate=0.05):
    for images, labels in batches(number):
        losses, _ = program(images, labels, rate=rate)
        torch.testing.assert_close(losses, plain(images, labels), rtol=1e-9, atol=1e-9)
    tuned = program.load_into(copy.deepcopy(plain.module)).state_dict()
    for key, tensor in plain.module.state_dict().items():
        torch.testing.assert_close(tuned[key], tensor, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("kind", ["whole", "parts", "training", "accumulation"])
def test_trains_as_plain_pytorch_does(kind):
    module = network().train(kind == "training")
    parts = some_channels() if kind == "parts" else everything(module)
    settings = {"is_training": kind == "training", "accumulation": 2 if kind == "accumulation" else 1, "clip": 1.0}
    program = compiled(module, optimizer=SGD(0.9), scheme=parts, **settings)
    assert_same_training(program, Plain(module, SGD(0.9), parts, 0.05, **settings))
    assert program.compile_seconds > 0 and program.facts["settings"]["is_channels_last"]


def test_everything_is_trained_where_no_scheme_says_otherwise():
    program = compiled(network(), optimizer="adamw")
    assert {name for name in program.state() if name.startswith(TRAINED)} == {f"trained/{key}" for key, _ in network().named_parameters()}
    assert_same_training(program, Plain(network(), AdamW(), everything(network()), 0.05))


@pytest.mark.parametrize("channels", ["first", "fisher"])
def test_takes_a_scheme_as_text(channels):
    program = compiled(network(), scheme=f"weights: {{'9': 1/2}}\nbias: ['9']\nchannels: {channels}")
    assert {name: tuple(tensor.shape) for name, tensor in program.state().items()} == {
        "trained/9.weight": (5, 12), "trained/9.bias": (5,), "step_count": (1,)}
    assert f"channels: {channels}" in program.facts["scheme"] or channels == "first"
    before, losses = network().state_dict(), [float(program(*batches(1)[0], rate=0.1)[0].mean()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    changed = {key for key, tensor in program.load_into(network()).state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed == {"9.weight", "9.bias"}


def test_says_what_compiling_took():
    fresh, again = compiled(network()), compiled(network())
    assert list(fresh.facts["compile_phases"]) == ["scheme", "capture", "passes", "executor", "cache"]
    assert list(again.facts["compile_phases"]) == ["scheme", "capture", "cache", "executor"]
    assert fresh.compile_seconds == pytest.approx(sum(fresh.facts["compile_phases"].values()))


def test_the_passes_can_be_left_out():
    kept = compiled(network(), scheme=some_channels(), cache=False)
    left_out = compiled(network(), scheme=some_channels(), off=list(PASSES), cache=False)
    sizes = [len(program.steps["update"].graph.nodes) for program in (kept, left_out)]
    assert sizes[0] < sizes[1]
    for batch in batches(4):
        torch.testing.assert_close(kept(*batch)[0], left_out(*batch)[0], rtol=1e-9, atol=1e-9)


def test_a_program_is_found_again(cache_folder):
    module = network(dropout=0.2).train()
    settings = {"scheme": some_channels(), "is_training": True, "accumulation": 2}
    first = compiled(module, **settings)
    assert not first.facts["is_cached"] and len(list(cache_folder.iterdir())) == 1
    with torch.no_grad():
        module[9].bias.add_(1)  # what is trained may start from elsewhere
    again = compiled(module, **settings)
    assert again.facts["is_cached"] and len(list(cache_folder.iterdir())) == 1
    fresh = compiled(module, cache=False, **settings)
    for batch in batches(4):
        assert torch.equal(again(*batch)[1], fresh(*batch)[1])


def change_frozen(module, settings):
    with torch.no_grad():
        module[0].weight.mul_(2)


def change_structure(module, settings):
    module[4] = nn.ReLU()


CHANGES = {"frozen weights": change_frozen, "structure": change_structure,
           "scheme": lambda module, settings: settings.update(scheme={"9.bias": some_channels()["9.bias"]}),
           "channels": lambda module, settings: settings["scheme"].update({"9.weight": type(settings["scheme"]["9.weight"])(
               0, torch.tensor([1, 3]))}),
           "rule": lambda module, settings: settings.update(optimizer=SGD(0.5)),
           "passes": lambda module, settings: settings.update(off=["fold_constants"]),
           "clip": lambda module, settings: settings.update(clip=2.0)}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_step_is_compiled_anew(cache_folder, change):
    module, settings = network(), {"scheme": some_channels()}
    compiled(module, **settings)
    change(module, settings)
    assert not compiled(module, **settings).facts["is_cached"] and len(list(cache_folder.iterdir())) == 2


def test_another_seed_is_the_same_program():
    compiled(network(dropout=0.2).train(), is_training=True, seed=1)
    program = compiled(network(dropout=0.2).train(), is_training=True, seed=2)
    assert program.facts["is_cached"] and program.facts["settings"]["seed"] == 2


def test_a_damaged_entry_is_compiled_again(cache_folder, caplog):
    compiled(network())
    (entry,) = cache_folder.iterdir()
    content = bytearray(entry.read_bytes())
    content[-3] ^= 1
    entry.write_bytes(bytes(content))
    with caplog.at_level(logging.WARNING):
        assert not compiled(network()).facts["is_cached"]
    assert "a cached program cannot be used, and is compiled again" in caplog.text
    assert compiled(network()).facts["is_cached"]


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert not compiled(network(), cache=str(tmp_path / "file" / "cache")).facts["is_cached"]
    assert "the compiled program is not cached" in caplog.text


def test_the_entries_that_lie_longest_go(tmp_path):
    cache = ProgramCache(tmp_path, most_bytes=25)
    for number in range(4):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(b"x" * 10)
        os.utime(str(path), (number, number))
    cache._evict()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.safetensors", "3.safetensors"]


@pytest.mark.parametrize("settings, message", [
    ({"optimizer": "adam"}, r"no optimizer 'adam'; there are sgd, adamw \(did you mean 'adamw'\?\)"),
    ({"loss": "crossentropy"}, r"no loss 'crossentropy'; .*did you mean 'cross_entropy'"),
    ({"accumulate": 2}, r"no setting 'accumulate'; there are clip, .* \(did you mean 'accumulation'\?\)"),
    ({"accumulation": 0}, "accumulation=0; it counts batches per update, from 1"),
    ({"off": ["fold"]}, "no pass 'fold'"),
])
def test_names_what_it_does_not_know(settings, message):
    with pytest.raises(UserError, match=message):
        compiled(network(), **settings)


def test_needs_an_example():
    with pytest.raises(UserError, match=r"compile needs example=\(inputs, targets\)"):
        piebridge.engine.compile(network())


def test_importing_the_package_imports_neither_torch_nor_the_engine():
    code = ("import sys, piebridge; assert 'torch' not in sys.modules and 'piebridge.engine' not in sys.modules\n"
            "assert callable(piebridge.engine.compile) and 'torch' not in sys.modules\n"
            "try:\n    piebridge.motor\nexcept AttributeError as error:\n    print(error)")
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, universal_newlines=True, check=True)
    assert result.stdout.strip() == "module 'piebridge' has no attribute 'motor'"


def test_measures_executors_and_follows_the_choice_again(tmp_path):
    """With the file's and the cache's choice nothing is measured, and the bits stay the same."""
    settings = {"optimizer": SGD(0.9), "accumulation": 2, "candidates": ["interpreter_channels_last"], "is_channels_last": False}
    program = compiled(network(), **settings)
    choice = program.facts["choice"]
    assert set(choice["parts"].values()) <= {"interpreter", "interpreter_channels_last"}
    again = compiled(network(), **settings)
    assert again.facts["is_cached"] and again.facts["choice"] == choice
    program.write(tmp_path / "program")
    read = piebridge.engine.read_program(tmp_path / "program")
    assert read.facts["choice"] == choice
    plain = Plain(network(), SGD(0.9), everything(network()), 0.05, accumulation=2)
    for images, labels in batches(6):
        losses = program(images, labels, rate=0.05)[0]
        assert torch.equal(again(images, labels, rate=0.05)[0], losses) and torch.equal(read(images, labels, rate=0.05)[0], losses)
        torch.testing.assert_close(losses, plain(images, labels), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(tensor, again.state()[name]) for name, tensor in program.state().items())


def test_a_string_names_one_candidate():
    with pytest.raises(UserError, match=r"engine: no candidate 'openvinno' \(did you mean 'openvino'\?\)"):
        compiled(network(), candidates="openvinno")
