"""Taps, levels and what a Tuning keeps: against the whole network, plain slices, and a run that was never interrupted."""

import pytest
import torch
from forge_examples import noisy
from pet_examples import KINDS, examples, family, settings, step_of, tuned
from torch import nn

from piebridge.core import backends, graph
from piebridge.core.checkpoint import CheckpointWriter, read_checkpoint
from piebridge.core.clock import Clock
from piebridge.core.gate import OpenGate
from piebridge.core.labels import Labels
from piebridge.core.loop import Parts, Progress, Saver, run_loop
from piebridge.core.network import GraphNetwork
from piebridge.core.router import FixedRouter
from piebridge.core.slices import cut, scatter
from piebridge.core.tuning import Tuning
from piebridge.forge import prune, structure_of, tensor_cuts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name, kind, tap", [
    ("tower", "head", "flatten"), ("tower", "last_k", "add"), ("tower", "norm", "stem"), ("tower", "bias", "stem"),
    ("tower", "adapter", "add"), ("tower", "lora", "relu"), ("tower", "all", "x"), ("vit", "norm", "encoder_dropout"),
    ("vit", "bias", "x"), ("vit", "adapter", "add_2"), ("efficientnet_lite0", "adapter", "blocks_0_0_bn2"),
    ("efficientnet_lite0", "last_k", "add_7"), ("efficientnet_lite0", "all", "x"), ("mobilenet_v3_large", "head", "classifier_2")])
def test_the_tap_is_the_last_value_before_anything_trained(name, kind, tap):
    tuning = Tuning(family(name), settings(kind))
    assert tuning.tap == tuning.tap_of(0) == tap
    images, _ = examples(name, count=2)
    with torch.no_grad():
        values = tuning.frozen().features(images)
        assert torch.equal(values, tuning.network.eval().values(images, [tap])[tap])
    assert not values.requires_grad
    if list(images.shape[1:]) == tuning.network.description["input_size"]:
        assert tuning.tap_shape() == tuple(values.shape[1:])


@pytest.mark.parametrize("name", ["tower", "efficientnet_lite0", "mobilenet_v3_large", "resnet50", "vit"])
@pytest.mark.parametrize("kind", ["last_k", "norm", "bias", "adapter", "lora"])
@pytest.mark.parametrize("body", ["channels_last", "folded"])
def test_a_faster_body_computes_the_same(name, kind, body):
    images, labels = examples(name)
    found = []
    for each in ("eager", body):
        torch.manual_seed(0)
        tuning = Tuning(family(name), settings(kind), each)
        logits = tuning(tuning.frozen().features(images))
        torch.nn.functional.cross_entropy(logits, labels).backward()
        found.append((logits.detach(), [parameter.grad for parameter in tuning.parameters()], tuning))
    (logits, gradients, plain), (fast_logits, fast_gradients, fast) = found
    assert torch.allclose(logits, fast_logits, rtol=1e-9, atol=1e-12)
    assert all(torch.allclose(*pair, rtol=1e-7, atol=1e-10) for pair in zip(gradients, fast_gradients))
    if body == "folded" and kind in ("adapter", "last_k") and name == "resnet50":
        plain_nodes, fast_nodes = (len(each._levels[0]._tail.description["nodes"]) for each in (plain, fast))
        assert fast_nodes < plain_nodes or kind == "last_k"  # last_k trains its batch norm


def test_a_cut_needs_no_more_than_its_one_value():
    """x + f(x): inside the block two values lead on."""
    description = family("tower").description
    for node in graph.block_nodes(description, description["blocks"][1])[:-1]:
        assert "x" in graph._beyond(description, node["name"])
    head = graph.after(description, "flatten")
    assert [node["name"] for node in head["nodes"]] == ["head"] and (head["tap"], head["blocks"]) == ("x", [])


def test_a_value_that_is_kept_is_not_overwritten():
    """The first thing behind the tap may work in place."""
    for name in ("efficientnet_lite0", "resnet50"):
        tuning = Tuning(family(name), settings("norm"))
        images, _ = examples(name, count=1)
        with torch.no_grad():
            values = tuning.frozen().features(images)
            before = values.clone()
            tuning(values)
        assert torch.equal(values, before)


