"""Network files: what is written is read back, and a file that is wrong or hostile is refused in words."""

import json
import math

import pytest
import torch
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.core.network_file import KEY, load_network_file, save_network
from piebridge.core.safetensors_file import read_safetensors, write_safetensors


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    return capture(body, "tiny", [3, 8, 8], [0.4, 0.5, 0.6], [0.2, 0.3, 0.4], "bicubic", 0.9, ["a", "b", "ç"])


@pytest.fixture
def path(network, tmp_path):
    save_network(network, tmp_path / "tiny.safetensors", {"made_by": "a test"})
    return tmp_path / "tiny.safetensors"


def test_comes_back_the_same(network, path):
    again = load_network_file(path)
    assert again.description == network.description and again.fingerprint() == network.fingerprint()
    assert not again.training
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(images), network(images))
    assert read_safetensors(path)[1]["made_by"] == "a test"
    assert {key: tensor.dtype for key, tensor in again.state_dict().items()} == {
        key: tensor.dtype for key, tensor in network.state_dict().items()}


def test_loading_leaves_the_random_numbers_alone(path):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    load_network_file(path)
    assert torch.equal(torch.rand(3), wanted)


def test_a_tuned_network_comes_back_with_its_classes(network, tmp_path):
    tuned = network.without_blocks([])
    tuned.replace_head(["cat", "dog"])
    save_network(tuned, tmp_path / "tuned.safetensors")
    again = load_network_file(tmp_path / "tuned.safetensors")
    assert again.description["class_names"] == ["cat", "dog"] and again.head.out_features == 2


def rewrite(path, change, tensors=None):
    """Write the file again with its description (a dict) changed by `change`."""
    found, metadata = read_safetensors(path)
    description = json.loads(metadata[KEY])
    change(description)
    write_safetensors(path, found if tensors is None else tensors, {KEY: json.dumps(description)})


def node(description, operation):
    return next(node for node in description["nodes"] if node["operation"] == operation)


def set_argument(operation, name, value):
    def change(description):
        node(description, operation)["arguments"][name] = value
    return change


def set_node(operation, name, value):
    def change(description):
        node(description, operation)[name] = value
    return change


def set_key(name, value):
    def change(description):
        description[name] = value
    return change


