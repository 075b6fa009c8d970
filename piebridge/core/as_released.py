"""What the released artifact of PieBridge does where the paper says otherwise: `as_released=true`, for those who must compare.

Objects for the loop, none of which any other mode uses. Levels come from the policy with Gumbel noise; batches may mix levels, the
tail of the data is dropped; the gate looks at whole batches; with adapters Adam is made anew each step; the accuracy is that of the test
images, of which the last are left out and counted as wrong. The artifact draws without a seed; here the run's seed is used.
"""

import logging

import numpy as np

from piebridge.core.errors import UserError
from piebridge.core.optimizers import UpdateRule
from piebridge.core.sampler import epoch_seed
from piebridge.core.step import EagerStep

LOG = logging.getLogger(__name__)
TEST_BATCH = 4  # images; what does not fill a batch is left out
LEAST = 1e-20  # keeps both logarithms of the noise finite


class NoisyPolicy:
    """Levels of a policy with noise: argmax over levels of logit - log(-log u), u uniform, drawn once for each sample.

    policy: PolicyRouter. count: samples; seed: of their noise. The softmax and its temperature that the artifact puts between change
    no maximum.
    """

    def __init__(self, policy, count, seed):
        self.size = policy.size
        uniform = np.random.RandomState(seed).rand(count, policy.network.head.out_features)
        self._policy, self._noise = policy, -np.log(-np.log(uniform + LEAST) + LEAST)

    def __call__(self, images, indices):
        """Images [N, 3, H, W] of the samples `indices` (list of int [N]) -> levels int64 [N]."""
        return np.argmax(self._policy.logits(images).cpu().numpy() + self._noise[indices], axis=1).astype(np.int64)


def released_batches(count, batch_size, seed, epoch, levels=None):
    """Lists of positions for one epoch, as `sampler.epoch_batches` gives them, but full batches only, in random order.

    Samples are sorted by level, shuffled within one, and cut into batches, so that one batch in a few has two levels or more; its first
    sample, one of its lowest level, decides. What does not fill a batch, of the highest level, is left out of the epoch. UserError
    where nothing is left.
    """
    if count < batch_size:
        raise UserError(f"as_released=true: {count} training images do not fill a batch of {batch_size}, and the artifact drops what does "
                        "not; lower loader.batch_size")
    random = np.random.RandomState(epoch_seed(seed, epoch))
    order = random.permutation(count)
    if levels is not None:
        order = order[np.argsort(np.asarray(levels)[order], kind="stable")]
    whole = count // batch_size
    return [order[number * batch_size:(number + 1) * batch_size].tolist() for number in random.permutation(whole)]


class FreshAdam(UpdateRule):
    """Adam whose moments are forgotten after each step, which is its first one: p <- p - rate / 10^level * g / (|g| + 1e-8).

    So each weight moves by the same amount, whatever its gradient, and on a cheap level by next to nothing.
    """

    epsilon = 1e-8
    level = 0  # of the batch whose gradients come next

    def _update(self, parameters, gradients, rate, steps):
        for parameter, gradient in zip(parameters, gradients):
            parameter.sub_(gradient / (gradient.abs() + self.epsilon), alpha=rate / 10 ** self.level)


class FreshAdamStep(EagerStep):
    """EagerStep with FreshAdam in its optimizer's place."""

    def __init__(self, trainable, settings):
        super().__init__(trainable, settings)
        self.optimizer = FreshAdam(self.optimizer.parameters, settings)

    def __call__(self, inputs, labels, gate, progress, level=0):
        self.optimizer.level = level
        return super().__call__(inputs, labels, gate, progress, level)


def counted_images(samples):
    """(the test images that the artifact looks at, their share of all): the last ones, which fill no batch, are left out."""
    counted = samples[:len(samples) - len(samples) % TEST_BATCH]
    return counted, len(counted) / len(samples) if samples else 1.0


class CountedValidation:
    """A validation on `counted_images`, whose accuracy is divided by the number of all images."""

    def __init__(self, validation, share):
        self._validation, self._share = validation, share
        LOG.warning("as_released=true: the epoch with the best accuracy on the test images is the one that counts, as in the artifact")

    def prepare(self):
        self._validation.prepare()

    def __call__(self, trainable):
        accuracy, loss = self._validation(trainable)
        return (None if accuracy is None else accuracy * self._share), loss