@pytest.mark.parametrize("backend", ["eager", "folded", "openvino", "onnxruntime"])
@pytest.mark.parametrize("name, kind", [("efficientnet_lite0", "last_k"), ("efficientnet_lite0", "norm"), ("vit", "adapter")])
def test_backends_run_up_to_a_tap_in_the_middle(backend, name, kind):
    if backends.missing_packages(backend):
        pytest.skip(f"{backend} is not installed")
    images, _ = examples(name, count=3, dtype=torch.float32)
    tuning = Tuning(family(name, dtype=torch.float32).float(), settings(kind))
    segment = backends.build_segment(backend, tuning.frozen(), images.shape[-1], 2)
    with torch.no_grad():
        wanted = tuning.frozen().features(images)
    assert backends.relative_error(segment(images), wanted) < 1e-4 and segment(images).shape == wanted.shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_level_trains_the_same_tensors_through_its_own_weights(kind):
    network, (images, labels) = family("tower"), examples("tower")
    proxy = noisy(network)
    weights = {key: tensor.clone() for key, tensor in proxy.state_dict().items()}
    tuning = tuned(network, settings(kind), "tower")
    level = tuning.add_level(proxy)
    assert level == 1
    # by hand: the tuned network's description with the proxy's tensors, but for those that are trained
    state = {key: tensor.clone().requires_grad_(tensor.is_floating_point()) for key, tensor in tuning.state().items()}
    tensors = dict(weights, **{key: tensor for key, tensor in state.items() if ".lora_" not in key and "running" not in key})
    plain = GraphNetwork(tuning.network.description, {key: tensor.detach().clone() for key, tensor in tensors.items()}).eval()
    with torch.no_grad():
        for key in state:
            if key.endswith(".lora_A"):
                path = key[:-len(".lora_A")]
                weight = plain.get_submodule(path).weight
                weight += 3 * (state[path + ".lora_B"].flatten(1) @ state[key].flatten(1)).view_as(weight)
    values = tuning.frozen(level).features(images).detach()
    logits = tuning(values, level)
    torch.testing.assert_close(logits, plain(images), rtol=1e-10, atol=1e-12)
    for parameter in tuning.parameters():
        parameter.grad = None
    nn.functional.cross_entropy(logits, labels).backward()
    nn.functional.cross_entropy(plain(images), labels).backward()
    wanted = dict(plain.named_parameters())
    for key, parameter in zip(tuning.state(), tuning.parameters()):
        assert parameter.grad is not None
        if ".lora_" not in key:
            torch.testing.assert_close(parameter.grad, wanted[key].grad, rtol=1e-9, atol=1e-12)


def test_another_resolution_is_the_same_level():
    network = family("tower")
    tuning = Tuning(network, settings("adapter")).eval()
    images, _ = examples("tower", size=12)
    with torch.no_grad():
        torch.testing.assert_close(tuning(tuning.frozen().features(images)), network(images), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["norm", "bias", "last_k", "lora", "adapter"])
