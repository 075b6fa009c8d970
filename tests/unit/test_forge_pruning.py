"""Pruning inside blocks: shapes, costs and nestedness at every level of every family, and outputs against silenced channels.

A pruned network must compute what the whole one computes when the channels that were cut are silent. They are silenced here by
hand, in the producing tensors of each family (batch norm's weight and bias, a head's values), and for torchvision's networks the
whole one is torchvision's own module.
"""

import pytest
import torch
from forge_examples import random_tensors
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.costs import network_costs
from piebridge.core.descriptions import read_description
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.network_file import load_network_file, save_network
from piebridge.forge import nested_levels, prune, structure_of, taylor_scores

pytestmark = pytest.mark.usefixtures("one_thread")

models = pytest.importorskip("torchvision.models")
timm = pytest.importorskip("timm")
HALVES = ([0.5] * 3, [0.5] * 3)


def known(name):
    description = read_description(name)
    return GraphNetwork(description, random_tensors(expected_shapes(description), dtype=torch.float32)).eval()


def captured(module, name, size):
    network = capture(module, name, [3, size, size], *HALVES)
    return GraphNetwork(network.description, random_tensors(expected_shapes(network.description), dtype=torch.float32)).eval()


def small_vit():
    return models.VisionTransformer(32, 8, num_layers=3, num_heads=6, hidden_dim=96, mlp_dim=192, num_classes=5)


def small_deit():
    return timm.create_model("deit_base_distilled_patch16_224", img_size=32, patch_size=8, depth=3, num_heads=4, embed_dim=64,
                             num_classes=5)


def small_resnext():
    return models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=5, groups=32, width_per_group=4)


def chain():
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 40, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(40, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 48, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 40), nn.ReLU(),
                         nn.Linear(40, 5))


# name: (build the network, pixels, the whole network as its source has it, or None)
FAMILIES = {
    "resnet50": (lambda: known("resnet50"), 64, models.resnet50),
    "mobilenet_v3_large": (lambda: known("mobilenet_v3_large"), 64, models.mobilenet_v3_large),
    "efficientnet_lite0": (lambda: known("efficientnet_lite0"), 64, None),
    "vit": (lambda: captured(small_vit(), "vit", 32), 32, small_vit),
    "deit": (lambda: captured(small_deit(), "deit", 32), 32, None),
    "resnext": (lambda: captured(small_resnext(), "resnext", 64), 64, small_resnext),
    "chain": (lambda: captured(chain(), "chain", 16), 16, chain),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request):
    """(name, network, structure, images, levels)."""
    build, size, _ = FAMILIES[request.param]
    network = build()
    structure = structure_of(network, size)
    images = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(1))
    scores = taylor_scores(network, structure, images.split(2))
    return request.param, network, structure, images, nested_levels(structure, scores, count=5, narrowest=0.5)


def test_every_level_keeps_every_tap_and_costs_what_it_says(family):
    name, network, structure, images, levels = family
    taps = [block.tap for block in structure.blocks]
    wanted = {key: value.shape for key, value in network.values(images[:1], taps).items()}
    assert [level.number for level in levels] == [0, 1, 2, 3, 4, 5]
    for level in levels:
        pruned = prune(network, level.kept, structure)
        with torch.no_grad():
            found = pruned.values(images[:1], taps)
        assert {key: value.shape for key, value in found.items()} == wanted
        assert all(torch.isfinite(value).all() for value in found.values())
        assert network_costs(pruned, list(structure.input_size))["macs"] == level.macs


