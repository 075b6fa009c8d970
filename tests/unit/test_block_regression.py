"""Block-wise regression: gradients against autograd on the plain layers, nothing gets worse, and interruption changes nothing."""

import numpy as np
import pytest
import torch
from forge_examples import Tower, copy_of, module_of, network_of, noisy, pairs
from torch.nn import functional as F

from piebridge.core.errors import UserError
from piebridge.forge.alignment import measure_alignment
from piebridge.forge.block_regression import RegressionSettings, regress_blocks, regression_loss
from piebridge.forge.segments import own_parameters, walk

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = RegressionSettings(epochs=3, batch_size=8, rate=3e-3)


@pytest.fixture(scope="module")
def network():
    return network_of(Tower())


def test_gradients_are_those_of_the_plain_block(network):
    proxy = noisy(network, 0.3)
    block = module_of(proxy, Tower()).blocks[1]
    chosen, unit = np.array([3, 0, 12, 7]), 2.5
    with own_parameters(proxy):
        stretches = walk(network, proxy, pairs(16))  # its files are there as long as it is
        stretch = next(each for each in stretches if each.name == "blocks.1")
        for parameter in stretch.proxy.parameters():
            parameter.requires_grad_(True)
        loss = regression_loss(stretch, chosen, unit)
        loss.backward()
        expected = F.mse_loss(block(stretch.inputs.read(chosen)), stretch.targets.read(chosen)) / unit
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12) and loss.item() > 0.001
        found = dict(stretch.proxy.named_parameters())
        plain = {f"blocks.1.{key}": parameter for key, parameter in block.named_parameters()}
        assert set(found) == set(plain)
        for key, parameter in plain.items():
            torch.testing.assert_close(found[key].grad, parameter.grad, rtol=1e-9, atol=1e-14)
        outside = {key: parameter for key, parameter in proxy.named_parameters() if key not in plain}
        assert outside and all(parameter.grad is None for parameter in outside.values())


def test_every_block_gets_nearer_and_the_original_stays(network):
    proxy, tap = noisy(network, 0.3), network.description["tap"]
    before, statistics = network.fingerprint(), {key: buffer.clone() for key, buffer in proxy.named_buffers()}
    raw = measure_alignment(network, proxy, pairs(32, seed=2))[tap]
    report = regress_blocks(network, proxy, pairs(96), SETTINGS)
    assert [each["block"] for each in report] == ["blocks.0", "blocks.1", "blocks.2", "tail"]
    assert all(each["after"] < each["before"] and each["epoch"] > 0 for each in report)
    assert measure_alignment(network, proxy, pairs(32, seed=2))[tap]["relative_error"] < 0.8 * raw["relative_error"]
    assert network.fingerprint() == before
    assert all(torch.equal(buffer, statistics[key]) for key, buffer in proxy.named_buffers())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in proxy.parameters())


def test_what_would_get_worse_stays(network):
    proxy = copy_of(network)
    before = dict(proxy.named_parameters())
    report = regress_blocks(network, proxy, pairs(16), RegressionSettings(epochs=2, rate=0.1))
    assert [(each["before"], each["after"], each["epoch"]) for each in report] == [(0, 0, 0)] * 4
    assert all(parameter is before[key] for key, parameter in proxy.named_parameters())


def test_at_another_resolution_and_without_a_block(network):
    tap = network.description["tap"]
    for proxy, size in ((copy_of(network), 10), (network.without_blocks(["blocks.1"]), None)):
        raw = measure_alignment(network, proxy, pairs(32, size, seed=2))[tap]["relative_error"]
        regress_blocks(network, proxy, pairs(64, size), SETTINGS)
        assert measure_alignment(network, proxy, pairs(32, size, seed=2))[tap]["relative_error"] < raw


def test_of_the_fewest_images_one_is_trained_on_and_one_held_out(network):
    for share in (0.01, 0.99):
        report = regress_blocks(network, noisy(network), pairs(8), RegressionSettings(epochs=1, held_out=share))
        assert all(0 < each["after"] <= each["before"] for each in report)


class After:
    """Raises at its n-th call."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("calls", [1, 20, 43])  # in the first, the second and the last block: 3 epochs of 4 steps (28 images) each
def test_an_interrupted_alignment_ends_as_an_undisturbed_one(network, tmp_path, calls):
    undisturbed = noisy(network)
    report = regress_blocks(network, undisturbed, pairs(32), SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        regress_blocks(network, noisy(network), pairs(32), SETTINGS, tmp_path, on_step=After(calls))
    assert (tmp_path / "state.safetensors").exists() == (calls > 12)
    resumed, steps = noisy(network), []
    assert regress_blocks(network, resumed, pairs(32), SETTINGS, tmp_path, on_step=lambda: steps.append(0)) == report
    assert len(steps) == 48 - calls // 12 * 12
    assert all(torch.equal(tensor, undisturbed.state_dict()[key]) for key, tensor in resumed.state_dict().items())
    again = noisy(network)  # the finished work is read, not done again
    assert regress_blocks(network, again, pairs(32), SETTINGS, tmp_path, on_step=After(0)) == report
    assert again.fingerprint() == resumed.fingerprint()


def test_a_checkpoint_of_other_work_is_refused(network, tmp_path):
    regress_blocks(network, noisy(network), pairs(16), RegressionSettings(epochs=1), tmp_path)
    for proxy, settings in ((noisy(network, seed=6), RegressionSettings(epochs=1)), (noisy(network), RegressionSettings(epochs=2))):
        with pytest.raises(UserError, match="state.safetensors: is of other networks or settings; delete it, or give another folder"):
            regress_blocks(network, proxy, pairs(16), settings, tmp_path)
