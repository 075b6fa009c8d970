"""End-to-end retraining: losses and steps against plain PyTorch, two processes against one, interruption against none."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from forge_examples import Tower, copy_of, images, module_of, network_of, noisy
from torch.nn import functional as F

from piebridge.core.errors import UserError
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.safetensors_file import read_safetensors
from piebridge.forge.alignment import measure_alignment
from piebridge.forge.processes import local_device, process_group
from piebridge.forge.retraining import RetrainingSettings, alignment_loss, main, retrain, task_loss

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def network():
    return network_of(Tower())


class Images:
    """A loader of tensors, with the interface of core/loader.py."""

    def __init__(self, count, sizes=(16,)):
        self.samples, self.images = range(count), [images(count, size) for size in sizes]

    def batches(self, index_lists, view_seed=None):
        for indices in index_lists:
            chosen = [each[indices] for each in self.images]
            yield indices, chosen if len(chosen) > 1 else chosen[0]


def test_the_alignment_loss_is_the_papers_term_and_the_relative_square_error():
    random = np.random.RandomState(0)
    f, g = random.randn(5, 3, 2, 2), random.randn(5, 3, 2, 2)
    expected = 0.0
    for x, y in zip(f.reshape(5, -1), g.reshape(5, -1)):
        expected += 0.7 * (1 - x @ y / np.linalg.norm(x) / np.linalg.norm(y)) + ((x - y) ** 2).sum() / (y ** 2).sum()
    assert float(alignment_loss(torch.from_numpy(f), torch.from_numpy(g), 0.7)) == pytest.approx(expected / 5)
    assert float(alignment_loss(torch.from_numpy(2 * g), torch.from_numpy(g), 1.0)) == pytest.approx(1.0)  # scale counts


def test_the_task_loss():
    random = np.random.RandomState(1)
    found, wanted = random.randn(4, 6), random.randn(4, 6)

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(1, keepdims=True))
    divergence = (np.exp(log_softmax(wanted)) * (log_softmax(wanted) - log_softmax(found))).sum(1).mean()
    assert float(task_loss(torch.from_numpy(found), torch.from_numpy(wanted))) == pytest.approx(divergence)
    entropy = -log_softmax(found)[np.arange(4), [3, 0, 5, 1]].mean()
    assert float(task_loss(torch.from_numpy(found), torch.tensor([3, 0, 5, 1]))) == pytest.approx(entropy)


def values_of(module, x):
    """(logits, the blocks' outputs and the head's input) of the plain module."""
    seen = []
    handles = [block.register_forward_hook(lambda block, inputs, output: seen.append(output)) for block in module.blocks]
    handles.append(module.head.register_forward_hook(lambda head, inputs, output: seen.append(inputs[0])))
    logits = module(x)
    for handle in handles:
        handle.remove()
    return logits, seen


@pytest.mark.parametrize("has_labels", [False, True])
def test_an_epoch_is_that_of_plain_pytorch(network, has_labels):
    proxy = noisy(network)
    module, original = module_of(proxy, Tower()), module_of(network, Tower())
    labels = [index % 5 for index in range(16)] if has_labels else None
    settings = RetrainingSettings(epochs=1, batch_size=8, rate=1e-3, cosine_weight=0.5, seed=4)
    losses = retrain(network, proxy, Images(16), settings, labels)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(4 * 1000003))
    parameters = [parameter for name, parameter in module.named_parameters() if not name.startswith("head.")]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    expected = []
    for step, chosen in enumerate(order.split(8)):
        logits, found = values_of(module, images(16)[chosen])
        with torch.no_grad():
            original_logits, wanted = values_of(original, images(16)[chosen])
        if has_labels:
            loss = F.cross_entropy(logits, torch.tensor(labels)[chosen])
        else:
            loss = F.kl_div(F.log_softmax(logits, 1), F.softmax(original_logits, 1), reduction="batchmean")
        for f, g in zip(found, wanted):
            f, g = f.flatten(1), g.flatten(1)
            loss = loss + (0.5 * (1 - F.cosine_similarity(f, g)) + ((f - g) ** 2).sum(1) / (g ** 2).sum(1)).mean()
        expected.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.5 * 1e-3 * (1 + np.cos(np.pi * step / 2))
        optimizer.step()
    assert losses == [pytest.approx(sum(expected) / 2, rel=1e-9)]
    for key, tensor in module.state_dict().items():
        torch.testing.assert_close(proxy.state_dict()[key], tensor, rtol=1e-8, atol=1e-9)


def test_retraining_brings_the_features_nearer_and_leaves_original_head_and_statistics(network):
    proxy, tap = noisy(network, 0.3), network.description["tap"]
    held_out = [(each, each) for each in images(32, seed=2).split(8)]
    raw, before = measure_alignment(network, proxy, held_out)[tap], network.fingerprint()
    statistics = {key: buffer.clone() for key, buffer in proxy.named_buffers()}
    head = proxy.head.weight
    losses = retrain(network, proxy, Images(64), RetrainingSettings(epochs=3, batch_size=8, rate=2e-3))
    assert losses[-1] < losses[0] and len(losses) == 3
    assert measure_alignment(network, proxy, held_out)[tap]["relative_error"] < 0.8 * raw["relative_error"]
    assert network.fingerprint() == before and proxy.head.weight is head
    assert all(torch.equal(buffer, statistics[key]) for key, buffer in proxy.named_buffers())


def test_at_another_size_and_with_chosen_taps(network):
    proxy, tap = copy_of(network), network.description["tap"]
    held_out = list(zip(images(32, seed=2).split(8), images(32, 10, seed=2).split(8)))
    raw = measure_alignment(network, proxy, held_out)[tap]
    retrain(network, proxy, Images(64, (16, 10)), RetrainingSettings(epochs=2, batch_size=8, rate=2e-3, taps=(tap,)))
    assert measure_alignment(network, proxy, held_out)[tap]["relative_error"] < raw["relative_error"]


PROCESS = """
import sys
import torch
from test_retraining import Images, SHARED
from forge_examples import Tower, network_of, noisy
from piebridge.core.network_file import save_network
from piebridge.forge.processes import is_first, process_group
from piebridge.forge.retraining import retrain