def test_pruned_levels_train_parts_of_the_whole(kind):
    """A gradient through a pruned level is the whole network's whose cut channels are silent; elsewhere it is zero."""
    network, (images, labels) = family("tower"), examples("tower")
    structure = structure_of(network)
    kept = {"blocks.1.expand": [3, 0, 5, 6, 9, 14]}
    cuts, proxy = tensor_cuts(structure, kept), prune(network, kept, structure)
    tuning = tuned(network, settings(kind), "tower")
    level = tuning.add_level(proxy, cuts)
    parameters = dict(zip(tuning.state(), tuning.parameters()))
    for parameter in parameters.values():
        parameter.grad = None
    logits = tuning(tuning.frozen(level).features(images).detach(), level)
    nn.functional.cross_entropy(logits, labels).backward()
    found = {key: parameter.grad.clone() for key, parameter in parameters.items() if parameter.grad is not None}
    # by hand: the whole network, its other channels silenced behind the depthwise convolution's norm
    silent = torch.zeros(16, dtype=torch.float64)
    silent[kept["blocks.1.expand"]] = 1
    tail = tuning._levels[0]._tail
    hook = tail.get_submodule("blocks.1.norm2").register_forward_hook(lambda module, inputs, output: output * silent[:, None, None])
    for parameter in parameters.values():
        parameter.grad = None
    wanted = tuning(tuning.frozen().features(images).detach())
    hook.remove()
    torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-10)
    nn.functional.cross_entropy(wanted, labels).backward()
    expand, project = cuts["blocks.1.expand.weight"], cuts["blocks.1.project.weight"]
    own = dict(cuts, **{"blocks.1.expand.lora_B": expand, "blocks.1.project.lora_A": project})
    for key, gradient in found.items():
        slices = own.get(key, [])
        torch.testing.assert_close(cut(gradient, slices), cut(parameters[key].grad, slices), rtol=1e-8, atol=1e-11)
        is_there = scatter(torch.ones_like(cut(gradient, slices)), slices, torch.zeros_like(gradient))
        assert not gradient[is_there == 0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_state_and_restore(kind):
    tuning = tuned(family("tower"), settings(kind), "tower")
    state = {key: tensor.clone() for key, tensor in tuning.state().items()}
    other = Tuning(family("tower"), settings(kind)).eval()
    pointers = [parameter.data_ptr() for parameter in other.parameters()]
    other.restore(state)
    assert [parameter.data_ptr() for parameter in other.parameters()] == pointers
    assert list(other.state()) == list(state)
    images, _ = examples("tower")
    assert torch.equal(other(other.frozen().features(images)), tuning(tuning.frozen().features(images)))


class Source:
    """A few batches of random images, two levels in turns."""

    needs_level_batches, threads, usable = True, None, list(range(16))

    def __init__(self, tuning, resolutions):
        self._tuning, self._resolutions = tuning, resolutions

    def stream(self, batches, epoch, levels):
        for indices in batches:
            level = int(levels[indices[0]])
            size = self._resolutions[level]
            images = torch.cat([examples("tower", 1, 100 * epoch + index, torch.float32, size)[0] for index in indices])
            yield indices, self._tuning.frozen(level).features(images).detach(), level


class Interrupt:
    signal_name = None

    def __init__(self, last=None):
        self.last, self.checks = last, 0

    def check(self):
        self.checks += 1
        if self.checks == self.last:
            raise KeyboardInterrupt


class Folder:
    def write_metrics(self, rows):
        pass


def run(folder, kind, last=None):
    """A run with two levels that checkpoints after each batch, killed at its `last` check; returns its tensors."""
    torch.manual_seed(0)
    network = family("tower", dtype=torch.float32).float()
    tuning = Tuning(network, settings(kind, dropout=0.3))
    tuning.add_level(network.without_blocks(["blocks.2"]))
    progress, best, clock, interrupt = Progress(), {}, Clock(), Interrupt(last)
    parts = Parts(Source(tuning, [16, 12]), step_of(tuning), OpenGate(), FixedRouter([0, 1] * 8), Labels(torch.arange(16) % 4),
                  lambda trainable: (None, None), step_of(tuning)._settings, epochs=2, batch_size=4, seed=3)
    writer = CheckpointWriter(folder)
    saver = Saver(parts, progress, best, clock, writer, Folder(), 0.0)
    checkpoint = read_checkpoint(folder)
    if checkpoint:
        saver.restore(*checkpoint)
        assert progress.epoch or progress.batch
    try:
        run_loop(parts, progress, best, clock, saver, interrupt)
    except KeyboardInterrupt:
        return None
    finally:
        writer.close()
    return {key: tensor.clone() for key, tensor in tuning.state().items()}


@pytest.mark.parametrize("kind", ["adapter", "lora", "all"])
def test_a_killed_run_ends_with_the_same_bits(tmp_path, kind):
    whole = run(tmp_path / "whole", kind)
    assert run(tmp_path / "killed", kind, last=2) is None
    assert run(tmp_path / "killed", kind, last=4) is None
    resumed = run(tmp_path / "killed", kind)
    assert list(resumed) == list(whole)
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), key
