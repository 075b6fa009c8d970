"""Gates and pruners that draw lots: unbiased where they say so, by their formulas, and the same when resumed."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forge_examples import Tower, images, network_of

from piebridge.config_schema import Gate
from piebridge.core.full_batches import FullBatchStep
from piebridge.core.gate import BatchGate
from piebridge.core.gate_kinds import GATES, build_gate
from piebridge.core.optimizers import learning_rate
from piebridge.core.random_gates import InfoBatch, SelectiveBackprop, UnbiasedGate, first_full_epoch
from piebridge.core.sampler import OriginalOnly
from piebridge.core.step import EagerStep, gated_loss
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS = 4000
RULE = SimpleNamespace(kind="adamw", lr=0.02, weight_decay=0.01, schedule="cosine", label_smoothing=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def gradients():
    """Losses [24] and gradients [24, P] of samples of a linear head, by autograd, float64."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 6, generator=generator, dtype=torch.float64), torch.arange(24) % 4
    weight = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_(True)
    losses = F.cross_entropy(x @ weight.T, y, reduction="none")
    rows = [torch.autograd.grad(loss, weight, retain_graph=True)[0].flatten() for loss in losses]
    return losses.detach(), torch.stack(rows)


def assert_mean_is(draws, expected):
    """The mean of draws [n, P] lies within 4.5 of its standard errors of `expected` [P], in every component."""
    errors = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - expected).abs() <= 4.5 * errors + 1e-12).all()


@pytest.mark.parametrize("share", [0.3, 0.75])
def test_the_unbiased_gates_expected_gradient_is_the_full_one(gradients, share):
    losses, rows = gradients
    gate = UnbiasedGate(0.8, share, full_from=10, seed=3)
    assert gate.select(losses) is None  # there is no threshold before the first batch
    draws, selected = [], 0
    for _ in range(DRAWS):
        gate._running.value = float(losses.mean())
        is_selected, weights = gate.select(losses)
        draws.append((rows * (weights * is_selected)[:, None]).sum(0) / len(losses))
        selected += int(is_selected.sum())
    assert_mean_is(torch.stack(draws), rows.mean(0))
    low = int((losses <= losses.mean()).sum())
    assert selected / DRAWS == pytest.approx(24 - share * low, abs=0.2)
    biased = torch.stack([rows[losses > losses.mean()].mean(0)])
    assert (biased.mean(0) - rows.mean(0)).norm() > 0.3 * rows.mean(0).norm()  # what the plain loss gate gives instead


def test_the_gate_and_the_loss_that_a_step_takes_are_one_formula(gradients):
    losses, rows = gradients
    gate = UnbiasedGate(0.8, 0.5, full_from=10, seed=1)
    gate.select(losses)
    is_selected, weights = gate.select(losses)
    assert set(weights.tolist()) == {1.0, 2.0} and bool((weights[losses > losses.mean()] == 1).all())
    expected = sum(float(weight * loss) for weight, loss, chosen in zip(weights, losses, is_selected) if chosen) / 24
    assert float(gated_loss(losses, (is_selected, weights))) == pytest.approx(expected)


def test_the_last_epochs_run_on_everything(gradients):
    losses, _ = gradients
    gate = UnbiasedGate(0.8, 0.9, full_from=first_full_epoch(4, 0.25), seed=0)
    gate.select(losses)
    for epoch in range(4):
        assert gate.kept([5, 7], epoch) == [5, 7]
        assert (gate.select(losses) is None) == (epoch == 3)


@pytest.mark.parametrize("epochs, share, expected", [(200, 0.125, 175), (12, 0.125, 10), (2, 0.125, 1), (10, 0.0, 10), (30, 0.1, 27),
                                                     (1, 1.0, 0)])
def test_the_first_full_epoch(epochs, share, expected):
    assert first_full_epoch(epochs, share) == expected


