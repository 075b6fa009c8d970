"""The compiled step against the eager one: the same training in float64, resuming to the bit, gates, and what is refused."""

import sys
from types import SimpleNamespace

import pytest
import torch
from pet_examples import CLASSES, examples, family, settings, sparse_parts

from piebridge.config import build_config
from piebridge.core.errors import UserError
from piebridge.core.gate import BatchGate, OpenGate
from piebridge.core.random_gates import InfoBatch
from piebridge.core.step import EagerStep
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
KINDS = ("head", "last_k", "adapter", "lora", "sparse", "all")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "cache"))


def config(kind="adamw", batch_size=4):
    optimizer = SimpleNamespace(kind=kind, lr=1e-2, momentum=0.9, weight_decay=0.1, schedule="cosine", label_smoothing=0.1)
    return SimpleNamespace(optimizer=optimizer, loader=SimpleNamespace(batch_size=batch_size), seed=3)


def tuning_of(name, kind):
    torch.manual_seed(0)
    network = family(name)
    return Tuning(network, settings(kind), parts=sparse_parts(network) if kind == "sparse" else None)


def compiled(tuning, *arguments, **options):
    from piebridge.compiled_step import CompiledStep

    return CompiledStep(tuning, config(*arguments), **options)


def train(step, name, first, last, gate=None, epoch=5):
    """Batches first..last of 4 samples, the last of each epoch smaller; returns the losses."""
    found = []
    for number in range(first, last):
        is_last = number % epoch == epoch - 1
        images, labels = examples(name, 3 if is_last else 4, seed=number)
        values = step.trainable.frozen().features(images).detach() if step.trainable.tap != "x" else images
        losses, is_selected = step(values, labels, gate or OpenGate(), number / 20)
        assert is_selected is None and not losses.requires_grad
        found.append(losses)
        if is_last:
            step.end_epoch((number + 1) / 20)
    return found


@pytest.mark.parametrize("name, kind, rule", [("tower", kind, "adamw") for kind in KINDS]
                         + [("tower", "sparse", "sgd"), ("tower", "lora", "sgd"), ("vit", "sparse", "adamw")])
def test_twenty_steps_are_the_eager_ones(name, kind, rule):
    eager = EagerStep(tuning_of(name, kind), config(rule).optimizer)
    step = compiled(tuning_of(name, kind), rule)
    for one, other in zip(train(step, name, 0, 20), train(eager, name, 0, 20)):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    assert list(step.trainable.state()) == list(eager.trainable.state())
    for key, tensor in step.trainable.state().items():
        torch.testing.assert_close(tensor, eager.trainable.state()[key], rtol=1e-7, atol=1e-8, msg=key)


@pytest.mark.parametrize("kind, split, last", [("head", 7, 12), ("sparse", 7, 12), ("all", 2, 4)])
def test_resumed_is_the_same_to_the_bit(kind, split, last):
    whole = compiled(tuning_of("tower", kind))
    losses = train(whole, "tower", 0, last)
    first = compiled(tuning_of("tower", kind))
    train(first, "tower", 0, split)
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    values = {name: tensor.clone() for name, tensor in first.trainable.state().items()}
    assert not any(name.startswith("trained/") for name in state)
    second = compiled(tuning_of("tower", kind))
    second.restore(state)
    second.trainable.restore(values)
    assert all(torch.equal(*pair) for pair in zip(train(second, "tower", split, last), losses[split:]))
    whole.state(), second.state()
    for key, tensor in second.trainable.state().items():
        assert torch.equal(tensor, whole.trainable.state()[key]), key


def test_a_state_from_before_the_first_step_is_the_beginning():
    step = compiled(tuning_of("tower", "sparse"))
    step.restore(step.state())
    losses = train(step, "tower", 0, 2)
    assert torch.equal(losses[1], train(compiled(tuning_of("tower", "sparse")), "tower", 0, 2)[1])


def test_the_tuned_original_is_what_the_program_has_trained():
    step = compiled(tuning_of("tower", "sparse"))
    train(step, "tower", 0, 5)
    tuning = step.trainable.eval()
    images, labels = examples("tower", seed=40)
    with torch.no_grad():
        logits = tuning(tuning.frozen().features(images))
        torch.testing.assert_close(tuning.bridged()(images), logits, rtol=1e-12, atol=1e-12)
    losses, _ = step(tuning.frozen().features(images).detach(), labels, OpenGate(), 1.0)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1))


def test_infobatch_weighs_the_samples_alike():
    steps, pruners = [EagerStep(tuning_of("tower", "sparse"), config().optimizer), compiled(tuning_of("tower", "sparse"))], []
    for step in steps:
        pruner = InfoBatch(8, 0.5, 5, seed=1)
        for epoch in range(4):
            kept = pruner.kept(list(range(8)), epoch)
            for batch in filter(None, (kept[:4], kept[4:])):
                images, labels = examples("tower", 8, seed=7)
                values = step.trainable.frozen().features(images[batch]).detach()
                _, is_selected = step(values, labels[batch], BatchGate(pruner.gate, batch), 0.0)
                assert bool(is_selected.all()) and len(is_selected) == len(batch)
            pruner.end_epoch()
            step.end_epoch(0.0)
        pruners.append(pruner)
    assert max(pruners[0].weights) == 2
    assert pruners[0].state()["scores"] == pytest.approx(pruners[1].state()["scores"], rel=1e-8)


