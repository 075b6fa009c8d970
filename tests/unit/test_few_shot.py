"""k shots per class, and pseudo-labels for the rest: which images, which labels, which counts."""

import copy
import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from piebridge.config import build_config, parse_overrides
from piebridge.core.clock import Clock
from piebridge.core.dataset import Dataset, Sample, open_dataset
from piebridge.core.errors import UserError
from piebridge.core.few_shot import limit_labels
from piebridge.core.interrupt import Interrupt
from piebridge.core.labels import UNKNOWN, Labels, PseudoLabels

SPLITS = SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=3)


@pytest.fixture(scope="module")
def clipart():
    return open_dataset("Clipart10", SPLITS)


def train_paths(dataset):
    return [dataset.relative_path(sample) for sample in dataset.train]


def test_shots_are_the_first_of_each_class_by_the_hash_of_seed_and_path(clipart):
    limited = limit_labels(clipart, 3, 3, keeps_unlabelled=False)
    expected = []
    for name in clipart.classes:
        paths = [path for path in train_paths(clipart) if path.startswith(name + "/")]
        expected += sorted(paths, key=lambda path: hashlib.sha256(b"3/" + path.encode()).digest())[:3]
    assert sorted(train_paths(limited)) == sorted(expected) and len(limited.train) == 30
    assert (limited.val, limited.test, limited.unlabelled) == (clipart.val, clipart.test, frozenset())
    assert limited.split == dict(clipart.split, shots=3, labelled=30, unlabelled=390)


def test_more_shots_hold_the_fewer_and_another_seed_draws_others(clipart):
    three, five, other = (set(train_paths(limit_labels(clipart, shots, seed, False))) for shots, seed in ((3, 3), (5, 3), (3, 4)))
    assert three < five and three != other
    assert limit_labels(clipart, 0, 3, False) is clipart


def test_the_unlabelled_stay_where_they_are_wanted(clipart):
    limited = limit_labels(clipart, 3, 3, keeps_unlabelled=True)
    assert limited.train == clipart.train and len(limited.unlabelled) == 390
    labelled = {sample.path for sample in limited.train} - limited.unlabelled
    assert labelled == {sample.path for sample in limit_labels(clipart, 3, 3, False).train}
    splits = [row["split"] for row in limited.as_table()]
    assert {name: splits.count(name) for name in set(splits)} == {"train": 30, "unlabelled": 390, "val": 60, "test": 120}
    assert limited.without(limited.val).unlabelled == limited.unlabelled


def test_a_class_with_fewer_images_gives_all_and_is_named(caplog):
    train = [Sample(f"/data/{name}/{number}.jpg", label) for label, (name, count) in enumerate((("a", 9), ("b", 2), ("c", 4)))
             for number in range(count)]
    dataset = Dataset("set", "/data", ["a", "b", "c"], {"train": train}, {})
    limited = limit_labels(dataset, 5, 0, False)
    assert [sum(sample.label == label for sample in limited.train) for label in range(3)] == [5, 2, 4]
    assert [record.message for record in caplog.records] == [
        "splits.shots=5: 2 of 3 classes have fewer training images, and give all: b (2), c (4)"]


@pytest.mark.parametrize("overrides, expected", [
    (["pseudo.kind=confidence"], "pseudo.kind=confidence labels what is unlabelled, and nothing is; add splits.shots=K"),
    (["pseudo.kind=confidence", "splits.shots=5"], "optimizer.label_smoothing=0.1 teaches to be less sure than pseudo.threshold=0.95"),
    (["pseudo.kind=sure"], "'sure' is not one of none, confidence")])
def test_settings_that_cannot_work(overrides, expected):
    with pytest.raises(UserError, match=expected):
        build_config({}, parse_overrides(overrides))
    build_config({}, parse_overrides(["pseudo.kind=confidence", "splits.shots=5", "optimizer.label_smoothing=0.0"]))


class Head(torch.nn.Linear):
    """A linear head as the loop sees it."""

    def forward(self, inputs, level=0):
        assert not self.training and not torch.is_grad_enabled()
        return super().forward(inputs)


class RowSource:
    """Fixed features; sample 5 cannot be read."""

    needs_level_batches = False

    def __init__(self, features):
        self.features = features
        self.usable = [index for index in range(len(features)) if index != 5]

    def stream(self, batches, epoch, levels):
        for indices in batches:
            yield indices, self.features[indices], 0


