"""PruneTrain's step: the lasso in its gradient, removal while training, optimizer state, checkpoints of any size."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from forge_examples import Tower, images, module_of, network_of
from pet_examples import batch, run

from piebridge.core.gate import OpenGate
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.prune_train import PruneTrainStep, ShrinkingTuning
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")
PET = SimpleNamespace(kind="all")


def optimizer(**changes):
    return SimpleNamespace(**dict(dict(kind="adamw", lr=3e-3, momentum=0.9, weight_decay=0.01, schedule="constant", label_smoothing=0.1),
                                  **changes))


def step_of(strength=1e-4, threshold=1e-4, every=1, **changes):
    prune_train = SimpleNamespace(strength=strength, threshold=threshold, every=every)
    return PruneTrainStep(Tuning(network_of(Tower()), PET), optimizer(**changes), PET, prune_train)


def empty(step, block="blocks.1", channels=range(5)):
    """Have hidden channels of a block fall below any threshold, as the lasso would in time."""
    with torch.no_grad():
        network = step.trainable.network
        network.get_submodule(block + ".expand").weight[list(channels)] *= 1e-9
        network.get_submodule(block + ".project").weight[:, list(channels)] *= 1e-9


def test_the_step_minimises_the_loss_with_the_group_lasso():
    """One step of plain SGD against autograd on the plain module: loss + strength * sum of norms, by the paper's formula."""
    step = step_of(strength=0.02, kind="sgd", lr=0.1, momentum=0.0, weight_decay=0.0)
    module = module_of(step.trainable.network, Tower()).train()
    inputs, labels = batch(0)
    convolutions = [each for path, each in module.named_modules() if isinstance(each, torch.nn.Conv2d) and each.groups == 1]
    norms = [(each.weight.pow(2).sum((1, 2, 3)) + 1e-8).sqrt().sum() for each in convolutions]
    norms += [(each.weight.pow(2).sum((0, 2, 3)) + 1e-8).sqrt().sum() for each in convolutions if each is not module.stem]
    norms += [(module.head.weight.pow(2).sum(0) + 1e-8).sqrt().sum()]
    (F.cross_entropy(module(inputs), labels, label_smoothing=0.1) + 0.02 * sum(norms)).backward()
    step(inputs, labels, OpenGate(), 0.0)
    trained = dict(step.trainable.network.named_parameters())
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(trained[key], parameter - 0.1 * parameter.grad, rtol=0, atol=1e-12, msg=key)


def test_an_emptied_channel_goes_with_its_optimizer_state():
    step = step_of()
    run(step, 0, 2)
    empty(step)
    network, before = step.trainable.network, {key: tensor.clone() for key, tensor in step.trainable.state().items()}
    keys = [key for key, _ in network.named_parameters()]
    state = {name: tensor.clone() for name, tensor in step.optimizer.state().items()}
    step.end_epoch(0.25)
    after = step.trainable.state()
    sizes = {"blocks.1.expand.weight": 0, "blocks.1.norm1.weight": 0, "blocks.1.norm1.bias": 0, "blocks.1.norm1.running_mean": 0,
             "blocks.1.norm1.running_var": 0, "blocks.1.depthwise.weight": 0, "blocks.1.norm2.weight": 0, "blocks.1.norm2.bias": 0,
             "blocks.1.norm2.running_mean": 0, "blocks.1.norm2.running_var": 0, "blocks.1.project.weight": 1}
    kept = torch.arange(5, 16)
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor.index_select(sizes[key], kept) if key in sizes else tensor), key
    for index, key in enumerate(keys):
        for slot in ("mean", "square"):
            tensor = state[f"{slot}/{index}"]
            assert torch.equal(step.optimizer.state()[f"{slot}/{index}"], tensor.index_select(sizes[key], kept) if key in sizes else tensor)
    assert step.optimizer.state()["steps"].tolist() == [2] * len(keys)
    assert step.trainable.network.get_submodule("blocks.1.depthwise").groups == 11
    run(step, 2, 3, epoch=100)  # it goes on
    assert step.optimizer.state()["steps"].tolist() == [3] * len(keys)


def test_a_removed_channel_changes_no_output_and_the_file_is_plain(tmp_path, caplog):
    step = step_of()
    run(step, 0, 2)
    empty(step, channels=[1, 7])
    x = images(4)
    step.trainable.eval()
    with torch.no_grad():
        expected = step.trainable(x)
        with caplog.at_level(logging.INFO):
            step.end_epoch(0.25)
        torch.testing.assert_close(step.trainable(x), expected, rtol=0, atol=1e-7)  # what was left of them was 1e-9, not 0
        assert not step.trainable.training and not any(module.training for module in step.trainable.network.modules())
    assert "PruneTrain: 2 of 80 channels removed" in caplog.text
    save_network(step.trainable.bridged(), tmp_path / "tuned.safetensors")
    tuned = load_network_file(tmp_path / "tuned.safetensors").eval()
    with torch.no_grad():
        assert torch.equal(tuned(x), step.trainable(x))
    assert tuned.get_submodule("blocks.1.expand").weight.shape == (14, 8, 1, 1)


def test_channels_are_removed_each_so_many_epochs():
    step = step_of(every=2)
    empty(step)
    step.end_epoch(0.25)
    assert sum(step.trainable.counts().values()) == 8 + 3 * 16 + 24
    step.end_epoch(0.5)
    assert sum(step.trainable.counts().values()) == 8 + 3 * 16 + 24 - 5


def run_on(step):
    """The rest of a run, in which more channels go."""
    run(step, 7, 10, epoch=100)
    empty(step, "blocks.2", [0, 3])
    step.end_epoch(0.9)
    run(step, 10, 12)


def test_a_resumed_run_ends_with_the_same_bits():
    whole = step_of()
    run(whole, 0, 5)
    empty(whole)
    whole.end_epoch(0.45)
    run(whole, 5, 7)
    saved = [{name: tensor.clone() for name, tensor in each.state().items()} for each in (whole, whole.trainable)]
    run_on(whole)
    again = step_of()
    again.restore(saved[0])
    again.trainable.restore(saved[1])
    assert again.trainable.network.get_submodule("blocks.1.expand").weight.shape[0] == 11
    run_on(again)
    for one, other in zip((whole, whole.trainable), (again, again.trainable)):
        assert one.state().keys() == other.state().keys()
        for name, tensor in one.state().items():
            assert torch.equal(tensor, other.state()[name]), name


def test_the_best_epoch_may_have_had_more_channels():
    tuning = ShrinkingTuning(network_of(Tower()), PET)
    before, x = {key: tensor.clone() for key, tensor in tuning.state().items()}, images(3)
    tuning.eval()
    with torch.no_grad():
        expected = tuning(x)
        tuning.resize({name: 2 for name in tuning.counts()})
        assert tuning(x).shape == (3, 5) and set(tuning.counts().values()) == {2}
        tuning.restore(before)
        assert torch.equal(tuning(x), expected)


def test_a_state_of_another_network_is_refused():
    tuning = ShrinkingTuning(network_of(Tower()), PET)
    state = dict(tuning.state())
    state["blocks.0.norm1.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match="blocks.0.norm1.weight"):
        tuning.restore(state)
