"""Update rules and learning-rate schedules by name.

The rules are written out here since torch.optim imports torch's compiler, which takes a second: as long as everything else that
`ours` does on a small set. They are checked against torch.optim in float64.
"""

import math

import torch

from piebridge.core.compat import fused_adamw
from piebridge.core.slices import cut


class UpdateRule:
    """Updates `parameters` in place from their `.grad`; its state is a flat dict of tensors, for checkpoints.

    Each parameter's updates are counted by themselves: one that begins to be trained later begins like any other.
    """

    slots = ()  # names of the tensors that are kept for each parameter

    def __init__(self, parameters, settings):
        self.parameters = list(parameters)
        self.settings = settings
        self.steps = [0] * len(self.parameters)
        self._slots = {name: [torch.zeros_like(parameter) for parameter in self.parameters] for name in self.slots}

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, rate):
        """One update at learning rate `rate`. Parameters without a gradient stay as they are."""
        chosen = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        for index in chosen:
            self.steps[index] += 1
        parameters, steps = [self.parameters[index] for index in chosen], [self.steps[index] for index in chosen]
        slots = [[self._slots[name][index] for index in chosen] for name in self.slots]
        if chosen:
            self._update(parameters, [parameter.grad for parameter in parameters], rate, steps, *slots)

    def narrowed(self, parameters, slices):
        """A rule that goes on with `parameters`, which are the cuts of its own that `slices` (a list, see core/slices.py) name."""
        rule = type(self)(parameters, self.settings)
        rule.steps = list(self.steps)
        for name, tensors in self._slots.items():
            rule._slots[name] = [cut(tensor, each).clone() for tensor, each in zip(tensors, slices)]
        return rule

    def _update(self, parameters, gradients, rate, steps, *slots):
        raise NotImplementedError

    def state(self):
        """{name: tensor}; the tensors are the live ones."""
        state = {f"{name}/{index}": tensor for name, tensors in self._slots.items() for index, tensor in enumerate(tensors)}
        state["steps"] = torch.tensor(self.steps)
        return state

    def restore(self, state):
        if len(state["steps"]) != len(self.parameters):
            raise ValueError(f"the state of {len(state['steps'])} parameters, where there are {len(self.parameters)}")
        self.steps = state["steps"].tolist()
        for name, tensors in self._slots.items():
            for index, tensor in enumerate(tensors):
                tensor.copy_(state[f"{name}/{index}"])


class AdamW(UpdateRule):
    """Decoupled weight decay (Loshchilov & Hutter, 2019), betas 0.9 and 0.999, epsilon 1e-8.

    p <- p - rate * decay * p - rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    slots = ("mean", "square")
    beta_mean, beta_square, epsilon = 0.9, 0.999, 1e-8

    def _update(self, parameters, gradients, rate, steps, means, squares):
        if fused_adamw is not None and parameters[0].device.type == "cpu":  # one call where the lines below are ten: a fifth of the time
            steps = [torch.tensor(float(count)) for count in steps]
            fused_adamw(parameters, gradients, means, squares, [], steps, lr=rate, beta1=self.beta_mean, beta2=self.beta_square,
                        weight_decay=self.settings.weight_decay, eps=self.epsilon, amsgrad=False, maximize=False)
            return
        torch._foreach_mul_(parameters, 1 - rate * self.settings.weight_decay)
        torch._foreach_mul_(means, self.beta_mean)
        torch._foreach_add_(means, gradients, alpha=1 - self.beta_mean)
        torch._foreach_mul_(squares, self.beta_square)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - self.beta_square)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1 - self.beta_square ** count) for count in steps])
        torch._foreach_add_(roots, self.epsilon)
        torch._foreach_addcdiv_(parameters, means, roots, [-rate / (1 - self.beta_mean ** count) for count in steps])


class SGD(UpdateRule):
    """Momentum without dampening, weight decay in the gradient: b <- momentum * b + g + decay * p; p <- p - rate * b."""

    slots = ("velocity",)

    def _update(self, parameters, gradients, rate, steps, velocities):
        torch._foreach_mul_(velocities, self.settings.momentum)
        torch._foreach_add_(velocities, gradients)
        torch._foreach_add_(velocities, parameters, alpha=self.settings.weight_decay)
        torch._foreach_add_(parameters, velocities, alpha=-rate)


def build_optimizer(parameters, settings):
    """The UpdateRule over `parameters` for the `optimizer` section of a configuration."""
    return UPDATE_RULES[settings.kind](parameters, settings)


def learning_rate(settings, progress):
    """Rate when the share `progress` (0..1) of the run is done. cosine: lr/2 * (1 + cos(pi * progress))."""
    return SCHEDULES[settings.schedule](settings.lr, progress)


UPDATE_RULES = {"adamw": AdamW, "sgd": SGD}
SCHEDULES = {
    "cosine": lambda lr, progress: 0.5 * lr * (1 + math.cos(math.pi * progress)),
    "constant": lambda lr, progress: lr,
}
