"""Alignment figures against numpy on what hooks on the plain module see; the bridge map against normal equations."""

import numpy as np
import pytest
import torch
from forge_examples import SIZE, Tower, copy_of, images, module_of, network_of, noisy, pairs

from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.errors import UserError
from piebridge.forge.alignment import measure_alignment

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def network():
    return network_of(Tower())


def values_of(network, x):
    """Outputs of the three blocks and the head's input, from hooks on the plain module; numpy."""
    module, seen = module_of(network, Tower()), []
    for block in module.blocks:
        block.register_forward_hook(lambda block, inputs, output: seen.append(output.detach().numpy()))
    module.head.register_forward_hook(lambda head, inputs, output: seen.append(inputs[0].detach().numpy()))
    module(x)
    return seen


def reference(found, wanted):
    found, wanted = found.reshape(len(found), -1), wanted.reshape(len(wanted), -1)
    norms = np.linalg.norm(found, axis=1), np.linalg.norm(wanted, axis=1)
    return {"cosine": ((found * wanted).sum(1) / norms[0] / norms[1]).mean(),
            "relative_error": (np.linalg.norm(found - wanted, axis=1) / norms[1]).mean()}


def test_cosine_and_error_of_every_tap(network):
    proxy = noisy(network)
    found, wanted = values_of(proxy, images(20)), values_of(network, images(20))
    measured = measure_alignment(network, proxy, pairs(20, batch=7))  # in batches of 7, 7 and 6
    taps = [block["output"] for block in network.description["blocks"]] + [network.description["tap"]]
    assert list(measured) == taps
    for tap, f, g in zip(taps, found, wanted):
        assert measured[tap] == pytest.approx(reference(f, g), rel=1e-10)
        assert 0.5 < measured[tap]["cosine"] < 0.9999


def test_a_network_is_aligned_with_itself(network):
    for each in measure_alignment(network, copy_of(network), pairs(9)).values():
        assert each == pytest.approx({"cosine": 1.0, "relative_error": 0.0}, abs=1e-12)


def test_maps_of_another_size_are_averaged_first(network):
    measured = measure_alignment(network, network, pairs(12, size=10))
    found, wanted = values_of(network, images(12, 10)), values_of(network, images(12))
    for tap, f, g in zip(measured, found, wanted):
        f, g = (each.mean((2, 3)) if each.ndim == 4 else each for each in (f, g))
        assert measured[tap] == pytest.approx(reference(f, g), rel=1e-10)


def test_a_dropped_block_has_no_tap(network):
    proxy = network.without_blocks(["blocks.1"])
    measured = measure_alignment(network, proxy, pairs(8))
    outputs = [block["output"] for block in network.description["blocks"]]
    assert list(measured) == [outputs[0], outputs[2], network.description["tap"]]
    assert measured[outputs[0]]["cosine"] == pytest.approx(1) and measured[outputs[2]]["cosine"] < 0.999


def test_the_bridge_moves_the_heads_tap_alone(network):
    proxy = noisy(network)
    bridge, _ = fit_bridge_map(values_of(proxy, images(200, seed=3))[-1], values_of(network, images(200, seed=3))[-1])
    without, bridged = (measure_alignment(network, proxy, pairs(16), each) for each in (None, bridge))
    tap = network.description["tap"]
    found, wanted = values_of(proxy, images(16))[-1], values_of(network, images(16))[-1]
    assert bridged[tap] == pytest.approx(reference(bridge(found), wanted), rel=1e-9)
    assert bridged[tap]["relative_error"] < 0.8 * without[tap]["relative_error"]
    del without[tap], bridged[tap]
    assert bridged == without


@pytest.mark.parametrize("count, width", [(40, 12), (12, 40), (20, 20)])
def test_the_bridge_map_is_ridge_regression_whichever_side_is_smaller(count, width):
    random = np.random.RandomState(0)
    proxy = random.randn(count, width)
    original = 2 * proxy + proxy @ random.randn(width, width) * 0.3 + 0.5
    bridge, residuals = fit_bridge_map(proxy, original, penalties=(0.3,))

    def fitted(x, y):
        """The formula, primal form: (mean y, multiple a, W) and the map of x."""
        inputs, targets = x - x.mean(0), y - y.mean(0)
        multiple = (inputs * targets).sum() / (inputs ** 2).sum()
        penalty = 0.3 * (inputs ** 2).sum() / count * np.eye(width)
        weights = np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ (targets - multiple * inputs))
        return y.mean(0) + multiple * inputs + inputs @ weights, inputs, penalty
    expected, inputs, penalty = fitted(proxy, original)
    np.testing.assert_allclose(bridge(proxy.astype(np.float32)), expected, rtol=1e-4, atol=1e-4)
    leverage = np.einsum("nd,dn->n", inputs, np.linalg.solve(inputs.T @ inputs + penalty, inputs.T)) + 1 / count
    left_out = np.linalg.norm(original - expected, axis=1) / (1 - leverage) / np.linalg.norm(original, axis=1)
    np.testing.assert_allclose(residuals, left_out, rtol=1e-6)


def test_what_cannot_be_measured(network):
    with pytest.raises(UserError, match="network tower: alignment is measured on images, and there are none"):
        measure_alignment(network, network, [])
    broken = copy_of(network)
    with torch.no_grad():
        broken.get_submodule("blocks.1.project").weight[0] = float("nan")
    tap = network.description["blocks"][1]["output"]
    with pytest.raises(UserError, match=f"network tower: values at '{tap}' are not finite; are the weights or the images broken"):
        measure_alignment(network, broken, pairs(8, size=SIZE))
