"""The closed form: ridge regression against numpy.linalg.lstsq, which maps are refitted, and blocks that are restored exactly."""

import numpy as np
import pytest
import torch
from forge_examples import SIZE, Tower, copy_of, images, network_of, noisy, pairs
from torch import nn

from piebridge.core.descriptions import read_description
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.proxies import match_batch_norm
from piebridge.forge import prune, structure_of
from piebridge.forge.alignment import measure_alignment
from piebridge.forge.linear_maps import find_sites
from piebridge.forge.pruning import tensor_cuts
from piebridge.forge.reconstruction import ReconstructionSettings, reconstruct
from piebridge.forge.ridge import NormalEquations, choose_penalty
from piebridge.forge.segments import part_of, walk

pytestmark = pytest.mark.usefixtures("one_thread")

models = pytest.importorskip("torchvision.models")
EXACT = ReconstructionSettings(penalties=(1e-12,))


def rows(count, inputs=6, outputs=4, seed=0):
    random = np.random.RandomState(seed)
    x = random.randn(count, inputs) + 1
    return x, x @ np.ones((inputs, outputs)) + random.randn(count, outputs)


@pytest.mark.parametrize("has_offset", [True, False])
def test_ridge_regression_is_least_squares_with_rows_for_the_penalty(has_offset):
    x, y = rows(30)
    equations = NormalEquations(6, 4, has_offset)
    for start in (0, 13, 20):
        stop = {0: 13, 13: 20, 20: 30}[start]
        equations.add(torch.from_numpy(x[start:stop]), torch.from_numpy(y[start:stop]))
    weights, offset = equations.solve(0.2)
    centred = x - x.mean(0) if has_offset else x
    penalty = 0.2 * (centred ** 2).sum() / 6
    columns = np.hstack([x, np.ones((30, 1))]) if has_offset else x
    unpenalised = np.zeros((6, 1)) if has_offset else np.zeros((6, 0))
    expected = np.linalg.lstsq(np.vstack([columns, np.hstack([penalty ** 0.5 * np.eye(6), unpenalised])]),
                               np.vstack([y, np.zeros((6, 4))]), rcond=None)[0]
    np.testing.assert_allclose(weights, expected[:6], rtol=1e-9)
    np.testing.assert_allclose(offset, expected[6] if has_offset else np.zeros(4), rtol=1e-9)
    new_x, new_y = rows(17, seed=1)
    held_out = NormalEquations(6, 4, has_offset)
    held_out.add(torch.from_numpy(new_x), torch.from_numpy(new_y))
    expected_error = ((new_y - new_x @ weights.numpy() - offset.numpy()) ** 2).sum()
    assert held_out.error(weights, offset) == pytest.approx(expected_error)
    assert choose_penalty(equations, held_out, (1e-3, 1e3)) == 1e-3
    both = equations.plus(held_out)
    all_x = np.vstack([x, new_x])
    np.testing.assert_allclose(both.gram, all_x.T @ all_x)
    assert both.count == 47


def test_no_penalty_is_chosen_where_every_change_makes_it_worse():
    x, y = (torch.from_numpy(each) for each in rows(30))
    fitted, held_out = NormalEquations(6, 4), NormalEquations(6, 4)
    fitted.add(x, y)
    held_out.add(x, -y)
    assert choose_penalty(fitted, held_out) is None


def sites_of(name):
    """{block: [(target's operation, modules, their norms)]} of a known network."""
    description = read_description(name)
    empty = {key: torch.empty(shape, device="meta") for key, shape in expected_shapes(description).items()}
    network, found, start = GraphNetwork(description, empty), {}, "x"
    for block in description["blocks"] + [{"name": "tail", "output": description["tap"]}]:
        part = part_of(network, start, block["output"]).description
        operations = {node["name"]: node["operation"] for node in part["nodes"]}
        found[block["name"]] = [(operations[site.target], [each.module for each in site.maps], [each.norms for each in site.maps])
                                for site in find_sites(part, block["name"] != "tail")]
        start = block["output"]
    return found


def test_maps_of_a_bottleneck_before_its_relu():
    found = sites_of("resnet50")
    prefix = "layer1.0."
    assert found["layer1.0"] == [("add", [prefix + "conv3", prefix + "downsample.0"], [(prefix + "bn3",), (prefix + "downsample.1",)])]
    assert found["layer1.1"] == [("add", ["layer1.1.conv3"], [("layer1.1.bn3",)])]
    assert found["tail"] == []


def test_maps_of_inverted_residuals_and_of_what_follows_them():
    found = sites_of("efficientnet_lite0")
    assert found["blocks.0.0"] == [("BatchNorm2d", ["blocks.0.0.conv_pw"], [("blocks.0.0.bn2",)])]
    assert found["blocks.1.1"] == [("add", ["blocks.1.1.conv_pwl"], [("blocks.1.1.bn3",)])]
    assert found["tail"] == [("BatchNorm2d", ["conv_head"], [("bn2",)])]
    found = sites_of("mobilenet_v3_large")
    assert found["features.4"] == [("BatchNorm2d", ["features.4.block.3.0"], [("features.4.block.3.1",)])]
    assert [maps for _, maps, _ in found["tail"]] == [["features.16.0"], ["classifier.0"]]


