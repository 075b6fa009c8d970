"""Blocks and what may be cut of them, against the widths that the modules of torchvision and timm have themselves."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from piebridge.cli import main
from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.core.network_file import save_network
from piebridge.core.networks import ARCHITECTURES
from piebridge.forge.structure import structure_of

pytestmark = pytest.mark.usefixtures("one_thread")

models = pytest.importorskip("torchvision.models")
timm = pytest.importorskip("timm")


def without_memory(build):
    with torch.device("meta"):
        return build()


def cuts(structure, block):
    """[(kind, size, channels each)] of a block's groups, in order."""
    return [(group.kind, group.size, group.width) for group in map(structure.groups.get, block.groups)]


def channels(*widths):
    return [("channels", width, 1) for width in widths]


def test_bottlenecks_of_resnet50():
    module, structure = without_memory(models.resnet50), structure_of("resnet50")
    assert len(structure.blocks) == 16
    for block in structure.blocks:
        source = module.get_submodule(block.name)
        assert block.kind == "residual"
        assert cuts(structure, block) == channels(source.conv1.out_channels, source.conv2.out_channels)
        assert (block.input_shape[0], block.output_shape[0]) == (source.conv1.in_channels, source.conv3.out_channels)
        assert block.parameters == sum(parameter.numel() for parameter in source.parameters())
    first = structure.blocks[0]
    assert (first.name, first.input_shape, first.output_shape, first.tap) == (
        "layer1.0", (64, 56, 56), (256, 56, 56), "layer1_0_relu_2")
    assert first.groups == ("layer1.0.conv1", "layer1.0.conv2")
    assert first.macs == 56 * 56 * (64 * 64 + 9 * 64 * 64 + 64 * 256 + 64 * 256)


def test_what_is_cut_together_in_a_bottleneck():
    group = structure_of("resnet50").groups["layer1.0.conv2"]
    assert {(key, axis) for key, axis, _ in group.slices} == {
        ("layer1.0.conv2.weight", 0), ("layer1.0.conv3.weight", 1)} | {
        (f"layer1.0.bn2.{name}", 0) for name in ("weight", "bias", "running_mean", "running_var")}
    assert group.reading == (("layer1.0.conv3.weight", 1, 0),)


def test_inverted_residuals_of_mobilenet_v3_with_their_squeeze():
    module, structure = without_memory(models.mobilenet_v3_large), structure_of("mobilenet_v3_large")
    assert [block.name for block in structure.blocks] == [f"features.{number}" for number in range(1, 16)]
    for block in structure.blocks:
        source = module.get_submodule(block.name)
        depthwise = next(each for each in source.modules() if isinstance(each, nn.Conv2d) and each.groups > 1)
        squeezes = [each.fc1.out_channels for each in source.modules() if hasattr(each, "fc1")]
        is_expanded = depthwise.in_channels != block.input_shape[0]
        assert block.kind == "inverted residual"
        assert cuts(structure, block) == channels(*([depthwise.in_channels] if is_expanded else []) + squeezes)
    assert cuts(structure, structure.blocks[3]) == channels(72, 24)
    together = {key for key, _, _ in structure.groups["features.4.block.0.0"].slices}
    assert {"features.4.block.1.0.weight", "features.4.block.2.fc1.weight", "features.4.block.2.fc2.bias",
            "features.4.block.3.0.weight"} < together


def test_inverted_residuals_of_efficientnet_lite0():
    module, structure = without_memory(lambda: timm.create_model("tf_efficientnet_lite0")), structure_of("efficientnet_lite0")
    for block in structure.blocks:
        source = module.get_submodule(block.name)
        assert block.kind == "inverted residual"
        is_expanded = hasattr(source, "conv_pwl")
        assert cuts(structure, block) == (channels(source.conv_dw.in_channels) if is_expanded else [])
    assert [block.output_shape[0] for block in structure.blocks] == [
        16, 24, 24, 40, 40, 80, 80, 80, 112, 112, 112, 192, 192, 192, 192, 320]  # the paper's table


@pytest.mark.parametrize("name, tokens", [("vit_b_16", 197), ("deit_base_distilled_patch16_224", 198)])
def test_transformers_are_cut_by_whole_heads_and_hidden_units(name, tokens):
    structure = structure_of(name)
    assert len(structure.blocks) == 12
    for block in structure.blocks:
        assert (block.kind, block.input_shape, block.output_shape) == ("transformer", (tokens, 768), (tokens, 768))
        assert cuts(structure, block) == [("heads", 12, 64), ("channels", 3072, 1)]


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_costs_equal_the_published_ones(name):
    structure = structure_of(name)
    assert structure.macs_with({}) == structure.macs
    if hasattr(models, name):
        meta = models.get_model_weights(name).DEFAULT.meta
        assert structure.macs / 1e9 == pytest.approx(meta["_ops"], abs=6e-4)
        assert structure.parameters == meta["num_params"]


def small_resnext():
    return models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=5, groups=32, width_per_group=4)


def test_grouped_convolutions_are_cut_by_whole_groups():
    structure = structure_of(small_resnext(), input_size=64)
    assert [cuts(structure, block) for block in structure.blocks] == [
        [("groups", 32, width)] for width in (4, 8, 16, 32)]


class Chain(nn.Sequential):
    """VGG's kind: no blocks, convolutions and pooling, then two Linear."""

    def __init__(self):
        convolutions = [[nn.Conv2d(*pair, 3, padding=1), nn.ReLU()] for pair in ((3, 16), (16, 24), (24, 40), (40, 48))]
        first, second, third, fourth = convolutions
        super().__init__(*first, *second, nn.MaxPool2d(2), *third, *fourth, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2),
                         nn.Flatten(), nn.Linear(192, 56), nn.ReLU(), nn.Linear(56, 64), nn.ReLU(), nn.Linear(64, 5))