torch.set_num_threads(1)
with process_group():
    network = network_of(Tower())
    proxy = noisy(network)
    losses = retrain(network, proxy, Images(22), SHARED, folder=None)
    if is_first():
        save_network(proxy, sys.argv[1], {"loss": repr(losses[-1])})
"""
SHARED = RetrainingSettings(epochs=2, batch_size=8, rate=1e-3)


def environment():
    folders = [str(ROOT), str(ROOT / "tests" / "unit")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(folders), OMP_NUM_THREADS="1")


def test_two_processes_equal_one_with_the_joint_batch(network, tmp_path):
    script, path = tmp_path / "process.py", tmp_path / "two.safetensors"
    script.write_text(PROCESS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    alone = noisy(network)
    losses = retrain(network, alone, Images(22), SHARED)
    tensors, metadata = read_safetensors(path)
    assert float(metadata["loss"]) == pytest.approx(losses[-1], rel=1e-9)
    changed = [key for key, tensor in noisy(network).state_dict().items() if not torch.equal(tensor, tensors[key])]
    assert len(changed) > 20
    for key, tensor in alone.state_dict().items():
        torch.testing.assert_close(tensors[key], tensor, rtol=0, atol=1e-8)


def test_an_interrupted_retraining_ends_as_an_undisturbed_one(network, tmp_path):
    settings = RetrainingSettings(epochs=3, batch_size=8, rate=1e-3)
    undisturbed, calls = noisy(network), []
    losses = retrain(network, undisturbed, Images(16), settings)

    def stop():
        calls.append(0)
        if len(calls) > 3:  # in the second epoch of two steps each
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        retrain(network, noisy(network), Images(16), settings, folder=tmp_path, on_step=stop)
    resumed, steps = noisy(network), []
    assert retrain(network, resumed, Images(16), settings, folder=tmp_path, on_step=lambda: steps.append(0)) == losses
    assert len(steps) == 4
    assert all(torch.equal(tensor, undisturbed.state_dict()[key]) for key, tensor in resumed.state_dict().items())
    with pytest.raises(UserError, match="state.safetensors: is of other networks or settings; delete it, or give another folder"):
        retrain(network, noisy(network, seed=8), Images(16), settings, folder=tmp_path)


def test_bad_settings(network):
    with pytest.raises(UserError, match="retraining of tower: batch_size=0 with 16 images cannot be shared by 1 processes; give a"):
        retrain(network, noisy(network), Images(16), RetrainingSettings(batch_size=0))
    with pytest.raises(UserError, match="retraining of tower: batch_size=32 with 0 images cannot be shared"):
        retrain(network, noisy(network), Images(0), RetrainingSettings())
    with pytest.raises(UserError, match="retraining of tower: no tap 'nowhere'; known: add, "):
        retrain(network, noisy(network), Images(16), RetrainingSettings(taps=("nowhere",)))
    for labels, found in (([0] * 15, "there are 15, from 0 to 0"), ([0] * 15 + [5], "there are 16, from 0 to 5")):
        with pytest.raises(UserError, match=f"needs a label for each of 16 images, 0 to 4 as its head has them; {found}"):
            retrain(network, noisy(network), Images(16), RetrainingSettings(), labels)
    with pytest.raises(UserError, match="retraining of tower: the loss of epoch 1 is nan; lower rate=1e[+]300"):
        retrain(network, noisy(network), Images(16), RetrainingSettings(batch_size=8, rate=1e300))


@pytest.fixture
def files(network, tmp_path):
    """Network files of an original and a proxy, float32."""
    paths = [tmp_path / "original.safetensors", tmp_path / "proxy.safetensors"]
    for each, path in zip((network, noisy(network, 0.3)), paths):
        save_network(copy_of(each).float(), path)
    return [str(path) for path in paths]


def test_as_a_program(files, tmp_path, caplog):
    caplog.set_level("INFO")
    out = tmp_path / "aligned.safetensors"
    data = str(ROOT / "datasets" / "Clipart10")
    assert main(files + ["--images", data, "--out", str(out), "--epochs", "1", "--batch-size", "64", "--rate", "1e-3"]) == 0
    original, proxy, aligned = (load_network_file(path) for path in files + [out])
    held_out = [(each.float(), each.float()) for each in images(32, seed=2).split(8)]
    tap = original.description["tap"]
    raw, after = (measure_alignment(original, each, held_out)[tap]["relative_error"] for each in (proxy, aligned))
    assert after < raw
    shown = [message for message in caplog.messages if ": cosine " in message]
    assert [message.partition(":")[0] for message in shown] == [each["output"] for each in original.description["blocks"]] + [tap]
    first, last = map(float, re.search("relative error ([0-9.]+) -> ([0-9.]+)$", shown[-1]).groups())
    assert last < first  # on images that were not trained on


def test_bad_usage_as_a_program_is_one_line(files, tmp_path, caplog):
    assert main([files[0], str(tmp_path / "no.safetensors"), "--images", "Clipart10", "--out", str(tmp_path / "out.safetensors")]) == 2
    assert "no.safetensors" in caplog.messages[-1] and "\n" not in caplog.messages[-1]
    assert main(files + ["--images", "Clipart10", "--labels", "--out", str(tmp_path / "out.safetensors")]) == 2
    assert caplog.messages[-1] == ("--labels: Clipart10 has 10 classes, which are not the 5 of the head of network tower; leave --labels "
                                   "out, or give images of its classes")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("gpus, device, backend", [(0, "cpu", "gloo"), (1, "cpu", "gloo"), (2, "cuda:1", "nccl"), (8, "cuda:1", "nccl")])
def test_each_process_has_a_gpu_of_its_own_or_none_has(monkeypatch, gpus, device, backend):
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    calls = Mock()
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.set_device", calls.set_device)
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr("torch.distributed." + name, getattr(calls, name))
    with process_group():
        assert local_device() == torch.device(device)
    calls.init_process_group.assert_called_once_with(backend)
    assert calls.set_device.called == (backend == "nccl") and calls.destroy_process_group.called