def test_both_sums_of_a_transformer_block():
    prefix = "encoder.layers.encoder_layer_3."
    assert sites_of("vit_b_16")["encoder.layers.encoder_layer_3"] == [
        ("add", [prefix + "self_attention.out_proj"], [()]), ("add", [prefix + "mlp.3"], [()])]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, the second with a bias and a stride, around a shortcut with its own; ReLU after the sum."""

    def __init__(self, width, hidden, out_width):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, hidden, 3, padding=1), nn.Conv2d(hidden, out_width, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(width, out_width, 1, stride=2, bias=False)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def bottleneck(width, hidden):
    """torchvision's, with a convolution on the shortcut."""
    shortcut = nn.Sequential(nn.Conv2d(width, 4 * hidden, 1, bias=False), nn.BatchNorm2d(4 * hidden))
    return models.resnet.Bottleneck(width, hidden, downsample=shortcut)


class Squeezed(nn.Module):
    """A bottleneck whose hidden channels are scaled by what all of them together say."""

    def __init__(self, width, hidden):
        super().__init__()
        self.expand, self.norm = nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.pool, self.fc1, self.fc2 = nn.AdaptiveAvgPool2d(1), nn.Conv2d(hidden, 8, 1), nn.Conv2d(8, hidden, 1)
        self.project, self.norm2 = nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        inside = torch.relu(self.norm(self.expand(x)))
        inside = inside * torch.sigmoid(self.fc2(torch.relu(self.fc1(self.pool(inside)))))
        return self.norm2(self.project(inside)) + x


class Classifier(nn.Module):
    def __init__(self, *blocks, width=16):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(*blocks)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(width, 5)

    def forward(self, x):
        return self.head(torch.flatten(self.pool(self.blocks(torch.relu(self.stem(x)))), 1))


FAMILIES = {
    "inverted residual": lambda: Tower(),
    "basic": lambda: Classifier(BasicBlock(8, 16, 12), BasicBlock(12, 16, 16)),
    "squeeze-excite": lambda: Classifier(Squeezed(8, 16), Squeezed(8, 16), width=8),
    "bottleneck": lambda: Classifier(bottleneck(8, 4), bottleneck(16, 4)),
    "transformer": lambda: models.VisionTransformer(SIZE, 4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5),
}


def with_redundant_halves(network, structure):
    """The second half of each group's indices give what the first half gives."""
    tensors = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    kept = {}
    for name, group in structure.groups.items():
        half = group.size // 2
        kept[name] = range(half)
        for key, axis, place in group.slices:
            factors = [factor.size for factor in structure.tensors[key, axis]]
            tensor = tensors[key].transpose(0, axis)  # a view
            seen = tensor.view(factors + list(tensor.shape[1:])) if len(factors) > 1 else tensor
            seen = seen.transpose(0, place)
            if (key, axis, place) not in group.reading:
                seen[half:] = seen[:half].clone()
    return GraphNetwork(network.description, tensors).eval(), kept


@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_is_redundant_is_restored_exactly(family):
    network = network_of(FAMILIES[family](), family.replace(" ", "_").replace("-", "_"))
    structure = structure_of(network)
    network, kept = with_redundant_halves(network, structure)
    assert len(kept) >= len(structure.blocks)
    before = network.fingerprint()
    proxy = prune(network, kept, structure)
    batches = pairs(64)
    assert measure_alignment(network, proxy, batches)[network.description["tap"]]["relative_error"] > 0.01
    report = reconstruct(network, proxy, batches, EXACT, tensor_cuts(structure, kept))
    for each in measure_alignment(network, proxy, pairs(16, seed=2)).values():
        assert each["relative_error"] < 1e-6
    assert network.fingerprint() == before
    assert proxy.head.weight is network.head.weight  # what did not change is shared still
    assert all(each["after"] < 1e-6 for each in report if each["target"])


def test_no_held_out_position_gets_worse_and_the_features_get_better():
    network = network_of(Tower())
    proxy = noisy(network, 0.3)
    tap = network.description["tap"]
    raw = measure_alignment(network, proxy, pairs(32, seed=2))[tap]
    report = reconstruct(network, proxy, pairs(96), ReconstructionSettings(redoes_statistics=False))
    assert [each["block"] for each in report] == ["blocks.0", "blocks.1", "blocks.2", "tail"]
    assert all(each["after"] <= each["before"] for each in report)
    assert measure_alignment(network, proxy, pairs(32, seed=2))[tap]["relative_error"] < 0.7 * raw["relative_error"]


def test_a_proxy_that_needs_nothing_stays_as_it_is():
    network = network_of(Tower())
    proxy = copy_of(network)
    before = dict(proxy.named_parameters())
    report = reconstruct(network, proxy, pairs(16), ReconstructionSettings(redoes_statistics=False))
    assert all(each["penalty"] is None for each in report)
    assert all(parameter is before[key] for key, parameter in proxy.named_parameters())


