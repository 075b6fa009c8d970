"""Which executor runs which part of a step: each against the reference, the choice, and what is said where it cannot be followed."""

import importlib.util
import json

import pytest
import torch
from backend_examples import PARTS, example, small
from engine_networks import batch_of, family, loss_of, parts_of
from engine_reference import assert_close, tensors_of

from piebridge.core.errors import UserError
from piebridge.core.networks import load_network
from piebridge.engine.backends import FastestExecutor, build, choose, reason
from piebridge.engine.candidates import GRAPH_KINDS, Origin
from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.interpreter import Interpreter
from piebridge.engine.losses import cross_entropy
from piebridge.engine.segment_prefix import SegmentPrefix
from piebridge.engine.segments import cut
from piebridge.engine.step_graph import BUFFER, DRAW, FROZEN, STATE, TRAINED, Part
from piebridge.engine.update_rules import SGD, AdamW


@pytest.fixture
def job():
    """(step, tensors, batch) of a trained part with AdamW."""
    module = small()
    step = capture(module, cross_entropy, AdamW(), PARTS, example())
    return step, tensors_of(step, module), list(example())


def missing(name):
    return [package for package in GRAPH_KINDS[name].packages if importlib.util.find_spec(package) is None]


def advanced(executor, tensors, batch, updates=3):
    weights = torch.full((4,), 0.25, dtype=batch[0].dtype)
    results = [executor.run(batch, weights, 0.1, float(count)) for count in range(1, updates + 1)]
    changed = {key: tensor.clone() for key, tensor in tensors.items() if key[0] in (TRAINED, STATE)}
    return [tensor.clone() for tensor in results[-1]], changed


EXACT = ("openvino", "openvino_swapped", "onnxruntime", "onnxruntime_swapped", "interpreter_channels_last")


@pytest.mark.parametrize("rule", [SGD(0.9, 1e-3), AdamW()])
@pytest.mark.parametrize("name", EXACT)
def test_a_step_on_each_candidate_trains_as_the_reference_does(name, rule):
    if missing(name):
        pytest.skip(f"not installed: {', '.join(missing(name))}")
    module, batch = small(), list(example())
    step = capture(module, cross_entropy, rule, PARTS, example())
    tensors, plain = tensors_of(step, module), tensors_of(step, module)
    division = cut(step)
    choice = {"parts": {"prefix": name.replace("_swapped", ""), "rest": name}}
    found = advanced(build(step, tensors, choice), tensors, batch)
    expected = advanced(Interpreter(step, plain), plain, batch)
    assert division.prefix is not None
    for tensor, other in zip(found[0], expected[0]):
        torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-5)
    for key, tensor in expected[1].items():
        torch.testing.assert_close(found[1][key], tensor, rtol=1e-3, atol=1e-5, msg=str(key))


def test_the_parts_on_the_interpreter_are_the_whole_step():
    module, batch = small(torch.float64), list(example(torch.float64))
    step = capture(module, cross_entropy, SGD(0.9), PARTS, example(torch.float64))
    tensors, plain = tensors_of(step, module), tensors_of(step, module)
    found = advanced(build(step, tensors, {"parts": {"prefix": "interpreter", "rest": "interpreter"}}), tensors, batch)
    expected = advanced(Interpreter(step, plain), plain, batch)
    for key, tensor in expected[1].items():
        assert_close(found[1][key], tensor)
    for tensor, other in zip(found[0], expected[0]):
        assert_close(tensor, other)


def test_choose_measures_each_part_and_its_executor_trains(job):
    step, tensors, batch = job
    origin = Origin(small(), cross_entropy, AdamW())
    live = dict(tensors)
    executor, choice = choose(step, tensors, batch, origin, turns=1, candidates=["interpreter_channels_last", "eager", "eager_bf16"])
    assert {each["part"] for each in choice["measurements"]} == {"prefix", "rest", "whole"}
    assert list(choice["parts"]) in (["prefix", "rest"], ["whole"]) and choice["crossing_bytes"] == 4 * 8 * 5 * 5 * 4
    named = {(each["part"], each["candidate"]): each["verdict"] for each in choice["measurements"]}
    assert named["whole", "eager_bf16"].startswith("refused: its numbers are rounded")
    assert named["whole", "eager"] in ("agrees", "fastest")
    json.dumps(choice)
    for part, name in choice["parts"].items():
        assert f"{part} on {name}" in reason(choice)
    found = advanced(executor, tensors, batch)
    expected = advanced(Interpreter(step, live), live, batch)
    for key, tensor in expected[1].items():
        torch.testing.assert_close(found[1][key], tensor, rtol=1e-3, atol=1e-5, msg=str(key))


def test_a_choice_is_made_once_and_then_followed(job):
    step, tensors, batch = job
    make = FastestExecutor(batch, candidates=["interpreter_channels_last"], turns=1)
    first = make(step, tensors)
    choice = make.choice
    make(step, tensors)
    assert make.choice is choice and list(choice["parts"]) == ["prefix", "rest"]
    again = FastestExecutor(choice=json.loads(json.dumps(choice)))(step, dict(tensors))
    assert type(again) is type(first)