def test_a_plain_chain_falls_back_to_stages():
    structure = structure_of(Chain(), input_size=16)
    assert [(block.name, block.kind, block.input_shape, block.output_shape) for block in structure.blocks] == [
        ("stage1", "plain", (3, 16, 16), (24, 16, 16)), ("stage2", "plain", (24, 16, 16), (48, 8, 8)),
        ("stage3", "plain", (48, 8, 8), (64,))]
    assert [cuts(structure, block) for block in structure.blocks] == [channels(16), channels(40), channels(56)]


class Layer(nn.Module):
    """A convolution with its norm and activation, as a user's own module."""

    def __init__(self, channels, out_channels):
        super().__init__()
        self.convolution = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        return torch.relu(self.norm(self.convolution(x)))


def test_so_does_a_chain_of_blocks_that_have_no_inside():
    module = nn.Sequential(nn.Sequential(Layer(3, 16), Layer(16, 24), Layer(24, 8)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                           nn.Linear(8, 5))
    structure = structure_of(module, input_size=8)
    assert [(block.name, cuts(structure, block)) for block in structure.blocks] == [("stage1", channels(16, 24))]


@pytest.mark.parametrize("build", [
    lambda: models.mobilenet_v2(num_classes=5),
    lambda: models.regnet_y_400mf(num_classes=5), lambda: timm.create_model("mixer_s32_224", num_classes=5, img_size=64),
    lambda: timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64)],
    ids=["mobilenet_v2", "regnet", "mixer", "vit_tiny"])
def test_other_classifiers_that_trace(build):
    structure = structure_of(build().eval(), input_size=64)
    assert len(structure.blocks) >= 8 and structure.macs_with({}) == structure.macs
    assert sum(bool(block.groups) for block in structure.blocks) >= len(structure.blocks) - 1


def test_the_same_from_a_file_and_at_another_size(tmp_path):
    torch.manual_seed(0)
    network = capture(Chain(), "chain", [3, 16, 16], [0.5] * 3, [0.5] * 3)
    save_network(network, tmp_path / "chain.safetensors")
    structure = structure_of(tmp_path / "chain.safetensors")
    assert structure.groups == structure_of(network).groups == structure_of(network.description).groups
    larger = structure_of(network, input_size=32)
    assert larger.groups == structure.groups and larger.blocks[0].macs == 4 * structure.blocks[0].macs


def test_show_prints_an_aligned_table(capsys):
    assert main(["forge", "resnet50", "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "resnet50: 16 frozen blocks; 4089.2 M MACs for an image of 224 x 224 pixels, 25.6 M parameters"
    assert lines[1] == "head fc, which reads flatten"
    table = lines[3:20]
    assert table[0].split() == "block kind input output may be cut MACs share parameters tap".split()
    assert table[1].split() == ("layer1.0 residual 64 x 56x56 256 x 56x56 64, 64 231.2 M 5.7 % 0.075 M layer1_0_relu_2").split()
    for title in ("kind", "input", "output", "may be cut", "tap"):
        at = table[0].index(" " + title) + 1
        assert all(line[at - 2:at] == "  " and line[at] != " " for line in table), title
    assert lines[-1].startswith("outside the blocks: 120.1 M MACs (2.9 %), ")


def test_show_of_a_transformer_and_of_another_size(capsys):
    assert main(["forge", "vit_b_16", "--show"]) == 0
    assert "768 x 197 tokens  12 heads of 64, 3072 " in capsys.readouterr().out
    assert main(["forge", "mobilenet_v3_large", "--show", "--size", "160"]) == 0
    assert "for an image of 160 x 160 pixels" in capsys.readouterr().out


@pytest.mark.parametrize("argv, message", [
    (["resnet50"], "forge resnet50: give --images DIR (or --show to see its structure, --profile to measure a set)"),
    (["resnet5", "--show"], "unknown network 'resnet5' (did you mean 'resnet50'?); known: efficientnet_lite0, "),
    (["vit_b_16", "--show", "--size", "100"], "network vit_b_16: does not run on images of 100 x 100 pixels, its own size is 224 x 224 ("),
    (["resnet50", "--show", "--size", "0"], "--size 0: pixels of a square image, at least 1"),
    (["no/such.safetensors", "--show"], "no/such.safetensors"),
    (["--show"], "the following arguments are required: NETWORK|SET"),
])
def test_bad_usage_is_one_line(argv, message, capsys):
    assert main(["forge"] + argv) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and message in output.err


class Forked(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("original, message", [
    (nn.Sequential(Forked()), "network Sequential: cannot capture a forward whose course depends on its input"),
    (nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.ReLU()), "the network ends in 'ReLU', not in a Linear"),
    (nn.Sequential(nn.Conv2d(3, 5, 1), nn.Mish()), "cannot capture module '1': unknown operation 'Mish'"),
    (nn.Sequential(nn.Flatten(), nn.Linear(48, 5)), "network Sequential: no frozen blocks"),
    (7, "a int is no network: give a name, a network file or a torch.nn.Module"),
])
def test_what_is_no_network_to_cut(original, message):
    with pytest.raises(UserError) as caught:
        structure_of(original, input_size=4)
    assert message in str(caught.value)


def test_the_forge_imports_core_and_itself_only():
    folder = Path(__file__).resolve().parent.parent.parent / "piebridge" / "forge"
    modules = [node.module for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
               if isinstance(node, ast.ImportFrom)]
    ours = {module for module in modules if module.startswith("piebridge")}
    assert ours and all(module.split(".")[1] in ("core", "forge") for module in ours)
