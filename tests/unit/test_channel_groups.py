"""Channels of whole networks: who shares them, the group lasso over them, and networks that lose them."""

import pytest
import torch
from forge_examples import Tower, images, network_of, random_tensors
from torch import nn

from piebridge.core.channel_groups import channel_groups, counts_of
from piebridge.core.costs import network_costs
from piebridge.core.cutting import cut_network, resized
from piebridge.core.descriptions import read_description
from piebridge.core.group_lasso import GroupLasso
from piebridge.core.network import GraphNetwork, check_tensors, expected_shapes
from piebridge.core.network_file import load_network_file, save_network

pytestmark = pytest.mark.usefixtures("one_thread")

models = pytest.importorskip("torchvision.models")


def small_resnet():
    return models.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1], num_classes=5)


def small_vit():
    return models.VisionTransformer(32, 8, num_layers=2, num_heads=6, hidden_dim=96, mlp_dim=192, num_classes=5)


def known(name):
    description = read_description(name)
    return GraphNetwork(description, random_tensors(expected_shapes(description))).eval()


# name: (build the network, pixels)
FAMILIES = {
    "tower": (lambda: network_of(Tower()), 16),
    "resnet": (lambda: network_of(small_resnet(), "resnet", 32), 32),
    "mobilenet_v3": (lambda: network_of(models.mobilenet_v3_small(num_classes=5), "mobilenet", 32), 32),
    "vit": (lambda: network_of(small_vit(), "vit", 32), 32),
    "efficientnet_lite0": (lambda: known("efficientnet_lite0"), 64),
}


def weight_of(network, path):
    return network.get_submodule(path).weight


def emptied(network, groups, share=0.5, seed=0):
    """Set a share of the channels of each group to zero in all of its weights; returns {group: channels that are left}."""
    generator, left = torch.Generator().manual_seed(seed), {}
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, slices in groups.groups.items():
            order = torch.randperm(slices[0].shape[1], generator=generator)
            gone = order[:int(share * len(order))]
            for each in slices:
                parameters[each.key].view(each.shape)[:, gone] = 0
            left[name] = sorted(order[len(gone):].tolist())
    return left


def test_a_residual_path_is_one_group_and_each_block_has_its_own():
    groups = channel_groups(network_of(Tower())).groups
    places = {name: sorted((each.key, each.shape) for each in slices) for name, slices in groups.items()}
    assert places == {
        "stem": sorted([("stem.weight", (1, 8, 27)), ("last.weight", (24, 8, 1))]
                       + [(f"blocks.{block}.expand.weight", (16, 8, 1)) for block in range(3)]
                       + [(f"blocks.{block}.project.weight", (1, 8, 16)) for block in range(3)]),
        **{f"blocks.{block}.expand": sorted([(f"blocks.{block}.expand.weight", (1, 16, 8)), (f"blocks.{block}.project.weight", (8, 16, 1))])
           for block in range(3)},
        "last": sorted([("last.weight", (1, 24, 8)), ("head.weight", (5, 24, 1))])}


def test_of_a_transformer_heads_and_hidden_units_can_go():
    groups = channel_groups(FAMILIES["vit"][0]()).groups
    sizes = {name: {each.shape[1] for each in slices} for name, slices in groups.items()}
    assert sorted(map(sorted, sizes.values())) == [[6], [6], [192], [192]]  # 2 blocks; the width is bound by layer norms


@pytest.mark.parametrize("name", list(FAMILIES))
def test_what_is_removed_at_zero_changes_no_output(name, tmp_path):
    build, size = FAMILIES[name]
    network = build()
    network.eval()
    groups = channel_groups(network)
    assert not GroupLasso(network, groups.groups).dense(1e-4)
    left = emptied(network, groups)
    kept = GroupLasso(network, groups.groups).dense(1e-4)
    assert {group: indices.tolist() for group, indices in kept.items()} == left
    smaller = cut_network(network, groups, kept)
    assert network_costs(smaller)["macs"] < 0.7 * network_costs(network)["macs"]
    x = images(3, size)
    with torch.no_grad():
        for is_training in (False, True):  # batch norm by its own statistics too; dropout off
            for each in (network, smaller):
                for module in each.modules():
                    module.training = is_training and isinstance(module, nn.BatchNorm2d)
            torch.testing.assert_close(smaller(x), network(x), rtol=0, atol=1e-9)
    smaller.eval()
    save_network(smaller, tmp_path / "smaller.safetensors")
    loaded = load_network_file(tmp_path / "smaller.safetensors").eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), smaller(x))