def test_what_cannot_be_followed_is_said(job, monkeypatch):
    step, tensors, batch = job
    for parts, said in (({"prefix": "nonsense", "rest": "interpreter"}, "its prefix is nonsense: not known here; compile it again here"),
                        ({"prefix": "segment_folded", "rest": "interpreter"}, "takes a network with a description"),
                        ({"whole": "eager"}, "its whole is eager: needs the network itself, beside the program")):
        with pytest.raises(UserError, match=said):
            build(step, tensors, {"parts": parts})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="its rest is openvino: not installed: onnx, openvino; compile it again here"):
        build(step, tensors, {"parts": {"prefix": "interpreter", "rest": "openvino"}})


def test_a_program_from_elsewhere_runs_on_the_reference(job, caplog):
    step, tensors, batch = job
    with caplog.at_level("WARNING"):
        executor = FastestExecutor(choice={"parts": {"whole": "eager"}})(step, tensors)
    assert isinstance(executor, Interpreter)
    assert "needs the network itself, beside the program; compile it again here; until then it runs on the interpreter" in caplog.text


def test_unknown_candidates_are_named(job):
    step, tensors, batch = job
    with pytest.raises(UserError, match=r"engine: no candidate 'openvin' \(did you mean 'openvino'\?\); there are interpreter, openvino,"):
        choose(step, tensors, batch, candidates=["openvin"])


def test_where_numbers_are_drawn_pytorch_is_no_candidate():
    module = small(dropout=0.5)
    module[8].train()
    step = capture(module, cross_entropy, SGD(), PARTS, example(), StepSettings(is_training=True))
    assert step.inputs_of(DRAW)
    origin = Origin(module, cross_entropy, SGD(), StepSettings(is_training=True))
    _, choice = choose(step, tensors_of(step, module), list(example()), origin, turns=1, candidates=["eager"])
    assert {each["verdict"] for each in choice["measurements"] if each["candidate"] == "eager"} == {
        "draws its own random numbers, and the step is given them"}


def test_a_full_step_is_not_cut():
    module = small()
    step = capture(module, cross_entropy, SGD(), {key: Part() for key, _ in module.named_parameters()}, example())
    _, choice = choose(step, tensors_of(step, module), list(example()), turns=1, candidates=[])
    assert choice["parts"] == {"whole": "interpreter"} and choice["crossing_bytes"] == 0


@pytest.mark.parametrize("name", ["lite0", "mobilenet_v3", "resnet", "vit"])
def test_families_of_image_networks_run_in_openvino(name):
    if missing("openvino"):
        pytest.skip(f"not installed: {', '.join(missing('openvino'))}")
    module, batch = family(name, torch.float32), batch_of(name, dtype=torch.float32)
    step = capture(module, loss_of(name), SGD(0.9), parts_of(module, "layers"), batch)
    flat = [tensor for value in batch for tensor in (value if isinstance(value, tuple) else (value,))]
    _, choice = choose(step, tensors_of(step, module), flat, turns=1, candidates=["openvino"])
    assert {each["verdict"] for each in choice["measurements"]} <= {"agrees", "fastest"}, choice["measurements"]


# The segments of core/backends ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def lite():
    torch.manual_seed(0)
    return load_network("efficientnet_lite0", is_pretrained=False).eval()


def lite_step(lite):
    head = lite.description["head"]
    batch = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 5])
    step = capture(lite, cross_entropy, SGD(), {f"{head}.weight": Part(), f"{head}.bias": Part()}, batch)
    return step, list(batch)


@pytest.mark.parametrize("backend", ["folded", "torchscript"])
def test_a_prefix_on_a_segment_of_the_network(lite, backend):
    step, batch = lite_step(lite)
    prefix = cut(step).prefix
    tensors = {key: tensor for key, tensor in tensors_of(step, lite).items() if key[0] in (FROZEN, BUFFER)}
    (expected,), (found,) = [executor.results(batch[:1])
                             for executor in (Interpreter(prefix, tensors), SegmentPrefix(prefix, lite, step.parts, backend))]
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_int8_runs_a_prefix_where_the_tolerance_allows_it(lite):
    step, batch = lite_step(lite)
    name, origin = "segment_openvino_int8", Origin(lite, cross_entropy, SGD())
    _, choice = choose(step, tensors_of(step, lite), batch, origin, turns=1, candidates=[name])
    verdict = next(each["verdict"] for each in choice["measurements"] if each["candidate"] == name)
    refused = "refused: its numbers are rounded to 0.062, more than the tolerance 0.001"
    assert verdict == ("not installed: openvino" if missing("openvino") else refused)


def test_a_module_without_a_description_has_no_segments():
    module = small()
    step = capture(module, cross_entropy, SGD(), PARTS, example())
    with pytest.raises(UserError, match="takes a network with a description, and this is a Sequential"):
        SegmentPrefix(cut(step).prefix, module, step.parts, "folded")
