"""Gates and pruners that leave samples out by lot: the unbiased gate, Selective-Backprop, InfoBatch.

Each draws from numpy's generator seeded with (seed, number of the draw), so that its whole random state is a count.
"""

import math

import numpy as np
import torch

from piebridge.core.gate import OpenGate, RunningLoss
from piebridge.core.sampler import EverySample

ROUNDING = 1e-9  # a product such as 0.1 * 30 may come out a little above the whole number that it is


class Lots:
    """Reproducible draws: uniform numbers of [0, 1) by seed and count."""

    def __init__(self, seed, drawn=0):
        self.seed, self.drawn = seed, drawn

    def uniform(self, count):
        """float64 [count]; another call gives others."""
        self.drawn += 1
        return np.random.RandomState([self.seed, self.drawn]).random_sample(count)


def first_full_epoch(epochs, full_share):
    """The first epoch (from 0) in which every sample runs; `full_share` of the epochs, rounded up, are like that."""
    return epochs - int(math.ceil(full_share * epochs - ROUNDING))


class UnbiasedGate(EverySample):
    """Drops part of the low-loss samples of a batch and rescales the rest, so that the expected gradient is the full one.

    A sample whose loss is not above the running mean loss theta (see RunningLoss) is dropped with probability r; kept, it counts
    1 / (1 - r) times. Whatever theta is, each sample's expected weight is 1 (inverse probability weighting, as InfoBatch has it
    between epochs). From epoch `full_from` on all samples run and count once.
    """

    def __init__(self, momentum, drop_share, full_from, seed):
        self._running, self._drop_share, self._full_from, self._lots = RunningLoss(momentum), drop_share, full_from, Lots(seed)
        self._epoch = 0

    def kept(self, usable, epoch):
        self._epoch = epoch
        return usable

    def select(self, losses, indices=None):
        """losses: float [B] -> (is_selected bool [B], weights float [B]), or None for all of them."""
        threshold = self._running.follow(losses)
        if threshold is None or self._epoch >= self._full_from:
            return None
        is_low = losses <= threshold
        lots = torch.from_numpy(self._lots.uniform(len(losses))).to(losses.device)
        weights = torch.where(is_low, torch.full_like(losses, 1 / (1 - self._drop_share)), torch.ones_like(losses))
        return ~is_low | (lots >= self._drop_share), weights

    def state(self):
        return {"threshold": self._running.value, "drawn": self._lots.drawn, "epoch": self._epoch}

    def restore(self, state):
        self._running.value, self._lots.drawn, self._epoch = state["threshold"], state["drawn"], state["epoch"]


class SelectiveBackprop(OpenGate):
    """Runs backward with a probability that grows with the loss (Jiang et al. 2019, section 3.2).

    P(backward) = CDF(loss) ** beta, the CDF over the last `history` losses, this batch's included. beta 1, 2, 3 select a half, a
    third, a quarter in the mean. Nothing is rescaled: the method is biased to large losses by design.
    """

    def __init__(self, beta, history, seed):
        self._beta, self._length, self._lots = beta, history, Lots(seed)
        self._history = []  # losses, the oldest first

    def probabilities(self, losses):
        """losses: float [B] -> P(backward) float64 [B], by the history as it is."""
        history = np.sort(np.asarray(self._history))
        return (np.searchsorted(history, losses, side="right") / len(history)) ** self._beta

    def select(self, losses, indices=None):
        """losses: float [B] -> (is_selected bool [B], None)."""
        values = losses.cpu().numpy().astype(np.float64)
        self._history = (self._history + values.tolist())[-self._length:]
        is_selected = self._lots.uniform(len(values)) < self.probabilities(values)
        return torch.from_numpy(is_selected).to(losses.device), None

    def state(self):
        return {"history": self._history, "drawn": self._lots.drawn}

    def restore(self, state):
        self._history, self._lots.drawn = list(state["history"]), state["drawn"]


class InfoBatch(EverySample):
    """Prunes samples of low loss from an epoch and rescales those that stay (Qin et al., ICLR 2024, algorithm 1).

    A sample's score is its loss when it was last seen. At an epoch's start each sample whose score is below the mean score is left
    out with probability r; the others of them count 1 / (1 - r) times (`gate`), so that the expected sum of an epoch's gradients is
    the full one. From epoch `full_from` on nothing is pruned. `kept` is decided before anything is decoded.
    """

    UNSEEN = math.inf  # of a sample that has no score yet: never pruned, and left out of the mean

    def __init__(self, samples, drop_share, full_from, seed):
        self._drop_share, self._full_from, self._seed = drop_share, full_from, seed
        self._scores = np.full(samples, self.UNSEEN)  # as of the last epoch's end
        self._seen = self._scores.copy()  # with this epoch's losses
        self.weights = np.ones(samples)
        self.gate = RescalingGate(self)

    def kept(self, usable, epoch):
        """Those of the samples `usable` (list of int) that take part in this epoch, in the same order."""
        self.weights = np.ones(len(self._scores))
        usable = np.asarray(usable, dtype=np.int64)
        scores = self._scores[usable]
        known = scores[scores < self.UNSEEN]
        if epoch >= self._full_from or not len(known):
            return usable.tolist()
        is_low = scores < known.mean()
        is_kept = ~is_low | (Lots(self._seed, epoch).uniform(len(usable)) >= self._drop_share)
        self.weights[usable[is_low]] = 1 / (1 - self._drop_share)
        return usable[is_kept].tolist()

    def observe(self, losses, indices):
        """Losses float [B] of the samples `indices`: their scores from the next epoch on."""
        self._seen[indices] = losses.cpu().numpy()

    def end_epoch(self):
        self._scores = self._seen.copy()

    def state(self):
        return {"scores": self._scores.tolist(), "seen": self._seen.tolist()}

    def restore(self, state):
        self._scores, self._seen = np.array(state["scores"]), np.array(state["seen"])


class RescalingGate(OpenGate):
    """Every sample that the pruner has kept runs backward, with the weight that the pruner gives it."""

    def __init__(self, pruner):
        self._pruner = pruner

    def select(self, losses, indices):
        """losses: float [B] of the samples `indices` -> (all true, weights float [B])."""
        self._pruner.observe(losses, indices)
        return torch.ones(len(losses), dtype=torch.bool, device=losses.device), self.weights(indices).to(losses.device, losses.dtype)

    def weights(self, indices=None):
        return torch.from_numpy(self._pruner.weights[indices])
