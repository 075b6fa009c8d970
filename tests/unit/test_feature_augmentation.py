"""Augmentation of cached features: against its formulas, and the same after a resumption."""

import numpy as np
import pytest
import torch

from piebridge.core.clock import Clock
from piebridge.core.errors import UserError
from piebridge.core.feature_augmentation import deviations, feature_augmentation
from piebridge.core.sources import CachedSource

ROWS = np.random.RandomState(0).randn(2500, 3).astype(np.float32) * [1, 5, 0] + [100, 0, 7]
ROWS = ROWS.astype(np.float32)
LABELS = np.arange(2500) % 4


class Table:
    """Stands for a RowTable."""

    usable = list(range(2400))

    def read(self, indices):
        return ROWS[indices]

    def pieces(self):
        return [ROWS[start:min(start + 1000, 2400)] for start in range(0, 2400, 1000)]


def test_deviations_are_numpys():
    np.testing.assert_allclose(deviations(Table().pieces()), ROWS[:2400].astype(np.float64).std(0), rtol=1e-5, atol=1e-5)


def test_noise_has_the_stated_share_of_each_dimensions_deviation():
    augment = feature_augmentation("noise", 0.5, 3, LABELS)
    changed = augment(ROWS, list(range(2500)), 0, Table())
    assert changed.dtype == np.float32 and changed.shape == ROWS.shape
    np.testing.assert_allclose((changed - ROWS).std(0), 0.5 * ROWS[:2400].std(0), rtol=0.05, atol=1e-6)
    np.testing.assert_allclose((changed - ROWS).mean(0), 0, atol=0.1)


def test_mixup_stays_within_the_class():
    augment = feature_augmentation("mixup", 0.4, 3, LABELS)
    indices = [5, 9, 2, 0]
    changed = augment(ROWS[indices], indices, 0, Table())
    for row, index in zip(changed, indices):
        members = ROWS[[member for member in range(2400) if LABELS[member] == LABELS[index]]].astype(np.float64)
        directions, move = members - ROWS[index], row - ROWS[index].astype(np.float64)
        lengths = np.maximum((directions ** 2).sum(1), 1e-12)
        weights = directions @ move / lengths
        left = np.linalg.norm(move - weights[:, None] * directions, axis=1)
        best = np.argmin(np.where((weights >= 0) & (weights <= 0.4), left, np.inf))
        assert left[best] < 1e-4


@pytest.mark.parametrize("kind", ["noise", "mixup"])
def test_the_same_epoch_and_batch_draw_the_same_and_others_do_not(kind):
    def source():
        return CachedSource([Table()], Table.usable, torch.device("cpu"), Clock(), feature_augmentation(kind, 0.3, 3, LABELS))

    def epoch(number, batches):
        return [rows for _, rows, _ in source().stream(batches, number, None)]

    batches = [[4, 8, 1], [7, 3]]
    first, resumed = epoch(0, batches), epoch(0, batches[1:])
    assert torch.equal(first[1], resumed[0]) and not torch.equal(first[0], epoch(1, batches)[0])
    assert first[0].dtype == torch.float32 and not torch.equal(first[0], torch.from_numpy(ROWS[batches[0]]))


def test_off_and_unknown():
    assert feature_augmentation("none", 1.0, 0, LABELS) is None
    with pytest.raises(UserError, match="cache.augment=nois is not known.*did you mean 'noise'"):
        feature_augmentation("nois", 1.0, 0, LABELS)