def test_selective_backprops_probability_is_the_cdf_to_the_power_beta():
    gate = SelectiveBackprop(beta=2, history=6, seed=0)
    gate.select(torch.tensor([9.0, 1.0, 2.0, 3.0]))
    gate.select(torch.tensor([4.0, 2.0, 5.0]))  # the oldest, 9, has left the history
    history = [1.0, 2.0, 3.0, 4.0, 2.0, 5.0]
    for loss in (0.5, 2.0, 3.5, 5.0, 7.0):
        cdf = sum(each <= loss for each in history) / 6
        assert gate.probabilities(np.array([loss]))[0] == pytest.approx(cdf ** 2)


@pytest.mark.parametrize("beta", [1, 3])
def test_selective_backprop_runs_one_in_beta_plus_one(beta):
    gate, random = SelectiveBackprop(beta, history=256, seed=0), np.random.RandomState(0)
    gate.select(torch.from_numpy(random.rand(256)))
    selected = sum(int(gate.select(torch.from_numpy(random.rand(8)))[0].sum()) for _ in range(1000))
    assert selected / 8000 == pytest.approx(1 / (beta + 1), abs=0.02)


def test_an_infobatch_epochs_expected_gradient_is_the_full_one(gradients):
    losses, rows = gradients
    pruner = InfoBatch(24, 0.5, full_from=10 ** 6, seed=2)
    everyone = list(range(24))
    assert pruner.kept(everyone, 0) == everyone  # no scores yet
    pruner.gate.select(losses, everyone)
    assert pruner.kept(everyone, 0) == everyone  # the losses of an epoch count from its end on
    pruner.end_epoch()
    is_low = losses < losses.mean()
    draws, sizes = [], []
    for epoch in range(1, DRAWS):
        kept = pruner.kept(everyone, epoch)
        is_selected, weights = pruner.gate.select(losses[kept], kept)
        assert bool(is_selected.all()) and weights.tolist() == [2.0 if is_low[index] else 1.0 for index in kept]
        draws.append((rows[kept] * weights[:, None]).sum(0))
        sizes.append(len(kept))
    assert_mean_is(torch.stack(draws), rows.sum(0))
    assert np.mean(sizes) == pytest.approx(24 - 0.5 * int(is_low.sum()), abs=0.2)


def test_infobatch_prunes_only_what_it_has_seen_and_nothing_at_the_end():
    pruner = InfoBatch(6, 0.99, full_from=2, seed=0)
    pruner.gate.select(torch.tensor([1.0, 1.0, 1.0, 9.0]), [0, 1, 2, 3])
    pruner.end_epoch()
    kept = pruner.kept([0, 1, 2, 3, 5], 1)  # 4 cannot be read, 5 was never seen
    assert {3, 5} <= set(kept) and len(kept) < 5
    assert pruner.kept([0, 1, 2, 3, 5], 2) == [0, 1, 2, 3, 5] and set(pruner.weights) == {1.0}


@pytest.mark.parametrize("make", [lambda: UnbiasedGate(0.8, 0.5, 4, seed=5), lambda: SelectiveBackprop(1, 16, seed=5)])
def test_a_restored_gate_draws_what_the_other_would_have(make):
    random = np.random.RandomState(0)
    batches = [torch.from_numpy(random.rand(8)) for _ in range(12)]
    gate, other = make(), make()
    for batch in batches[:6]:
        gate.select(batch)
    other.restore(json.loads(json.dumps(gate.state())))
    for batch in batches[6:]:
        first, second = gate.select(batch), other.select(batch)
        assert torch.equal(first[0], second[0]) and (first[1] is second[1] is None or torch.equal(first[1], second[1]))


