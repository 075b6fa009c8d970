"""ElasticTrainer's step: importance by its definition, times of each tensor, what is trained, and where the backward ends."""

import copy
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forge_examples import Tower, images, module_of, network_of
from pet_examples import batch, run

from piebridge.core import elastic_trainer, tensor_timing
from piebridge.core.backends import device_profile
from piebridge.core.elastic_trainer import ElasticStep, tensor_importance
from piebridge.core.gate import OpenGate
from piebridge.core.optimizers import build_optimizer
from piebridge.core.step import EagerStep
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")
PET = SimpleNamespace(kind="all")


@pytest.fixture(autouse=True)
def profile(tmp_path, monkeypatch):
    """A device profile of its own for each test."""
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))


def optimizer(**changes):
    return SimpleNamespace(**dict(dict(kind="adamw", lr=3e-3, momentum=0.9, weight_decay=0.01, schedule="constant", label_smoothing=0.1),
                                  **changes))


def step_of(rho=0.4, every=1, **changes):
    return ElasticStep(Tuning(network_of(Tower()), PET), optimizer(**changes), SimpleNamespace(rho=rho, every=every))


@pytest.fixture
def counted_times(monkeypatch):
    """A thousandth of a second for every number whose gradient is asked of a node, in place of measured times."""
    monkeypatch.setattr(tensor_timing, "_seconds", lambda part, wanted, repeats, clock: sum(each.numel() for each in wanted) / 1000)


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


# The profile --------------------------------------------------------------------------------------------------------------

def test_times_of_a_chain_by_hand(counted_times):
    """Head of 5 x 24 after an average over 8 x 8 of 24 channels; 2 images."""
    timing = tensor_timing.measure_timing(network_of(Tower()), images(2))
    assert list(timing.own)[:3] == ["stem.weight", "stem_norm.weight", "stem_norm.bias"]  # the order of the forward
    assert list(timing.own)[-2:] == ["head.weight", "head.bias"]
    assert timing.own["stem.weight"] == pytest.approx(8 * 27 / 1000) and timing.own["head.weight"] == pytest.approx(0.120)
    assert timing.reach["head.weight"] == timing.reach["head.bias"] == 0
    head, pooled, before = 2 * 24, 2 * 24, 2 * 24 * 64  # what each passes on: the head, flatten, the pool
    assert timing.reach["last_norm.weight"] == pytest.approx((head + pooled + 2 * before) / 1000)  # and ReLU6
    assert timing.reach["last.weight"] == pytest.approx((head + pooled + 3 * before) / 1000)  # and the batch norm
    reaches = list(timing.reach.values())
    assert reaches == sorted(reaches, reverse=True)
    assert timing.total == pytest.approx(sum(timing.own.values()) + timing.reach["stem.weight"])