def example(threshold=0.6):
    torch.manual_seed(0)
    features, head = 3 * torch.randn(40, 6), Head(6, 3)
    labels = torch.randint(0, 3, (40,))
    is_labelled = torch.arange(40) % 4 == 0
    settings = SimpleNamespace(threshold=threshold, warmup_epochs=2)
    pseudo = PseudoLabels(labels, is_labelled, settings, Clock(), Interrupt())
    parts = SimpleNamespace(source=RowSource(features), step=SimpleNamespace(trainable=head), batch_size=4, seed=0,
                            router=SimpleNamespace(levels=np.zeros(40, int)))
    return pseudo, parts, features, head, labels, is_labelled


def expected_labels(features, head, labels, is_labelled, threshold):
    """The rule in numpy, in float64."""
    logits = features.numpy().astype(float) @ head.weight.detach().numpy().T.astype(float) + head.bias.detach().numpy()
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    wanted = np.where(shares.max(1) >= threshold, shares.argmax(1), UNKNOWN)
    wanted[5] = UNKNOWN
    return np.where(is_labelled.numpy(), labels.numpy(), wanted)


def test_labels_are_those_above_the_threshold_after_the_warm_up():
    pseudo, parts, features, head, labels, is_labelled = example()
    usable = parts.source.usable
    for epoch in (0, 1):
        pseudo.start_epoch(epoch, parts)
        assert pseudo.known(usable) == list(range(0, 40, 4))
    assert pseudo.record()["pseudo_labelled"] == 0 and pseudo.record()["rounds"] == []
    pseudo.start_epoch(2, parts)
    assert head.training
    wanted = expected_labels(features, head, labels, is_labelled, 0.6)
    assert np.array_equal(pseudo[list(range(40))].numpy(), wanted)
    assert pseudo.known(usable) == np.flatnonzero(wanted != UNKNOWN).tolist()
    given = (wanted != UNKNOWN) & ~is_labelled.numpy()
    right = (wanted == labels.numpy())[given].mean()
    assert 3 < given.sum() < 29  # the example has both kinds
    count, right = int(given.sum()), pytest.approx(right)
    assert pseudo.record() == {"labelled": 10, "unlabelled": 30, "pseudo_labelled": count, "pseudo_accuracy": right,
                               "rounds": [{"epoch": 3, "pseudo_labelled": count, "accuracy": right}]}


def test_labels_are_given_anew_and_taken_back_and_survive_a_stop():
    pseudo, parts, features, head, labels, is_labelled = example()
    pseudo.start_epoch(2, parts)
    before = pseudo.known(parts.source.usable)
    with torch.no_grad():
        head.weight.mul_(0.3)
    pseudo.start_epoch(3, parts)
    after = pseudo.known(parts.source.usable)
    assert set(after) < set(before)
    assert np.array_equal(pseudo[list(range(40))].numpy(), expected_labels(features, head, labels, is_labelled, 0.6))
    again = example()[0]
    again.restore(copy.deepcopy(pseudo.state()))
    assert again.record() == pseudo.record() and again.known(parts.source.usable) == after


def test_true_labels_that_nobody_knows_have_no_accuracy():
    _, parts, _, _, labels, is_labelled = example()
    labels = torch.where(is_labelled, labels, torch.full_like(labels, UNKNOWN))
    pseudo = PseudoLabels(labels, is_labelled, SimpleNamespace(threshold=0.0, warmup_epochs=1), Clock(), Interrupt())
    pseudo.start_epoch(1, parts)
    assert (pseudo.record()["pseudo_labelled"], pseudo.record()["pseudo_accuracy"]) == (29, None)


def test_an_interrupt_is_heard_while_labels_are_given():
    pseudo, parts, *_ = example()
    pseudo._interrupt.signal_name = "SIGINT"
    with pytest.raises(Exception, match="interrupted by SIGINT"):
        pseudo.start_epoch(2, parts)


def test_labels_that_stay_know_all_and_say_nothing():
    labels = Labels(torch.tensor([4, 5, 6]))
    labels.start_epoch(0, None)
    assert labels[[2, 0]].tolist() == [6, 4] and labels.known([0, 2]) == [0, 2] and labels.record() is None
    labels.restore(labels.state())