def test_who_would_go_to_a_proxy_is_left_out_before_the_gates_pruner_looks():
    router, pruner = SimpleNamespace(levels=np.array([0, 1, 0, 0, 2, 0])), InfoBatch(6, 0.99, full_from=10, seed=0)
    both = OriginalOnly(router, pruner)
    assert both.kept([0, 1, 2, 3, 4, 5], 0) == [0, 2, 3, 5]
    pruner.observe(torch.tensor([1.0, 1.0, 1.0, 9.0]), [0, 2, 3, 5])
    both.end_epoch()
    assert both.kept([0, 1, 2, 3, 4, 5], 1) == pruner.kept([0, 2, 3, 5], 1) == [5]
    other = InfoBatch(6, 0.99, full_from=10, seed=0)
    OriginalOnly(router, other).restore(both.state())
    assert other.state() == pruner.state()


def test_a_pruner_restored_in_the_middle_of_an_epoch_keeps_the_same_samples():
    losses = torch.linspace(0, 1, 40, dtype=torch.float64)
    pruner, other = InfoBatch(40, 0.5, 100, seed=1), InfoBatch(40, 0.5, 100, seed=1)
    pruner.gate.select(losses, list(range(40)))
    pruner.end_epoch()
    kept = pruner.kept(list(range(40)), 1)
    pruner.gate.select(losses[:10].flip(0) * 3, kept[:10])
    other.restore(json.loads(json.dumps(pruner.state())))
    assert other.kept(list(range(40)), 1) == kept and other.weights.tolist() == pruner.weights.tolist()
    for each in (pruner, other):
        each.end_epoch()
    assert pruner.kept(list(range(40)), 2) == other.kept(list(range(40)), 2) != kept


def test_the_kinds_are_those_of_the_configuration():
    (choices,) = [field.metadata["choices"] for field in dataclasses.fields(Gate) if field.name == "kind"]
    assert set(choices) == set(GATES) | {"auto"}
    for kind in GATES:
        gate, pruner = build_gate(kind, Gate(), 12, 5, 0)
        assert pruner.kept([0, 1, 2, 3, 4], 0) == [0, 1, 2, 3, 4]
        choice = gate.select(torch.ones(2), [3, 4])
        assert choice is None or choice[0].dtype == torch.bool


# Full batches ------------------------------------------------------------------------------------------------------------

def head_tuning(seed=0):
    network = network_of(Tower(), seed=seed)
    return network, Tuning(network, SimpleNamespace(kind="head"))


def test_selected_samples_train_in_full_batches():
    """Against the same thing written out: the selected samples in order, cut into batches of four."""
    network, tuning = head_tuning()
    step, gate = FullBatchStep(EagerStep(tuning, RULE), 4, RULE.label_smoothing), SelectiveBackprop(1, 64, seed=0)
    features = network.features(images(40)).detach()
    labels = torch.arange(40) % 5
    head = copy.deepcopy(tuning.head).requires_grad_(True)
    rule = torch.optim.AdamW(head.parameters(), lr=0.02, weight_decay=0.01)
    queue = []
    for start in range(0, 40, 5):
        x, y = features[start:start + 5], labels[start:start + 5]
        with torch.no_grad():
            expected = F.cross_entropy(head(x), y, reduction="none", label_smoothing=0.1)
        losses, is_selected = step(x, y, BatchGate(gate, list(range(start, start + 5))), start / 40)
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
        queue += [index for index, chosen in zip(range(start, start + 5), is_selected) if chosen]
        while len(queue) >= 4:
            batch, queue = queue[:4], queue[4:]
            for group in rule.param_groups:
                group["lr"] = learning_rate(RULE, start / 40)
            rule.zero_grad()
            F.cross_entropy(head(features[batch]), labels[batch], label_smoothing=0.1).backward()
            rule.step()
        if start == 15:  # a checkpoint changes nothing
            state = {name: tensor.clone() for name, tensor in step.state().items()}
            step = FullBatchStep(EagerStep(tuning, RULE), 4, RULE.label_smoothing)
            step.restore(state)
    torch.testing.assert_close(tuning.head.weight, head.weight, rtol=0, atol=1e-9)
    assert len(queue) == len(step.state().get("waiting/0/labels", ()))