def test_sizes_tell_how_many_channels_there_are():
    network = FAMILIES["mobilenet_v3"][0]()
    groups = channel_groups(network)
    left = emptied(network, groups, share=0.3)
    smaller = cut_network(network, groups, GroupLasso(network, groups.groups).dense(1e-4))
    counts = counts_of(groups, {key: tensor.shape for key, tensor in smaller.state_dict().items()})
    assert counts == {name: len(indices) for name, indices in left.items()}
    check_tensors(resized(network.description, groups, counts), {key: tensor.shape for key, tensor in smaller.state_dict().items()})


def test_what_one_layer_still_uses_stays_in_all():
    network = network_of(Tower())
    groups = channel_groups(network)
    emptied(network, groups, share=0.5)
    with torch.no_grad():
        weight_of(network, "blocks.1.project")[:, 0] = 0
        weight_of(network, "blocks.1.project")[3, 0] = -2e-4  # the only reader of hidden channel 0 of this block, at output 3
    kept = GroupLasso(network, groups.groups).dense(1e-4)
    assert 0 in kept["blocks.1.expand"] and 3 in kept["stem"]
    weight_of(network, "blocks.1.project").data[3, 0] = -0.5e-4
    kept = GroupLasso(network, groups.groups).dense(1e-4)
    assert (0 in kept["blocks.1.expand"]) == bool(weight_of(network, "blocks.1.expand")[0].any())


def test_one_channel_stays_of_each_group():
    network = network_of(Tower())
    groups = channel_groups(network)
    kept = GroupLasso(network, groups.groups).dense(1e9)
    assert {name: len(indices) for name, indices in kept.items()} == dict.fromkeys(groups.groups, 1)
    assert cut_network(network, groups, kept)(images(2)).shape == (2, 5)
    largest = torch.stack([weight_of(network, "blocks.0.expand").abs().amax((1, 2, 3)),
                           weight_of(network, "blocks.0.project").abs().amax((0, 2, 3))]).amax(0)
    assert kept["blocks.0.expand"].tolist() == [int(largest.argmax())]


def penalty(weights):
    """The paper's sum, over plain weights: {name: (weight, whether its output counts, whether its input counts)}."""
    total = 0.0
    for weight, is_out, is_in in weights:
        squares = weight.pow(2).reshape(weight.shape[0], weight.shape[1], -1).sum(2)
        total = total + (squares.sum(1) + 1e-8).sqrt().sum() * is_out + (squares.sum(0) + 1e-8).sqrt().sum() * is_in
    return total


def test_the_group_lasso_is_the_papers_and_its_gradient_autograds():
    network = network_of(Tower())
    network.stem.weight.data = network.stem.weight.data.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)  # as weights ported from TF
    lasso = GroupLasso(network, channel_groups(network).groups)
    weights = [(network.stem.weight, 1, 0), (network.last.weight, 1, 1), (network.head.weight, 0, 1)]
    weights += [(weight_of(network, f"blocks.{block}.{name}"), 1, 1) for block in range(3) for name in ("expand", "project")]
    expected = penalty(weights)
    assert lasso.value() == pytest.approx(expected.item(), rel=1e-12)
    gradients = dict(zip([weight for weight, _, _ in weights], torch.autograd.grad(expected, [weight for weight, _, _ in weights])))
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    lasso.add_gradient(0.5)
    for key, parameter in network.named_parameters():
        wanted = 0.25 + 0.5 * gradients.get(parameter, torch.zeros_like(parameter))
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-12, msg=key)
