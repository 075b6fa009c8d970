"""ElasticTrainer: full fine-tuning of those tensors that matter most now, as many as a time budget allows.

Huang, Yang, Gao: ElasticTrainer: Speeding Up On-Device Training with Runtime Elastic Tensor Selection, MobiSys'23.
`rho` is a share of the backward's time, what the authors' program comes to after it has taken off the forward: 0.4 of the backward is
0.6 of a step whose forward takes a third, and ElasticTrainer took 0.51 to 0.61 of FTAll's time in PieBridge's comparison at rho 0.4.
"""

import logging

import torch

from piebridge.core.device import same_random_numbers
from piebridge.core.optimizers import learning_rate
from piebridge.core.step import EagerStep
from piebridge.core.tensor_selection import select_tensors
from piebridge.core.tensor_timing import timing_of

LOG = logging.getLogger(__name__)


class ElasticStep(EagerStep):
    """EagerStep that trains a part of the tensors, chosen anew each `every` epochs on the first batch.

    The backward takes the share `rho` of the whole one's time, by a profile that the first batch of the first run makes. No gradient
    is computed for a tensor that is not chosen, and nothing below the deepest one that is; its update rule's state waits.
    """

    def __init__(self, trainable, settings, elastic):
        super().__init__(trainable, settings)
        self._elastic = elastic
        self._times = {}  # own, reach: float64 [tensors]; total: [1]. In the state, as no second profile is the same
        self._is_due, self._epochs = True, 0

    def __call__(self, inputs, labels, gate, progress, level=0):
        if self._is_due:
            with same_random_numbers(inputs.device):
                self._choose(inputs, labels, learning_rate(self._settings, progress), level)
            self._is_due = False
        return super().__call__(inputs, labels, gate, progress, level)

    def end_epoch(self, share_done):
        super().end_epoch(share_done)
        self._epochs += 1
        self._is_due = self._is_due or self._epochs % self._elastic.every == 0

    def state(self):
        is_chosen = [parameter.requires_grad for parameter in self.trainable.parameters()]
        return dict(super().state(), epochs=torch.tensor([self._epochs]), is_due=torch.tensor([self._is_due]),
                    is_chosen=torch.tensor(is_chosen), **self._times)

    def restore(self, state):
        state = dict(state)
        self._epochs, self._is_due = int(state.pop("epochs")[0]), bool(state.pop("is_due")[0])
        self._train_only(torch.nonzero(state.pop("is_chosen")).flatten().tolist())
        self._times = {name: state.pop(name) for name in ("own", "reach", "total") if name in state}
        super().restore(state)

    def _choose(self, inputs, labels, rate, level):
        parameters = self.trainable.parameters()
        self._train_only(range(len(parameters)))
        if not self._times:
            self._times = self._profile(inputs)
        importance = tensor_importance(lambda: self.losses(inputs, labels, level).mean(), self.trainable, self.optimizer, rate)
        own, reach, total = self._times["own"].numpy(), self._times["reach"].numpy(), float(self._times["total"][0])
        chosen = select_tensors(importance, own, reach, self._elastic.rho * total)
        if not chosen:
            LOG.warning("ElasticTrainer: elastic.rho=%g leaves time for no tensor that lowers the loss; the one nearest to the output is "
                        "trained", self._elastic.rho)
            chosen = [int(reach.argmin())]
        self._train_only(chosen)
        seconds = sum(own[chosen]) + max(reach[chosen])
        LOG.info("ElasticTrainer: %d of %d tensors are trained, %d of %d numbers; predicted backward %.0f %% of the whole one's time",
                 len(chosen), len(parameters), sum(parameters[index].numel() for index in chosen), self.trainable.count(),
                 100 * seconds / total)

    def _profile(self, inputs):
        """Times of the trained tensors, in their order."""
        timing = timing_of(self.trainable.network, inputs)
        names = {parameter: key for key, parameter in self.trainable.network.named_parameters()}
        keys = [names[parameter] for parameter in self.trainable.parameters()]
        own, reach = [torch.tensor([times[key] for key in keys], dtype=torch.float64) for times in (timing.own, timing.reach)]
        return {"own": own, "reach": reach, "total": torch.tensor([timing.total], dtype=torch.float64)}

    def _train_only(self, chosen):
        chosen = set(chosen)
        for index, parameter in enumerate(self.trainable.parameters()):
            parameter.requires_grad_(index in chosen)


def tensor_importance(loss, trainable, optimizer, rate):
    """How much the loss falls by each tensor's next update, to first order: a list of float, one for each of the optimizer's parameters.

    -(dL/dw) . dw summed over a tensor (section 4), where dw is what one step of the optimizer at learning rate `rate` changes all
    tensors by, and the gradient is that after the step, as in the authors' program. loss: () -> scalar, of a batch. trainable,
    optimizer: left as they were, but for `.grad`.
    """
    parameters = optimizer.parameters
    trained, state = _copies(trainable.state()), _copies(optimizer.state())
    before = [parameter.detach().clone() for parameter in parameters]
    _gradients(loss, optimizer)
    optimizer.step(rate)
    _gradients(loss, optimizer)
    importance = [_importance(parameter, old) for parameter, old in zip(parameters, before)]
    trainable.restore(trained)
    optimizer.restore(state)
    optimizer.zero_grad()
    return importance


def _gradients(loss, optimizer):
    optimizer.zero_grad()
    loss().backward()


@torch.no_grad()
def _importance(parameter, old):
    if parameter.grad is None:
        return 0.0
    return -float((parameter.grad.double() * (parameter.double() - old.double())).sum())


def _copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