@pytest.mark.parametrize("change, message", [
    (set_node("ReLU", "operation", "ReLu"),
     r"node '_2': unknown operation 'ReLu' \(did you mean 'ReLU'\?\); a network file may only use"),
    (set_node("ReLU", "operation", "os.system"), "unknown operation 'os.system'"),
    (set_node("ReLU", "operation", "Sequential"), "unknown operation 'Sequential'"),
    (set_node("ReLU", "operation", ["ReLU"]), r"unknown operation \['ReLU'\]"),
    (set_argument("ReLU", "inplace", 1), "argument inplace=1 of ReLU must be true or false"),
    (set_argument("ReLU", "hook", "x"), "ReLU takes no argument 'hook'"),
    (set_argument("Conv2d", "device", "cuda"), "Conv2d takes no argument 'device'"),
    (set_argument("Conv2d", "stride", 0), "argument stride=0 of Conv2d must be a whole number from 1 to 1024, or a list of 2"),
    (set_argument("Conv2d", "padding", [10 ** 9, 0]), "argument padding="),
    (set_argument("Conv2d", "padding", "same"), "argument padding='same'"),
    (set_argument("Conv2d", "groups", 3), "channels of Conv2d must be divisible by groups=3"),
    (set_argument("Conv2d", "out_channels", 10 ** 6),
     r"tensor '0.weight' has shape \[4, 3, 3, 3\] where its description says \[1000000"),
    (set_argument("Conv2d", "padding_mode", "zeros()"), "must be one of zeros, reflect, replicate"),
    (set_argument("BatchNorm2d", "eps", math.nan), "no JSON .*NaN"),
    (set_argument("BatchNorm2d", "eps", True), "argument eps=True of BatchNorm2d must be a finite number"),
    (set_argument("BatchNorm2d", "affine", False), r"tensor '1\.\w+' belongs to no node"),
    (set_argument("AdaptiveAvgPool2d", "output_size", [2, -1]), "argument output_size="),
    (lambda d: node(d, "Linear")["arguments"].pop("bias"), "Linear lacks its argument 'bias'"),
    (set_node("ReLU", "inputs", ["_4"]), "node '_2': its input '_4' is no node before it"),
    (set_node("ReLU", "inputs", ["_2"]), "its input '_2' is no node before it"),
    (set_node("ReLU", "inputs", []), "ReLU takes 1 inputs and has 0"),
    (set_node("ReLU", "inputs", "x"), "its inputs must be a list"),
    (set_node("ReLU", "name", "_1"), "node '_1': a second node of this name"),
    (set_node("ReLU", "name", "a b"), "node 2 has no proper name"),
    (set_node("ReLU", "code", "1"), "node '_2': its keys must be arguments, inputs, module, name, operation"),
    (set_node("ReLU", "module", "../2"), r"'\.\./2' is no module path"),
    (set_node("ReLU", "module", "0.deep"), "'0.deep' lies below '0', itself a module or parameter"),
    (set_node("ReLU", "module", "0"), "'0' is described twice, differently"),
    (set_key("format", "onnx"), "its description is not a piebridge-network"),
    (set_key("version", 2), "description version 2; this piebridge reads version 1"),
    (lambda d: d.pop("tap"), "its description lacks the key 'tap'"),
    (set_key("tap", "_3"), "the tap '_3' must be the input of the head, '_4'"),
    (set_key("head", "0"), "output '_5' must be the node of head '0', a Linear"),
    (set_key("output", "_4"), "output '_4' must be the node of head '5', a Linear"),
    (set_key("input_size", [3, 8, 10 ** 6]), r"input_size=\[3, 8, 1000000\] in its description must be \[3, height, width\]"),
    (set_key("normalization", {"mean": [0, 0, 0], "std": [1, 1, 0]}), "normalization=.* must be mean and std"),
    (set_key("interpolation", "magic"), "interpolation='magic' in its description must be one of nearest, bilinear"),
    (set_key("crop_fraction", 1.5), "crop_fraction=1.5"),
    (set_key("class_names", ["a"]), "1 class names for a head of 3 outputs"),
    (set_key("class_names", [1, 2, 3]), "class_names="),
    (set_key("nodes", []), "nodes="),
    (set_key("blocks", [{"name": "b", "input": "x", "output": "none", "is_residual": True}]), "block 0 must have a name"),
])
def test_refuses_a_wrong_description(path, change, message):
    rewrite(path, change)
    with pytest.raises(UserError, match=message) as caught:
        load_network_file(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_refuses_tensors_that_do_not_fit(path):
    tensors, _ = read_safetensors(path)
    kept = tensors.pop("1.running_mean")
    rewrite(path, lambda description: None, tensors)
    with pytest.raises(UserError, match="tiny.safetensors: network tiny: tensor '1.running_mean' is missing"):
        load_network_file(path)
    tensors.update({"1.running_mean": kept, "7.weight": torch.zeros(1)})
    rewrite(path, lambda description: None, tensors)
    with pytest.raises(UserError, match="tensor '7.weight' belongs to no node"):
        load_network_file(path)


def test_refuses_files_without_a_description(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"w": torch.zeros(2)})
    with pytest.raises(UserError, match="a.safetensors: holds tensors but no network description"):
        load_network_file(tmp_path / "a.safetensors")
    for text in ("{", "[" * 100000, "null", '"text"'):
        write_safetensors(tmp_path / "b.safetensors", {"w": torch.zeros(2)}, {KEY: text})
        with pytest.raises(UserError, match="b.safetensors: its (network )?description is (no JSON|not a piebridge-network)"):
            load_network_file(tmp_path / "b.safetensors")


def test_a_file_whose_parts_do_not_fit_is_refused_before_training():
    from piebridge.core.network_file import check_runs
    from piebridge.core.networks import load_network

    network = load_network("efficientnet_lite0")
    check_runs(network.half(), "half.safetensors")
    assert next(network.parameters()).dtype == torch.float32
    network.description["input_size"] = [3, 1, 1]
    with pytest.raises(UserError, match="whole.safetensors: (does not run on an image of 1 x 1|gives no finite)"):
        network.head.weight.data.fill_(float("nan"))
        check_runs(network, "whole.safetensors")
