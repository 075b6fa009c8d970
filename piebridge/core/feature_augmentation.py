"""Augmentation of cached features: variety without a forward through the frozen network.

After frozen-feature augmentation (FroFA, CVPR 2024) and LOFF-TA (2024), which train heads on stored features with changes made to the
features. Off by default. A batch's numbers are drawn from the seed, the epoch and its first sample, so a resumed run draws the same.
"""

import numpy as np

from piebridge.core.errors import UserError
from piebridge.core.names import closest


class FeatureAugmentation:
    """Call: (rows float32 [B, ...], samples list of int [B], epoch, the RowTable they are from) -> rows float32 [B, ...]."""

    def __init__(self, strength, seed):
        self.strength, self._seed = strength, seed

    def __call__(self, rows, indices, epoch, table):
        return self._changed(rows, indices, table, np.random.RandomState([self._seed, epoch, int(indices[0])]))


class FeatureNoise(FeatureAugmentation):
    """x + strength * d * n, with n standard normal and d the standard deviation of each dimension over all samples of the table."""

    def __init__(self, strength, seed, labels):
        super().__init__(strength, seed)
        self._deviations = {}  # {table: its deviations}

    def _changed(self, rows, indices, table, random):
        if table not in self._deviations:
            self._deviations[table] = deviations(table.pieces())
        noise = random.standard_normal(rows.shape).astype(np.float32)
        return rows + np.float32(self.strength) * self._deviations[table] * noise


class ClassMixup(FeatureAugmentation):
    """(1 - w) x + w x', with x' a random sample of the same class and w uniform in [0, strength]: mixup that keeps labels as they are."""

    def __init__(self, strength, seed, labels):
        super().__init__(strength, seed)
        self._labels = np.asarray(labels)
        self._members = {}  # {table: {label: its usable samples}}

    def _changed(self, rows, indices, table, random):
        if table not in self._members:
            usable = np.asarray(table.usable)
            self._members[table] = {label: usable[self._labels[usable] == label] for label in np.unique(self._labels[usable]).tolist()}
        members = self._members[table]
        others = []
        for label in self._labels[indices].tolist():
            others.append(int(members[label][random.randint(len(members[label]))]))
        weight = random.uniform(0, self.strength, (len(rows),) + (1,) * (rows.ndim - 1)).astype(np.float32)
        return (1 - weight) * rows + weight * table.read(others)


FEATURE_AUGMENTATIONS = {"noise": FeatureNoise, "mixup": ClassMixup}


def feature_augmentation(kind, strength, seed, labels):
    """The augmentation of a name, None for "none". labels: of all samples."""
    if kind == "none":
        return None
    if kind not in FEATURE_AUGMENTATIONS:
        raise UserError(f"cache.augment={kind} is not known{closest(kind, FEATURE_AUGMENTATIONS)}; choose one of none, "
                        + ", ".join(FEATURE_AUGMENTATIONS))
    return FEATURE_AUGMENTATIONS[kind](strength, seed, labels)


def deviations(pieces):
    """Standard deviation over the rows of all pieces (float32 [B, ...]), float32 [...]; one pass in float64."""
    count, total, squares = 0, 0.0, 0.0
    for rows in pieces:
        rows = rows.astype(np.float64)
        count += len(rows)
        total = total + rows.sum(axis=0)
        squares = squares + (rows ** 2).sum(axis=0)
    return np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0)).astype(np.float32)
