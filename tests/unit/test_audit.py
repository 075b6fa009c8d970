"""The audit: gradients against autograd on the plain module, and a level whose gradients point elsewhere is given up."""

import copy
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forge_examples import Tower, copy_of, images, module_of, network_of

from piebridge.core.audit import AuditedStep, gradient
from piebridge.core.gate import BatchGate, OpenGate
from piebridge.core.router import DataAwareRouter
from piebridge.core.step import EagerStep
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")

RULE = SimpleNamespace(kind="sgd", lr=1e-3, weight_decay=0.0, schedule="constant", label_smoothing=0.1, momentum=0.0)
LAST = SimpleNamespace(kind="last_k", last_k=1)


def opposite(network):
    """A proxy that is deliberately bad: its second block's correction has the wrong sign, and ten times the size."""
    proxy = copy_of(network)
    with torch.no_grad():
        for key, parameter in proxy.named_parameters():
            if key.startswith("blocks.1.norm3"):
                parameter.mul_(-10)
    return proxy


@pytest.fixture
def tuned():
    """(original, Tuning of its last block, with level 1 the original once more and level 2 a bad proxy)."""
    network = network_of(Tower())
    tuning = Tuning(network, LAST)
    assert [tuning.add_level(copy_of(network)), tuning.add_level(opposite(network))] == [1, 2]
    return network, tuning


def audited(tuning, router, share=0.5, floor=0.5):
    x = images(40)
    frozen = tuning.frozen(0)
    step = AuditedStep(EagerStep(tuning, RULE), router, lambda indices, epoch: frozen.features(x[indices]).detach(), share, floor, 0.1)
    return x, step


def run(tuning, router, step, x, level, batches):
    frozen = tuning.frozen(level)
    for number in range(batches):
        indices = [index for index in range(40) if router.levels[index] == level][4 * number:4 * number + 4]
        step(frozen.features(x[indices]).detach(), torch.tensor(indices) % 5, BatchGate(OpenGate(), indices), 0.0, level)


def test_the_gradient_is_autograds_on_the_plain_module(tuned):
    network, tuning = tuned
    x, labels = images(6), torch.arange(6) % 5
    plain = module_of(network, copy.deepcopy(Tower()))
    found = gradient(tuning, tuning.frozen(0).features(x).detach(), labels, 0, 0.1)
    F.cross_entropy(plain(x), labels, label_smoothing=0.1).backward()
    by_name = dict(plain.named_parameters())
    expected = torch.cat([by_name[key].grad.flatten() for key in tuning.state()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert all(parameter.grad is None for parameter in tuning.parameters()) and tuning.training


def test_a_proxy_that_misleads_is_given_up_and_a_good_one_is_not(tuned, caplog):
    _, tuning = tuned
    for level, cheapest in ((1, 2), (2, 1)):
        router = DataAwareRouter(np.full(40, level), cheapest=2)
        x, step = audited(tuning, router)
        with caplog.at_level(logging.WARNING, "piebridge"):
            run(tuning, router, step, x, level, 8)
        count, mean = step.cosines[level]
        assert count == 4 and (mean == pytest.approx(1) if level == 1 else mean < 0.5)
        router.end_epoch()
        assert router.cheapest == cheapest and set(router.levels) == {1}
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("level 2 is given up: its gradients have a mean cosine of ")


def test_the_audit_looks_at_the_share_of_batches_and_changes_no_training(tuned):
    network, tuning = tuned
    router = DataAwareRouter(np.array([0] * 20 + [1] * 20), cheapest=2)
    x, step = audited(tuning, router, share=1 / 3)
    run(tuning, router, step, x, 0, 5)  # the original needs no audit
    assert step.cosines == {}
    run(tuning, router, step, x, 1, 5)
    assert step.cosines[1][0] == 1
    plain = Tuning(network_of(Tower()), LAST)
    plain.add_level(copy_of(network))
    alone = EagerStep(plain, RULE)
    run(plain, router, alone, x, 0, 5)
    run(plain, router, alone, x, 1, 5)
    for key, tensor in plain.state().items():
        assert torch.equal(tensor, tuning.state()[key])


def test_a_restored_audit_goes_on_alike(tuned):
    _, tuning = tuned
    router = DataAwareRouter(np.full(40, 2), cheapest=2)
    x, step = audited(tuning, router, share=1 / 3)
    run(tuning, router, step, x, 2, 5)
    step.end_epoch(0.5)
    state = {name: tensor.clone() for name, tensor in step.state().items()}
    other = audited(tuning, router, share=1 / 3)[1]
    other.restore(state)
    assert other.cosines == step.cosines and other.state().keys() == state.keys()
    assert torch.equal(other.state()["audit/counts"], torch.tensor([1, 5]))
