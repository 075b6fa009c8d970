"""Checkpoints: the newest wins, errors reach the training thread, and what is restored goes on as if nothing had been."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from piebridge.core.checkpoint import STATE_FILE, CheckpointWriter, read_checkpoint
from piebridge.core.errors import UserError
from piebridge.core.optimizers import build_optimizer

DEADLINE = 30  # seconds, for what takes milliseconds


def test_what_is_saved_is_read(tmp_path):
    assert read_checkpoint(tmp_path) is None
    tensors = {"weight": torch.randn(3, 4), "double": torch.randn(2, dtype=torch.float64), "steps": torch.tensor([7]),
               "order": torch.arange(5)[::2], "empty": torch.zeros(0, 3), "flags": torch.tensor([True, False])}
    facts = {"epoch": 3, "best": None, "rows": [{"accuracy": 1 / 3, "name": "ä"}]}
    writer = CheckpointWriter(tmp_path / "new" / "folder")
    writer.save(tensors, facts)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():  # training goes on in place at once
        tensor.zero_()
    writer.close()
    read, read_facts = read_checkpoint(tmp_path / "new" / "folder")
    assert read_facts == facts and set(read) == set(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [STATE_FILE]


def test_the_newest_wins_while_the_disk_is_busy(tmp_path):
    writer = CheckpointWriter(tmp_path)
    is_writing, may_go_on, calls, written = threading.Event(), threading.Event(), [], []

    def slow():
        is_writing.set()
        assert may_go_on.wait(DEADLINE)

    def note(number):
        calls.append(number)
        written.append(read_checkpoint(tmp_path)[1]["number"])

    writer.save({"x": torch.tensor([1.0])}, {"number": 1}, slow)
    assert is_writing.wait(DEADLINE)
    for number in (2, 3, 4):
        writer.save({"x": torch.tensor([float(number)])}, {"number": number}, lambda number=number: note(number))
    may_go_on.set()
    writer.close()
    assert calls == [2, 3, 4] and written == [4, 4, 4]  # 2 and 3 were never written; what was to follow them follows 4
    tensors, facts = read_checkpoint(tmp_path)
    assert (tensors["x"].item(), facts) == (4.0, {"number": 4})


def test_a_disk_that_fails_stops_the_training_thread(tmp_path):
    (tmp_path / "file").write_text("in the way")
    writer = CheckpointWriter(tmp_path / "file" / "checkpoint")
    writer.save({"x": torch.zeros(1)}, {}, lambda: pytest.fail("nothing was written"))
    with pytest.raises(UserError, match="is no folder, and cannot become one"):
        writer.close()

    writer, end = CheckpointWriter(tmp_path / "file" / "checkpoint"), time.monotonic() + DEADLINE
    with pytest.raises(UserError, match="is no folder, and cannot become one"):
        while time.monotonic() < end:  # the first save cannot know yet; one of the next does
            writer.save({"x": torch.zeros(1)}, {})
            time.sleep(0.001)
    with contextlib.suppress(OSError):
        writer.close()


def test_a_damaged_checkpoint_is_named(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.save({"x": torch.zeros(100)}, {})
    writer.close()
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{path}: not a valid safetensors file .*cut short"):
        read_checkpoint(tmp_path)


def steps(layer, rule, first, last):
    for step in range(first, last):
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        rule.zero_grad()
        (layer(inputs) - inputs[:, :3]).square().mean().backward()
        rule.step(0.01 * (step + 1))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_restored_optimizer_takes_the_same_steps(tmp_path, kind):
    settings = SimpleNamespace(kind=kind, momentum=0.9, weight_decay=0.1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 3)
    rule = build_optimizer(layer.parameters(), settings)
    steps(layer, rule, 0, 4)
    writer = CheckpointWriter(tmp_path)
    state = {f"trainable/{name}": tensor for name, tensor in layer.state_dict().items()}
    writer.save(dict(state, **{f"optimizer/{name}": tensor for name, tensor in rule.state().items()}), {"step": 4})
    steps(layer, rule, 4, 8)  # meanwhile the writer writes
    writer.close()

    tensors, facts = read_checkpoint(tmp_path)
    restored = torch.nn.Linear(5, 3)
    restored.load_state_dict({name[len("trainable/"):]: tensor for name, tensor in tensors.items() if name.startswith("trainable/")})
    again = build_optimizer(restored.parameters(), settings)
    again.restore({name[len("optimizer/"):]: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")})
    steps(restored, again, facts["step"], 8)
    assert torch.equal(restored.weight, layer.weight) and torch.equal(restored.bias, layer.bias)