def test_a_profile_is_measured_and_changes_nothing():
    network = network_of(Tower())
    before, calls = copies(network.state_dict()), []
    original = tensor_timing.Node.backward
    try:
        tensor_timing.Node.backward = lambda self, wanted: calls.append(len(wanted)) or original(self, wanted)
        timing = tensor_timing.measure_timing(network, images(2), repeats=2)
    finally:
        tensor_timing.Node.backward = original
    assert set(timing.own) == {key for key, _ in network.named_parameters()}
    assert all(seconds >= 0 for seconds in timing.own.values()) and timing.total > max(timing.reach.values()) > 0
    assert len(calls) % 2 == 0 and all(parameter.grad is None for parameter in network.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not network.training


def test_a_profile_is_made_once_for_each_network_and_batch(monkeypatch):
    network, made = network_of(Tower()), []
    original = tensor_timing.measure_timing
    monkeypatch.setattr(tensor_timing, "measure_timing", lambda *given: made.append(1) or original(*given))
    first = tensor_timing.timing_of(network, images(2))
    assert tensor_timing.timing_of(network, images(2, seed=5)) == first and len(made) == 1
    tensor_timing.timing_of(network, images(3))
    assert len(made) == 2
    tensor_timing.timing_of(network_of(Tower(hidden=8)), images(2))
    assert len(made) == 3
    monkeypatch.setattr(device_profile, "recall", lambda key: {"own": first.own, "reach": {"stem.weight": 1.0}, "total": 1.0})
    assert set(tensor_timing.timing_of(network, images(2)).reach) == set(first.own) and len(made) == 4


def test_tensors_that_enter_as_parameters_have_times(counted_times):
    models = pytest.importorskip("torchvision.models")
    module = models.VisionTransformer(32, 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5)
    network = network_of(module, "vit", 32)
    timing = tensor_timing.measure_timing(network, images(2, 32))
    parameters = dict(network.named_parameters())
    assert set(timing.own) == set(parameters)
    for key in ("class_token", "encoder.pos_embedding", "conv_proj.weight"):
        assert timing.own[key] == pytest.approx(parameters[key].numel() / 1000)
    assert timing.reach["class_token"] > timing.reach["encoder.pos_embedding"] > timing.reach["heads.head.weight"] == 0


# Importance ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_importance_is_gradient_times_update(kind):
    """Against the plain module, torch's own optimizer and autograd: after three steps, so that momentum counts."""
    settings = optimizer(kind=kind, lr=0.02)
    tuning = Tuning(network_of(Tower()), PET)
    module = module_of(tuning.network, Tower()).train()
    rule = build_optimizer(tuning.parameters(), settings)
    kinds = {"sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
             "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.01)}
    peer = kinds[kind](list(module.parameters()))
    for number in range(3):
        inputs, labels = batch(number)
        for forward, each in ((tuning, rule), (module, peer)):
            each.zero_grad()
            F.cross_entropy(forward(inputs), labels).backward()
        rule.step(0.02)
        peer.step()
    inputs, labels = batch(9)
    tuned, state = copies(tuning.state()), copies(rule.state())
    importance = tensor_importance(lambda: F.cross_entropy(tuning(inputs), labels), tuning, rule, 0.02)
    assert all(torch.equal(tensor, tuned[key]) for key, tensor in tuning.state().items())  # batch norm's statistics too
    assert all(torch.equal(tensor, state[key]) for key, tensor in rule.state().items())

    before = [parameter.detach().clone() for parameter in module.parameters()]
    for is_first in (True, False):
        peer.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()
        if is_first:
            peer.step()
    expected = [-(parameter.grad * (parameter - old)).sum().item() for parameter, old in zip(module.parameters(), before)]
    np.testing.assert_allclose(importance, expected, rtol=1e-6, atol=1e-12)


# The step -----------------------------------------------------------------------------------------------------------------

def gradient_nodes(value):
    """(how many autograd nodes a value hangs on, the tensors at their ends)."""
    seen, ends, waiting = set(), set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ends |= {id(node.variable)} if hasattr(node, "variable") else set()
            waiting.extend(following for following, _ in node.next_functions)
    return len(seen), ends


def test_only_the_chosen_change_and_the_backward_ends_at_the_deepest(counted_times, caplog):
    step = step_of(rho=0.4)
    before = copies(step.trainable.state())
    whole, _ = gradient_nodes(step.trainable(batch(0)[0]))
    with caplog.at_level(logging.INFO):
        step(*batch(0), OpenGate(), 0.0)
    network = step.trainable.network
    chosen = [key for key, parameter in network.named_parameters() if parameter.requires_grad]
    assert 0 < len(chosen) < len(before)
    timing = tensor_timing.measure_timing(network_of(Tower()), batch(0)[0])
    seconds = sum(timing.own[key] for key in chosen) + max(timing.reach[key] for key in chosen)
    assert seconds <= 0.4 * timing.total
    changed = [key for key, parameter in network.named_parameters() if not torch.equal(parameter, before[key])]
    assert changed == chosen
    assert [key for key, parameter in network.named_parameters() if parameter.grad is not None] == chosen

    count, ends = gradient_nodes(step.trainable(batch(1)[0]))
    assert count < whole and ends == {id(parameter) for parameter in network.parameters() if parameter.requires_grad}
    flags = {}
    network.observe(batch(1)[0], lambda name, value: flags.update({name: value.requires_grad}))
    owners = {key.rpartition(".")[0] for key in chosen}
    deepest = next(place for place, node in enumerate(network.description["nodes"]) if node.get("module") in owners)
    assert [flags[node["name"]] for node in network.description["nodes"]].index(True) == deepest
    assert f"ElasticTrainer: {len(chosen)} of {len(list(network.parameters()))} tensors are trained" in caplog.text


def test_the_choice_is_made_anew_each_so_many_epochs(counted_times, monkeypatch):
    step, made = step_of(every=2), []
    original = ElasticStep._choose
    monkeypatch.setattr(ElasticStep, "_choose", lambda self, *rest: made.append(1) or original(self, *rest))
    for number in range(12):
        run(step, number, number + 1)
        assert len(made) == number // 6 + 1


def test_with_time_for_everything_it_is_full_fine_tuning(counted_times, monkeypatch):
    monkeypatch.setattr(elastic_trainer, "tensor_importance", lambda loss, trainable, optimizer, rate: [1.0] * len(optimizer.parameters))
    step, plain = step_of(rho=1.0), EagerStep(Tuning(network_of(Tower()), PET), optimizer())
    for number in range(3):
        for each in (step, plain):
            each(*batch(number), OpenGate(), 0.0)
    state = plain.trainable.state()
    assert all(torch.equal(tensor, state[key]) for key, tensor in step.trainable.state().items())


def test_no_time_for_anything_leaves_the_head(counted_times, caplog):
    step = step_of(rho=0.0)
    step(*batch(0), OpenGate(), 0.0)
    assert [key for key, parameter in step.trainable.network.named_parameters() if parameter.requires_grad] == ["head.weight"]
    assert "elastic.rho=0 leaves time for no tensor that lowers the loss" in caplog.text


def test_a_resumed_run_ends_with_the_same_bits(tmp_path, monkeypatch):
    """With measured times, which no second profile repeats: on a device that has lost its own."""
    whole = step_of()
    run(whole, 0, 5)
    saved = [copies(each.state()) for each in (whole, whole.trainable)]
    run(whole, 5, 12)
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "another"))
    again = step_of()
    again.restore(saved[0])
    again.trainable.restore(saved[1])
    assert torch.equal(again.state()["is_chosen"], saved[0]["is_chosen"]) and torch.equal(again.state()["own"], saved[0]["own"])
    run(again, 5, 12)
    for one, other in zip((whole, whole.trainable), (again, again.trainable)):
        assert one.state().keys() == other.state().keys()
        for name, tensor in one.state().items():
            assert torch.equal(tensor, other.state()[name]), name


def test_a_run_resumed_at_the_end_of_an_epoch_chooses_anew(counted_times):
    whole = step_of()
    run(whole, 0, 3)
    saved = [copies(each.state()) for each in (whole, whole.trainable)]
    again = step_of()
    again.restore(copy.copy(saved[0]))
    again.trainable.restore(saved[1])
    for each in (whole, again):
        run(each, 3, 4)
    for name, tensor in whole.state().items():
        assert torch.equal(tensor, again.state()[name]), name


def test_random_numbers_are_those_of_a_run_without_choosing(counted_times):
    step = step_of()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    step(*batch(0), OpenGate(), 0.0)
    assert torch.equal(torch.rand(2), expected)