def test_the_memory_of_the_equations_does_not_grow_with_the_images(monkeypatch):
    network, sizes = network_of(Tower()), []
    add = NormalEquations.add
    monkeypatch.setattr(NormalEquations, "add", lambda self, inputs, outputs: (sizes.append(len(inputs)), add(self, inputs, outputs)))
    reconstruct(network, noisy(network), pairs(80), ReconstructionSettings(positions=5))
    assert max(sizes) <= 5 * 32 and len(sizes) >= 4 * 8


def test_a_proxy_of_a_lower_resolution_is_fitted_to_resampled_maps():
    network = network_of(Tower())
    proxy = copy_of(network)
    batches = pairs(96, 10)
    report = reconstruct(network, proxy, batches, ReconstructionSettings(redoes_statistics=False))
    assert all(each["after"] < each["before"] for each in report)
    tap = network.description["blocks"][0]["output"]

    def error(network_of_maps):
        """What the first block's maps lack of the original's, resized with antialiasing; half-pixel centres."""
        total = 0.0
        for large, small in batches:
            wanted = network.values(large, [tap])[tap]
            found = network_of_maps.values(small, [tap])[tap]
            wanted = torch.nn.functional.interpolate(wanted, found.shape[2:], mode="bilinear", antialias=True)
            total += float((wanted - found).square().sum().detach())
        return total
    assert error(proxy) < error(network)


def test_a_proxy_without_a_block():
    network = network_of(Tower())
    proxy, tap = network.without_blocks(["blocks.1"]).eval(), network.description["tap"]
    raw = measure_alignment(network, proxy, pairs(32, seed=2))[tap]["relative_error"]
    report = reconstruct(network, proxy, pairs(96))
    assert [each["block"] for each in report] == ["blocks.0", "blocks.2", "tail"]
    assert measure_alignment(network, proxy, pairs(32, seed=2))[tap]["relative_error"] < raw


def test_cut_channels_are_matched_with_their_own():
    """A cut network is matched with itself whole: nothing changes, since its kept channels see what they saw."""
    network = network_of(Classifier(Squeezed(8, 16), width=8))
    structure = structure_of(network)
    kept = {"blocks.0.expand": [1, 4, 5, 6, 9, 11, 12, 15]}
    proxy = prune(network, kept, structure)
    channels = {key[:-len(".running_mean")]: slices[0][1] for key, slices in tensor_cuts(structure, kept).items()
                if key.endswith("running_mean")}
    assert channels == {"blocks.0.norm": kept["blocks.0.expand"]}
    match_batch_norm(network, proxy, images(12), images(12), channels)
    norm, whole = (each.get_submodule("blocks.0.norm") for each in (proxy, network))
    torch.testing.assert_close(norm.running_mean, whole.running_mean[kept["blocks.0.expand"]])
    torch.testing.assert_close(norm.running_var, whole.running_var[kept["blocks.0.expand"]])


class Gated(nn.Module):
    """Its last convolution enters a product, so nothing at its output can be folded into it."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x):
        return x * torch.sigmoid(self.gate(x))


def test_where_nothing_can_be_folded_the_report_says_so():
    network = network_of(Classifier(Gated(8), width=8), "gated")
    report = reconstruct(network, copy_of(network), pairs(16))
    assert report and all((each["target"], each["maps"]) == (None, None) for each in report)


def test_bad_input():
    network = network_of(Tower())
    with pytest.raises(UserError, match="alignment of tower: 7 images; give at least 8"):
        reconstruct(network, copy_of(network), pairs(7))
    with pytest.raises(UserError, match="alignment of tower: 0 images; give at least 8"):
        reconstruct(network, copy_of(network), [])
    broken = copy_of(network)
    with torch.no_grad():
        broken.get_submodule("stem").weight[0] = float("nan")
    with pytest.raises(UserError, match="network tower: node '.*' gives values that are not finite for images 0 to 15; are the"):
        reconstruct(broken, copy_of(network), pairs(16))


def test_what_ends_the_work_ends_it_between_two_batches():
    network = network_of(Tower())

    def stop():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        reconstruct(network, noisy(network), pairs(16), on_step=stop)


def test_the_walk_gives_what_the_whole_networks_give():
    network = network_of(Tower())
    proxy = noisy(network)
    taps = [block["output"] for block in network.description["blocks"]] + [network.description["tap"]]
    with torch.no_grad():
        wanted, found = (each.values(images(40), taps) for each in (network, proxy))
    seen = []
    for stretch in walk(network, proxy, pairs(40)):
        tap = stretch.output
        torch.testing.assert_close(stretch.targets.read(slice(0, 40)), wanted[tap])
        with torch.no_grad():
            torch.testing.assert_close(stretch.proxy(stretch.inputs.read(slice(0, 40))), found[tap])
        seen.append(tap)
    assert seen == taps
