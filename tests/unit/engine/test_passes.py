import pytest
import torch
from pass_examples import ATEN, ConvolutionNetwork, Encoder, calls, everything, images, network, run, same, step_of

from piebridge.core.errors import UserError
from piebridge.engine.capture import StepSettings
from piebridge.engine.passes import PASSES, TRADING_TIME, run_passes
from piebridge.engine.step_graph import Part
from piebridge.engine.update_rules import AdamW

pytestmark = pytest.mark.usefixtures("one_thread")
CHOSEN = torch.tensor([0, 3, 5])
PARTS = {"expand.0.weight": Part(1, CHOSEN), "depthwise.0.weight": Part(0, CHOSEN), "general.weight": Part(1, CHOSEN),
         "general.bias": Part(), "head.weight": Part(1, CHOSEN), "head.bias": Part()}


@pytest.fixture(scope="module")
def sparse():
    module, batch = network(ConvolutionNetwork), images()
    return (module, batch) + step_of(module, PARTS, batch)


@pytest.mark.parametrize("rule", [None, AdamW()])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("is_training", [False, True])
def test_all_passes_together_keep_every_value_of_a_full_step(rule, stride, is_training):
    module, batch = network(ConvolutionNetwork, stride), images()
    step, tensors = step_of(module, everything(module), batch, rule, settings=StepSettings(is_training=is_training))
    before = run(step, module, tensors, batch)
    run_passes(step, tensors)
    same(run(step, module, tensors, batch), before)


def test_all_passes_together_keep_every_value_of_a_sparse_step(sparse):
    module, batch, step, tensors = sparse
    step, tensors, before = step.copy(), dict(tensors), run(step, module, tensors, batch)
    changes = run_passes(step, tensors)
    same(run(step, module, tensors, batch), before)
    assert list(changes) == list(PASSES) and changes["sparse_channels"] == 4 and changes["fold_batch_norm"] > 10


def test_all_passes_together_keep_every_value_of_an_encoder():
    module, batch = network(Encoder), (torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor([1, 2]))
    step, tensors = step_of(module, everything(module), batch)
    before = run(step, module, tensors, batch)
    run_passes(step, tensors)
    same(run(step, module, tensors, batch), before)


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_can_be_left_out_and_run_alone(name, sparse):
    module, batch, original, originals = sparse
    before = run(original, module, originals, batch)
    step, tensors = original.copy(), dict(originals)
    assert name not in run_passes(step, tensors, off=[name])
    same(run(step, module, tensors, batch), before)
    step, tensors = original.copy(), dict(originals)
    assert list(run_passes(step, tensors, off=[other for other in PASSES if other != name])) == [name]
    same(run(step, module, tensors, batch), before)


def test_a_second_run_finds_nothing_but_views_to_change(sparse):
    module, batch, original, originals = sparse
    step, tensors = original.copy(), dict(originals)
    off = (*TRADING_TIME, "early_update", "order")  # what is computed twice is common again, and then ordered anew
    run_passes(step, tensors, off)
    again = run_passes(step, tensors, off)
    assert {name for name, count in again.items() if count} <= {"simplify", "common_subexpressions"}
    same(run(step, module, tensors, batch), run(original, module, originals, batch))


def test_without_passes_the_step_stays_as_captured(sparse):
    step, tensors = sparse[2].copy(), dict(sparse[3])
    assert run_passes(step, tensors, off=PASSES) == {}
    assert len(step.graph.nodes) == len(sparse[2].graph.nodes) and tensors.keys() == sparse[3].keys()


def test_an_unknown_pass_is_named_with_the_closest(sparse):
    with pytest.raises(UserError, match="no pass 'dead_cod'; there are simplify, .*did you mean 'dead_code'"):
        run_passes(sparse[2], {}, off=["dead_cod"])


def test_a_step_that_writes_in_place_is_refused(sparse):
    step = sparse[2].copy()
    with step.graph.inserting_before(step.results[0]):
        step.graph.call_function(ATEN.relu_.default, (step.placeholders[-1],))
    with pytest.raises(UserError, match="relu_.* writes in place, passes need pure operators: capture with functionalises=True"):
        run_passes(step, {})


def test_a_copy_is_left_alone(sparse):
    module, batch, original, tensors = sparse
    nodes = len(original.graph.nodes)
    run_passes(original.copy(), dict(tensors))
    assert len(original.graph.nodes) == nodes and len(calls(original, ATEN.convolution_backward.default)) == 4
