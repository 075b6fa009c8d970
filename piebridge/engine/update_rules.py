"""Update rules as pure functions, to be traced into the step. The same formulas as core/optimizers.py, which updates in place.

A rule: `slots`, the names of its states for each trained part, and `new_values(value, gradient, states, rate, count)` -> (value, states).
"""

import math
from dataclasses import dataclass

import torch

from piebridge.core.errors import UserError
from piebridge.core.names import closest


@dataclass(frozen=True)
class SGD:
    """b <- momentum * b + g + decay * p; p <- p - rate * b. Without momentum there is no state."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def slots(self):
        return ("velocity",) if self.momentum else ()

    def new_values(self, value, gradient, states, rate, count):
        step = gradient + self.weight_decay * value if self.weight_decay else gradient
        if self.momentum:
            step = self.momentum * states["velocity"] + step
            states = {"velocity": step}
        return value - rate * step, states


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay (Loshchilov & Hutter, 2019).

    p <- p - rate * decay * p - rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    weight_decay: float = 0.01
    beta_mean: float = 0.9
    beta_square: float = 0.999
    epsilon: float = 1e-8
    slots = ("mean", "square")

    def new_values(self, value, gradient, states, rate, count):
        mean = self.beta_mean * states["mean"] + (1 - self.beta_mean) * gradient
        square = self.beta_square * states["square"] + (1 - self.beta_square) * gradient * gradient
        root = torch.sqrt(square / _power_complement(self.beta_square, count)) + self.epsilon
        new = value * (1 - rate * self.weight_decay) - rate / _power_complement(self.beta_mean, count) * mean / root
        return new, {"mean": mean, "square": square}


def _power_complement(beta, count):
    """1 - beta^count. With a = tanh(-count ln(beta) / 2) this is 2a / (1 + a), which loses no digits where beta^count is close to 1:
    in float32, 1 - 0.999 as written is off by 1e-5 of itself."""
    half = torch.tanh(count * (-0.5 * math.log(beta)))
    return 2 * half / (1 + half)


RULES = {"sgd": SGD, "adamw": AdamW}


def rule_of(settings):
    """The rule for the `optimizer` section of a configuration (kind, momentum, weight_decay)."""
    if settings.kind not in RULES:
        raise UserError(f"optimizer.kind={settings.kind}: unknown{closest(settings.kind, RULES)}; known: {', '.join(RULES)}")
    if settings.kind == "sgd":
        return SGD(settings.momentum, settings.weight_decay)
    return AdamW(settings.weight_decay)