def test_costs_fall_in_even_steps_to_the_target(family):
    _, _, structure, _, levels = family
    largest = max(structure.macs - structure.macs_with({group.name: group.size - max(1, 8 // group.width)})
                  for group in structure.groups.values())  # what one bundle of channels costs at most
    assert levels[0].macs == structure.macs
    for level in levels[1:]:
        limit = structure.macs * (1 - 0.5 * level.number / 5)
        assert limit - largest < level.macs <= limit


def test_levels_are_nested_and_of_good_widths(family):
    _, _, structure, _, levels = family
    for less, more in zip(levels[1:], levels):
        assert all(set(less.kept[name]) <= set(more.kept[name]) for name in structure.groups)
        is_same = less.kept == more.kept
        assert is_same == (more.macs <= structure.macs * (1 - 0.5 * less.number / 5))
    for name, indices in levels[-1].kept.items():
        group = structure.groups[name]
        assert len(indices) == group.size or len(indices) * group.width % 8 == 0
        assert len(indices) > 0 and list(indices) == sorted(set(indices))


def test_level_0_is_the_original_bit_for_bit(family):
    _, network, structure, images, levels = family
    same = prune(network, levels[0].kept, structure)
    assert same.fingerprint() == network.fingerprint()
    with torch.no_grad():
        assert torch.equal(same(images), network(images))


def silence(family, tensors, group, gone):
    """Zero what makes the values of a group's indices `gone`, so that the values are zero at whoever reads them."""
    base, _, last = group.rpartition(".")
    if family in ("resnet50", "resnext"):
        norms = [base + "." + last.replace("conv", "bn")] + ([base + ".bn2"] if family == "resnext" else [])
        each = tensors[norms[0] + ".weight"].numel() // 32 if family == "resnext" else 1
        for norm in norms:
            for name in ("weight", "bias"):
                tensors[f"{norm}.{name}"].view(-1, each)[gone] = 0
    elif family == "mobilenet_v3_large" and last != "fc1":
        prefix = group[:-len(".0.0")]
        for key in [f"{prefix}.{number}.1.{name}" for number in (0, 1) for name in ("weight", "bias")]:
            tensors[key][gone] = 0
    elif family == "efficientnet_lite0":
        for key in [f"{base}.{norm}.{name}" for norm in ("bn1", "bn2") for name in ("weight", "bias")]:
            tensors[key][gone] = 0
    elif last in ("in_proj_weight", "qkv"):
        heads = 6 if family == "vit" else 4
        for key in (group, base + ".in_proj_bias") if family == "vit" else (group + ".weight", group + ".bias"):
            tensor = tensors[key]
            tensor.view(3, heads, -1, *tensor.shape[1:])[2, gone] = 0  # values; [q k v, heads, D, ...]
    else:  # a layer with a bias, then an activation with f(0) = 0
        tensors[group + ".weight"][gone] = 0
        tensors[group + ".bias"][gone] = 0


def test_pruned_outputs_equal_those_with_silent_channels(family):
    name, network, structure, images, _ = family
    generator = torch.Generator().manual_seed(2)
    kept, tensors = {}, {key: tensor.clone() for key, tensor in network.state_dict().items()}
    for group in structure.groups.values():
        order = torch.randperm(group.size, generator=generator).tolist()
        count = int(torch.randint(1, group.size, (), generator=generator))
        kept[group.name] = sorted(order[:count])
        silence(name, tensors, group.name, order[count:])
    source = FAMILIES[name][2]
    if source is None:
        whole = GraphNetwork(network.description, tensors).eval()
    else:
        with torch.device("meta"):
            whole = source().eval()
        whole.load_state_dict(tensors, assign=True)
    pruned = prune(network, kept, structure)
    with torch.no_grad():
        found, wanted, before = (each.double()(images[:2].double()) for each in (pruned, whole, network))
    network.float()
    assert (found - wanted).abs().max() < 1e-9 * wanted.abs().max()
    assert (before - wanted).abs().max() > 1e-3 * wanted.abs().max()  # the cut was no small thing


def test_a_pruned_network_can_be_saved_and_loaded(family, tmp_path):
    _, network, structure, images, levels = family
    pruned = prune(network, levels[-1].kept, structure)
    save_network(pruned, tmp_path / "proxy.safetensors")
    again = load_network_file(tmp_path / "proxy.safetensors")
    with torch.no_grad():
        assert torch.equal(again(images[:1]), pruned(images[:1]))
    assert {group.name: group.size for group in structure_of(again, structure.input_size[1]).groups.values()
            if group.size > 1}.items() <= {name: len(indices) for name, indices in levels[-1].kept.items()}.items()


class OneFeature(nn.Module):
    """One feature at the head, so that a random sign has no effect on a squared change."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 1, 1), nn.AdaptiveAvgPool2d(1),
                                  nn.Flatten())
        self.head = nn.Linear(1, 2)

    def forward(self, x):
        return self.head(self.body(x))


def one_feature():
    torch.manual_seed(3)
    return capture(OneFeature(), "one_feature", [3, 8, 8], *HALVES)


def test_scores_are_the_squared_first_order_changes():
    """Against the Jacobian of the features by a factor on each channel."""
    network = one_feature()
    structure = structure_of(network)
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    first, second = network.get_submodule("body.0"), network.get_submodule("body.2")

    def features(factors, image):
        return second(torch.tanh(first(image[None])) * factors[:, None, None]).mean()

    changes = torch.stack([torch.autograd.functional.jacobian(lambda factors, image=image: features(factors, image), torch.ones(16))
                           for image in images])
    scores = taylor_scores(network, structure, images.split(1))
    torch.testing.assert_close(scores["body.0"], changes.square().mean(0), rtol=1e-4, atol=1e-9)


def test_channels_without_effect_go_first_and_nothing_is_left_changed():
    network = one_feature()
    structure = structure_of(network)
    with torch.no_grad():
        network.get_submodule("body.0").weight[3:11] = 0
        network.get_submodule("body.0").bias[3:11] = 0
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    network.train()
    before = network.fingerprint()
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    scores = taylor_scores(network, structure, [images])
    assert network.training and network.fingerprint() == before
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in network.parameters())
    levels = nested_levels(structure, scores, count=1, narrowest=0.6)
    assert levels[1].kept == {"body.0": (0, 1, 2, 11, 12, 13, 14, 15)}
    with torch.no_grad():
        torch.testing.assert_close(prune(network, levels[1].kept)(images), network(images))


def test_whole_tensors_are_shared_and_cut_ones_are_not():
    network = one_feature()
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    pruned = prune(network, {"body.0": range(4)})
    assert pruned.head.weight is network.head.weight
    assert pruned.get_submodule("body.0").weight.shape == (4, 3, 3, 3)
    assert not any(parameter.requires_grad for parameter in pruned.parameters())
    reordered = prune(network, {"body.0": reversed(range(16))})
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(reordered(images), network(images))


@pytest.mark.parametrize("kept, message", [
    ({"body.1": [0]}, "network one_feature: group 'body.1': no such group (did you mean 'body.0'?)"),
    ({"body.0": []}, "group 'body.0': keep at least one of its 16"),
    ({"body.0": [0, 16]}, "group 'body.0': index 16 is not possible; its indices are 0 to 15, each at most once"),
    ({"body.0": [1, 1]}, "group 'body.0': an index twice is not possible; its indices are 0 to 15, each at most once"),
])
def test_what_cannot_be_kept(kept, message):
    with pytest.raises(UserError) as caught:
        prune(one_feature(), kept)
    assert message in str(caught.value)


def test_levels_and_scores_that_cannot_be():
    network = one_feature()
    structure = structure_of(network)
    scores = {"body.0": torch.ones(16)}
    with pytest.raises(UserError, match="narrowest=0.2 cannot be met by pruning inside its blocks, which leaves at least 0.501 of its "):
        nested_levels(structure, scores, narrowest=0.2)
    with pytest.raises(UserError, match="network one_feature: count=0, narrowest=0.6, multiple=8: at least one level, a width between"):
        nested_levels(structure, scores, count=0, narrowest=0.6)
    with pytest.raises(UserError, match="the scores of group 'body.0' must be 16 finite numbers"):
        nested_levels(structure, {"body.0": torch.full((16,), float("nan"))}, narrowest=0.6)
    with pytest.raises(UserError, match="network one_feature: scores need images, and there are none"):
        taylor_scores(network, structure, [])
    with pytest.raises(UserError, match="the gradient of group 'body.0' is not finite"):
        taylor_scores(network, structure, [torch.full((1, 3, 8, 8), float("nan"))])
