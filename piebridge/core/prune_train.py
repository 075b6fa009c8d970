"""PruneTrain: full fine-tuning under a group lasso, of a network that becomes smaller while it is trained.

Lym, Choukse, Zangeneh, Wen, Sanghavi, Erez: PruneTrain: Fast Neural Network Training by Dynamic Sparse Model Reconfiguration, SC'19.
Two things differ. The lasso's coefficient is a setting, as in PieBridge's comparison, where the paper derives it from the first loss.
And a layer that has lost all channels keeps one, where the paper removes the layer.
"""

import logging

import torch

from piebridge.core.channel_groups import channel_groups, counts_of
from piebridge.core.cutting import cut_network, resized, tensor_slices
from piebridge.core.group_lasso import GroupLasso
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.optimizers import build_optimizer
from piebridge.core.step import EagerStep
from piebridge.core.tuning import Tuning

LOG = logging.getLogger(__name__)


class ShrinkingTuning(Tuning):
    """A Tuning of a whole network that loses channels. A `state` of it tells by its shapes how many there were of each.

    What comes out (`bridged`) is the network with the channels that are left: a plain network file, not of the original's shapes.
    """

    def __init__(self, network, settings):
        self._settings = settings
        self._whole, self._plan = network.description, channel_groups(network)
        super().__init__(network, settings)

    def become(self, network):
        """Go on with another network, of the same nodes."""
        training = self.training
        super().__init__(network, self._settings)
        self.train(training)

    def counts(self):
        """{group: how many channels there are}."""
        return counts_of(self._plan, {key: tensor.shape for key, tensor in self.state().items()})

    def resize(self, counts):
        """Become the network with so many channels in each group; its tensors are zeros, to be filled by `restore`."""
        description = resized(self._whole, self._plan, counts)
        live = self.state()
        tensors = {key: torch.zeros(shape, dtype=live[key].dtype, device=live[key].device)
                   for key, shape in expected_shapes(description).items()}
        self.become(GraphNetwork(description, tensors))

    def restore(self, state):
        """Take over a `state` of any size. ValueError where its shapes do not belong together."""
        shapes = {key: state[key].shape for key in self.state()}
        if self._misfit(shapes):
            self.resize(counts_of(self._plan, shapes))
        if self._misfit(shapes):
            raise ValueError(f"tensor {self._misfit(shapes)!r} has another number of channels than the layers around it")
        super().restore(state)

    def _misfit(self, shapes):
        """The first tensor whose shape is not that in `shapes`, or None."""
        return next((key for key, tensor in self.state().items() if tensor.shape != shapes[key]), None)


class PruneTrainStep(EagerStep):
    """EagerStep with `strength` times the group lasso added to the loss, and channels removed each `every` epochs.

    A channel goes when all weights that write or read it have fallen below `threshold` (see GroupLasso.dense); batch norm, depthwise
    weights, the network's arguments and the optimizer's state are cut with it. Residual channels go from the whole of their path.
    """

    def __init__(self, trainable, settings, pet, prune_train):
        super().__init__(ShrinkingTuning(trainable.network, pet), settings)
        self._prune_train = prune_train
        self._epochs = 0
        self._look()

    def backward(self, loss):
        super().backward(loss)
        self._lasso.add_gradient(self._prune_train.strength)

    def end_epoch(self, share_done):
        super().end_epoch(share_done)
        self._epochs += 1
        if self._epochs % self._prune_train.every == 0:
            self._reconfigure()

    def state(self):
        counts = sorted(self.trainable.counts().items())
        return dict(super().state(), epochs=torch.tensor([self._epochs]), channels=torch.tensor([count for _, count in counts]))

    def restore(self, state):
        names = sorted(self.trainable.counts())
        self.trainable.resize(dict(zip(names, state["channels"].tolist())))
        self.optimizer = build_optimizer(self.trainable.parameters(), self._settings)
        self._epochs = int(state["epochs"][0])
        self._look()
        super().restore({name: tensor for name, tensor in state.items() if name not in ("epochs", "channels")})

    def _look(self):
        """Find the channels of the network as it is now."""
        self._groups = channel_groups(self.trainable.network)
        self._lasso = GroupLasso(self.trainable.network, self._groups.groups)

    def _reconfigure(self):
        network, kept = self.trainable.network, self._lasso.dense(self._prune_train.threshold)
        before = sum(self.trainable.counts().values())
        if kept:
            slices = tensor_slices(self._groups, kept)
            keys = [key for key, _ in network.named_parameters()]
            self.trainable.become(cut_network(network, self._groups, kept))
            self.optimizer = self.optimizer.narrowed(self.trainable.parameters(), [slices.get(key, []) for key in keys])
            self._look()
        LOG.info("PruneTrain: %d of %d channels removed; %d parameters are left", before - sum(self.trainable.counts().values()),
                 before, self.trainable.count())
