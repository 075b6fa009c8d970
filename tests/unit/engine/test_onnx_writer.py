"""The file: standard operators only, names, what is constant, and what is refused."""

import json

import pytest
import torch
from engine_reference import tensors_of
from onnx_examples import compared, step_of

from piebridge.core.errors import UserError
from piebridge.engine import compat, onnx_writer
from piebridge.engine.onnx_file import read_state, write_state, write_step
from piebridge.engine.onnx_step import OnnxStep
from piebridge.engine.onnx_writer import to_onnx
from piebridge.engine.step_graph import STATE, TRAINED

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
CONVOLUTIONAL = ("mobilenet_v2", "resnet")


def model_of(name, scheme, **options):
    step, module, _ = step_of(name, scheme)
    return to_onnx(step, tensors_of(step, module), **options)


@pytest.mark.parametrize("name, scheme", [("mobilenet_v2", "full"), ("mobilenet_v2", "channels"), ("resnet", "full"), ("vit", "full"),
                                          ("decoder", "full")])
def test_files_are_standard(one_thread, name, scheme):
    model = model_of(name, scheme)
    onnx.checker.check_model(model, full_check=True)  # with the shapes that the standard infers
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 17)]
    assert {node.domain for node in model.graph.node} == {""}
    assert len({node.op_type for node in model.graph.node}) <= 35
    for value in [*model.graph.input, *model.graph.output]:
        assert all(size.HasField("dim_value") for size in value.type.tensor_type.shape.dim)


def test_names_say_what_feeds_what(one_thread):
    model = model_of("mobilenet_v2", "bias")
    inputs, outputs = [[value.name for value in values] for values in (model.graph.input, model.graph.output)]
    assert {"inputs", "targets", "weights", "rate", "count", "trained/classifier.1.bias", "state/classifier.1.bias/velocity"} <= set(inputs)
    assert outputs[:2] == ["losses", "outputs"]
    feeds = json.loads({each.key: each.value for each in model.metadata_props}["piebridge.feeds"])
    assert feeds["next/trained/classifier.1.bias"] == "trained/classifier.1.bias"
    assert set(feeds) == set(outputs[2:]) and set(feeds.values()) <= set(inputs)


def test_frozen_tensors_are_constants_or_inputs(one_thread):
    step, module, batch = step_of("mobilenet_v2", "bias")
    tensors = tensors_of(step, module)
    constant, given = to_onnx(step, tensors), to_onnx(step, tensors, is_frozen_constant=False)
    name = "frozen/features.1.conv.0.0.weight"
    assert name in [each.name for each in constant.graph.initializer] and name not in [each.name for each in constant.graph.input]
    assert name in [each.name for each in given.graph.input] and name not in [each.name for each in given.graph.initializer]


def test_parts_are_put_out_whole(one_thread):
    """So that a caller feeds back what it gets."""
    step, module, _ = step_of("mobilenet_v2", "channels")
    model = to_onnx(step, tensors_of(step, module))
    shapes = {each.name: [size.dim_value for size in each.type.tensor_type.shape.dim] for each in model.graph.output}
    partial = [key for key, part in step.parts.items() if not part.is_whole]
    assert partial
    for key in partial:
        assert shapes[f"next/trained/{key}"] == list(module.get_parameter(key).shape)


def test_batch_norm_is_never_one_call(one_thread, monkeypatch):
    """Of a runtime's own batch norm in train mode, the gradients are wrong: it goes in as the arithmetic that it is, or not at all."""
    step, module, batch = step_of("resnet", "full", is_training=True)
    assert "BatchNormalization" not in {node.op_type for node in to_onnx(step, tensors_of(step, module)).graph.node}
    pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
    assert compared(OnnxStep, step, module, batch)[0] < 1e-5
    monkeypatch.setattr(compat, "batch_norm_decompositions", dict)
    monkeypatch.setattr(compat, "core_decompositions", dict)
    step, module, batch = step_of.__wrapped__("resnet", "full", is_training=True)
    with pytest.raises(UserError, match="batch_norm.* has no standard ONNX form"):
        to_onnx(step, tensors_of(step, module))


def test_refusals(one_thread, monkeypatch):
    step, module, _ = step_of("resnet", "bias")
    with pytest.raises(UserError, match=r"no form 'column' of a convolution's weight gradient; .* \(did you mean 'columns'\?\)"):
        to_onnx(step, tensors_of(step, module), general="column")
    monkeypatch.setattr(onnx_writer, "LARGEST_BYTES", 1000)
    with pytest.raises(UserError, match="the step with its frozen weights takes 0 MiB, and an ONNX file holds 2048; use backend=eager"):
        to_onnx(step, tensors_of(step, module))


def test_files_and_states(one_thread, tmp_path):
    step, module, _ = step_of("resnet", "bias")
    tensors = tensors_of(step, module)
    write_step(tmp_path / "step.onnx", step, tensors)
    onnx.checker.check_model(str(tmp_path / "step.onnx"))
    write_state(tmp_path / "state.safetensors", step, tensors)
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    for (role, _), tensor in tensors.items():
        if role in (TRAINED, STATE):
            tensor.add_(1)
    read_state(tmp_path / "state.safetensors", step, tensors)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in tensors.items())
    other, module, _ = step_of("mobilenet_v2", "bias")
    with pytest.raises(UserError, match="state.safetensors: has no trained/.*; write it from the same step"):
        read_state(tmp_path / "state.safetensors", other, tensors_of(other, module))
