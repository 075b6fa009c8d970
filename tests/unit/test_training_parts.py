"""Sampler, gate, router, bridge map, schedules, checkpoint packing: against their formulas."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.difficulty import fit_residual_predictor
from piebridge.core.direct_step import DirectStep
from piebridge.core.errors import UserError
from piebridge.core.gate import BatchGate, LossGate, OpenGate
from piebridge.core.optimizers import build_optimizer, learning_rate
from piebridge.core.proxies import expected_milliseconds, parse_spec
from piebridge.core.router import DataAwareRouter
from piebridge.core.sampler import epoch_batches
from piebridge.core.step import EagerStep, gated_loss


def test_an_epoch_has_every_sample_once_and_one_level_per_batch():
    levels = np.array([0, 1, 2, 1, 0, 2, 1, 1, 1, 0])
    batches = epoch_batches(10, 4, seed=3, epoch=5, levels=levels)
    assert sorted(index for batch in batches for index in batch) == list(range(10))
    assert all(len({levels[index] for index in batch}) == 1 for batch in batches)
    assert [levels[batch[0]] for batch in batches] == [0, 1, 1, 2]
    assert batches == epoch_batches(10, 4, seed=3, epoch=5, levels=levels)
    assert batches != epoch_batches(10, 4, seed=3, epoch=6, levels=levels)


def test_nothing_is_dropped_without_levels():
    assert sorted(sum(epoch_batches(11, 4, 0, 0), [])) == list(range(11))


def test_gate_follows_the_papers_average():
    gate = LossGate(momentum=0.8)
    assert gate.select(torch.tensor([1.0, 3.0])) is None  # all; theta starts at the first loss: 2.0
    assert gate.select(torch.tensor([1.0, 5.0]))[0].tolist() == [False, True]  # theta -> 0.8 * 2 + 0.2 * 3 = 2.2
    assert gate.state()["threshold"] == pytest.approx(2.2)
    is_selected, weights = gate.select(torch.tensor([2.1, 2.3]), indices=[7, 8])
    assert is_selected.tolist() == [False, True] and weights is None


def test_skipped_samples_become_cheaper_from_the_next_epoch_on():
    router = DataAwareRouter(np.array([0, 1, 3]), cheapest=3)
    router.update([0, 1, 2], torch.tensor([2.0, 0.5, 0.5]), torch.tensor([True, False, False]))
    assert router.levels.tolist() == [0, 1, 3]
    restored = DataAwareRouter(np.array([0, 0, 0]), cheapest=3)
    restored.restore(router.state())
    for each in (router, restored):
        each.end_epoch()
        assert each.levels.tolist() == [0, 2, 3]


def test_bridge_map_recovers_a_linear_relation():
    random = np.random.RandomState(0)
    original = random.randn(400, 6)
    proxy = 0.5 * original @ (np.eye(6) + 0.2 * random.randn(6, 6)) + 3
    bridge, residuals = fit_bridge_map(proxy[:300], original[:300])
    assert np.abs(bridge(proxy[300:].astype(np.float32)) - original[300:]).max() < 0.1
    assert residuals.shape == (300,) and residuals.max() < 0.2


def test_bridge_residuals_are_leave_one_out_errors():
    """e_i / (1 - h_ii) equals refitting without sample i, up to the mean and the multiple that are fitted on all."""
    random = np.random.RandomState(1)
    proxy, original = random.randn(12, 5), random.randn(12, 5)
    _, residuals = fit_bridge_map(proxy, original, penalties=(1.0,))
    inputs, targets = proxy - proxy.mean(0), original - original.mean(0)
    targets = targets - (inputs * targets).sum() / (inputs ** 2).sum() * inputs
    penalty = np.maximum(np.linalg.eigvalsh(inputs @ inputs.T), 0).mean()
    for left_out in range(12):
        design = np.hstack([inputs, np.ones((12, 1))])
        keep = np.arange(12) != left_out
        ridge = np.diag([penalty] * 5 + [0.0])
        weights = np.linalg.solve(design[keep].T @ design[keep] + ridge, design[keep].T @ targets[keep])
        error = np.linalg.norm(targets[left_out] - design[left_out] @ weights) / np.linalg.norm(original[left_out])
        assert residuals[left_out] == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("proxy, original", [(np.ones((1, 3)), np.ones((1, 3))), (np.ones((4, 3)), np.ones((4, 2))),
                                             (np.full((4, 3), np.nan), np.ones((4, 3)))])
def test_bridge_map_refuses_what_it_cannot_fit(proxy, original):
    with pytest.raises(ValueError, match="bridge map"):
        fit_bridge_map(proxy, original)


def test_constant_features_still_give_a_map():
    bridge, residuals = fit_bridge_map(np.ones((10, 4)), np.full((10, 4), 2.0))
    assert np.allclose(bridge(np.ones((1, 4), np.float32)), 2.0) and np.allclose(residuals, 0)


def test_residual_predictor_ranks_unseen_samples():
    random = np.random.RandomState(0)
    features = random.randn(200, 32)
    direction = features / np.linalg.norm(features, axis=1, keepdims=True)
    residuals = np.exp(2 * direction[:, 0] - 1)
    predictor, _ = fit_residual_predictor(features[:150], residuals[:150])
    assert np.corrcoef(np.log(predictor(features[150:])[:, 0]), np.log(residuals[150:]))[0, 1] > 0.9


def test_cosine_schedule():
    settings = SimpleNamespace(schedule="cosine", lr=0.2)
    assert [learning_rate(settings, share) for share in (0, 0.5, 1)] == pytest.approx([0.2, 0.1, 0.0])
    assert learning_rate(settings, 1 / 3) == pytest.approx(0.1 * (1 + math.cos(math.pi / 3)))


@pytest.mark.parametrize("kind, reference", [
    ("adamw", lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.3)),
    ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.7, weight_decay=0.3))])
def test_update_rules_equal_torchs_in_float64(kind, reference):
    torch.manual_seed(0)
    ours, theirs = [[torch.nn.Parameter(tensor.clone()) for tensor in
                     (torch.arange(6.0, dtype=torch.float64).view(2, 3), torch.ones(4, dtype=torch.float64))] for _ in range(2)]
    rule = build_optimizer(ours, SimpleNamespace(kind=kind, momentum=0.7, weight_decay=0.3))
    peer = reference(theirs)
    for step in range(20):
        for parameters, optimizer in ((ours, rule), (theirs, peer)):
            optimizer.zero_grad()
            sum(((parameter - step) ** 2).sum() for parameter in parameters[:1 + step % 2]).backward()  # one has no gradient now and then
        rule.step(0.05)
        peer.step()
        if step == 10:  # a checkpoint changes nothing
            state = {name: tensor.clone() for name, tensor in rule.state().items()}
            rule = build_optimizer(ours, rule.settings)
            rule.restore(state)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("text, expected", [("160px", (160, 0, "float")), ("224px-drop2", (224, 2, "float")),
                                            ("192px-int8", (192, 0, "int8")), ("96px-drop1-int8", (96, 1, "int8"))])
def test_proxy_specifications(text, expected):
    assert tuple(parse_spec(text)) == expected and str(parse_spec(text)) == text


def test_a_wrong_proxy_is_refused_with_an_example():
    with pytest.raises(UserError, match="'half' is not a proxy; write PIXELSpx"):
        parse_spec("half")


def test_expected_cost_of_a_cascade():
    # the cheap level (1 ms) keeps 40 %, the dearer one (2 ms) 90 % of all, the original takes 4 ms
    assert expected_milliseconds([2, 1], [0.9, 0.4], 4, epochs=1) == pytest.approx(1 + 0.6 * 2 + 0.1 * 4)
    assert expected_milliseconds([2, 1], [0.9, 0.4], 4, epochs=3) == pytest.approx(2.6 + 2 * (0.4 * 1 + 0.5 * 2 + 0.1 * 4))
    assert expected_milliseconds([], [], 4, epochs=12) == 48


class Head(torch.nn.Linear):
    """A linear head as a step sees what it trains."""

    head = property(lambda self: self)

    def forward(self, inputs, level=0):
        return super().forward(inputs)


class WeighingGate(OpenGate):
    """Every second sample, at twice its weight, and the third one never."""

    def select(self, losses, indices=None):
        is_selected = torch.arange(len(losses)) % 2 == 0
        return is_selected & (torch.arange(len(losses)) != 2), torch.full_like(losses, 2.0)


class ClosedGate(OpenGate):
    def select(self, losses, indices=None):
        return torch.zeros(len(losses), dtype=torch.bool), None


def test_the_loss_that_a_gate_makes():
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0])
    is_selected = torch.tensor([True, False, False, True])
    assert gated_loss(losses, None) == 3.75
    assert gated_loss(losses, (is_selected, None)) == 4.5
    assert gated_loss(losses, (is_selected, torch.tensor([1.0, 9.0, 9.0, 3.0]))) == (1 + 3 * 8) / 4
    assert gated_loss(losses, (torch.zeros(4, dtype=torch.bool), None)) is None


def test_a_batchs_gate_knows_its_samples():
    seen = []
    gate = OpenGate()
    gate.select = lambda losses, indices: seen.append((losses, indices))
    assert BatchGate(gate, [4, 5]).select("losses") is None and seen == [("losses", [4, 5])]


@pytest.mark.parametrize("gate", [OpenGate(), LossGate(0.8), WeighingGate(), ClosedGate()])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_direct_step_is_autograds_in_float64(gate, smoothing):
    settings = SimpleNamespace(kind="adamw", lr=0.02, weight_decay=0.01, schedule="cosine", label_smoothing=smoothing)
    torch.manual_seed(0)
    heads = [Head(12, 5).double() for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    steps = [EagerStep(heads[0], settings), DirectStep(heads[1], settings)]
    gates = [copy.deepcopy(gate) for _ in steps]
    for number in range(20):
        inputs, labels = torch.randn(6, 12, dtype=torch.float64), torch.randint(0, 5, (6,))
        (losses, selected), (direct_losses, direct_selected) = [
            step(inputs, labels, each, number / 20) for step, each in zip(steps, gates)]
        torch.testing.assert_close(direct_losses, losses, rtol=0, atol=1e-12)
        assert selected is direct_selected is None or torch.equal(selected, direct_selected)
        if selected is None or bool(selected.any()):
            torch.testing.assert_close(heads[1].weight.grad, heads[0].weight.grad, rtol=0, atol=1e-12)
            torch.testing.assert_close(heads[1].bias.grad, heads[0].bias.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(heads[1].weight, heads[0].weight, rtol=0, atol=1e-12)
