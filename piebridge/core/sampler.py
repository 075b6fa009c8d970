"""Mini-batches of one level each, nothing dropped."""

import numpy as np


def epoch_batches(count, batch_size, seed, epoch, levels=None):
    """Lists of sample indices for one epoch; a pure function of its arguments, so that a resumed run sees the same batches.

    Without `levels` it is a shuffle cut into batches. With `levels` (int array [count]) samples are sorted by level and shuffled
    within one, so that a mini-batch has one level and each network is loaded once (PieBridge, mini-batch re-organisation); the
    last batch of a level may be smaller.
    """
    order = np.random.RandomState(epoch_seed(seed, epoch)).permutation(count)
    if levels is None:
        groups = [order]
    else:
        levels = np.asarray(levels)
        groups = [order[levels[order] == level] for level in np.unique(levels)]
    return [group[start:start + batch_size].tolist() for group in groups for start in range(0, len(group), batch_size)]


class EverySample:
    """No sample is left out of an epoch. Another pruner (InfoBatch) has the same methods.

    `kept` must be a function of its arguments and of what `end_epoch` left, since a resumed run asks again in the middle of an epoch.
    """

    def kept(self, usable, epoch):
        """Those of the samples `usable` (list of int) that take part in this epoch, in the same order."""
        return usable

    def end_epoch(self):
        pass

    def state(self):
        return {}

    def restore(self, state):
        pass


class OriginalOnly:
    """Samples that would go to a proxy are left out (an ablation: are proxies worth more than skipping?), and what `pruner` leaves out."""

    def __init__(self, router, pruner):
        self._router, self._pruner = router, pruner
        self.end_epoch, self.state, self.restore = pruner.end_epoch, pruner.state, pruner.restore

    def kept(self, usable, epoch):
        levels = self._router.levels[usable]
        return self._pruner.kept([index for index, level in zip(usable, levels) if level == 0], epoch)


def epoch_seed(seed, epoch):
    """The seed of one epoch's order."""
    return (seed * 1000003 + epoch * 7919 + 17) % (2 ** 32)