def test_a_whole_batch_norm_gets_a_program_for_the_small_batch():
    said = []
    step = compiled(tuning_of("tower", "all"), report=said.append)
    train(step, "tower", 0, 5)
    assert [each["batch_sizes"] for each in said] == [[4], [3, 4]] and said[1]["seconds"] > said[0]["seconds"] > 0
    filled = compiled(tuning_of("tower", "sparse"), report=said.append)
    train(filled, "tower", 4, 10)  # begins with a small batch
    assert said[2]["batch_sizes"] == [4] and len(said) == 3


def test_another_level_is_refused():
    step = compiled(tuning_of("tower", "head"))
    with pytest.raises(UserError, match="step=compiled: trains through the original alone; use router.kind=none, or step=eager"):
        step(torch.zeros(4, 24, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), OpenGate(), 0.0, level=1)


@pytest.mark.parametrize("overrides, words", [
    ({"gate.kind": "loss"}, "step=compiled: gate.kind=loss chooses samples by losses that are known when the update is done"),
    ({"gate.kind": "selective_backprop"}, "use gate.kind=none"),
    ({"router.audit": 0.5}, "step=compiled: router.audit=0.5 needs gradients, which it does not put out; use router.audit=0.0"),
    ({"strategy": "auto"}, "step=compiled: strategy=auto does not know what it costs; use strategy=configured, or step=eager"),
    ({"pet.kind": "adapter", "router.kind": "random"}, "step=compiled: it trains through the original alone, and router.kind=random")])
def test_what_a_compiled_step_cannot_do(overrides, words):
    given = {"gate.kind": "none", "router.kind": "none"}
    with pytest.raises(UserError, match=words):
        build_config({"method": "ours", "step": "compiled"}, dict(given, **overrides))


@pytest.mark.parametrize("overrides", [{}, {"gate.kind": "infobatch"}, {"pet.kind": "adapter", "router.kind": "none"},
                                       {"pet.kind": "adapter", "router.kind": "random", "cache.kind": "features"}])
def test_what_it_can_do(overrides):
    assert build_config({"method": "ours", "step": "compiled"}, overrides).step == "compiled"


class Decided(dict):
    def decide(self, name, make):
        return self.setdefault(name, make())

    update = dict.__setitem__


def workplace(scheme, step="eager"):
    from piebridge.core.clock import Clock

    pet, network = settings("sparse", scheme=scheme), family("tower", dtype=torch.float32)
    return SimpleNamespace(config=SimpleNamespace(pet=pet, step=step), network=network, decisions=Decided(), clock=Clock(), steps={})


def test_a_scheme_becomes_parts():
    from piebridge.from_engine import take_from_engine

    work = workplace("weights:\n  blocks.2.expand: 1/4\n  blocks.2.depthwise: 1/4\nbias: head\nnorm: last 1 block\n")
    take_from_engine(work)
    assert work.parts == work.decisions["parts"] and "blocks.2.expand: 1/4" in work.decisions["scheme"]["text"]
    assert work.decisions["scheme"]["tensors"]["blocks.2.expand.weight"] == "2 channels of dimension 1"
    assert work.parts["blocks.2.expand.weight"] == [1, [0, 1]] and work.parts["blocks.2.depthwise.weight"] == [0, [0, 1, 2, 3]]
    assert work.parts["blocks.2.norm1.bias"] is None and set(work.parts) > {"head.bias"}
    network = family("tower", dtype=torch.float32)
    assert Tuning(network, work.config.pet, parts=work.parts).tap == "add_1" and len(CLASSES) == network.head.out_features
    with pytest.raises(UserError, match="no such scheme"):
        take_from_engine(workplace("last_blok"))


def test_frozen_layers_above_the_tap_come_as_they_are():
    """Laid out with their channels last they would be captured as strides, which no executor may lay out anew."""
    from piebridge.core.tuning import tuning_of as tuning_of_run

    tuning = tuning_of_run(family("tower"), build_config({"method": "Sparse"}, {}), {"blocks.1.project.weight": (1, [0, 3])})
    module, _ = tuning.tail()
    assert module.get_submodule("blocks.2.expand").weight.is_contiguous()
    assert sum(isinstance(each, torch.nn.BatchNorm2d) for each in module.modules()) == 7
    losses = train(compiled(tuning), "tower", 0, 2)
    plain = Tuning(family("tower"), settings("sparse"), parts={"blocks.1.project.weight": (1, [0, 3])})
    torch.testing.assert_close(losses[1], train(EagerStep(plain, config().optimizer), "tower", 0, 2)[1], rtol=1e-9, atol=1e-11)


def test_a_python_that_is_too_old_is_told_what_to_use(monkeypatch):
    from piebridge.from_engine import take_from_engine

    monkeypatch.setattr(sys, "version_info", (3, 6, 9))
    with pytest.raises(UserError, match="pet.kind=sparse: the engine needs Python 3.10 or newer, and this is 3.6; use pet.kind=last_k"):
        take_from_engine(workplace("last_block"))
    work = workplace("last_block", step="compiled")
    work.config.pet.kind = "head"
    with pytest.raises(UserError, match="step=compiled: the engine needs Python 3.10 or newer, and this is 3.6; use step=eager"):
        take_from_engine(work)
