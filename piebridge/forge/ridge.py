"""Ridge regression from sums alone: rows come in batches and are forgotten."""

import torch

PENALTIES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)  # in units of the Gram matrix's mean eigenvalue


class NormalEquations:
    """What least squares needs of rows x [D] and y [C]: their Gram matrix, cross products and sums, in float64.

    The model is y = x W + b, or y = x W where `has_offset` is False; the penalty is on W alone.
    """

    def __init__(self, inputs, outputs, has_offset=True, device="cpu"):
        self.has_offset, self.count = has_offset, 0
        zeros = {"dtype": torch.float64, "device": device}
        self.gram, self.cross = torch.zeros(inputs, inputs, **zeros), torch.zeros(inputs, outputs, **zeros)
        self.input_sum, self.output_sum = torch.zeros(inputs, **zeros), torch.zeros(outputs, **zeros)
        self.output_square = 0.0

    def add(self, inputs, outputs):
        """Rows [n,D] and [n,C]. Products are in float64 too: in float32, activations with a large mean lose the small eigenvalues."""
        inputs, outputs = inputs.double(), outputs.double()
        self.count += len(inputs)
        self.gram += inputs.T @ inputs
        self.cross += inputs.T @ outputs
        self.input_sum += inputs.sum(0)
        self.output_sum += outputs.sum(0)
        self.output_square += float(outputs.square().sum())

    def plus(self, other):
        """The equations of both sets of rows."""
        both = NormalEquations(*self.cross.shape, self.has_offset, self.gram.device)
        for name in ("count", "gram", "cross", "input_sum", "output_sum", "output_square"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def solve(self, penalty):
        """(W [D,C], b [C]) with the least sum of |y - x W - b|^2 + penalty * mean eigenvalue * |W|^2."""
        gram, cross = self.gram, self.cross
        if self.has_offset:
            gram = gram - torch.outer(self.input_sum, self.input_sum) / self.count
            cross = cross - torch.outer(self.input_sum, self.output_sum) / self.count
        scale = max(float(gram.diagonal().mean()), 1e-30)
        damped = gram + penalty * scale * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        weights = torch.cholesky_solve(cross, torch.linalg.cholesky(damped))
        return weights, self.offset(weights)

    def offset(self, weights):
        """The best b [C] beside given W."""
        if not self.has_offset:
            return torch.zeros_like(self.output_sum)
        return (self.output_sum - self.input_sum @ weights) / max(self.count, 1)

    def error(self, weights, offset):
        """Sum of |y - x W - b|^2 over the rows."""
        fitted = (weights * (self.gram @ weights)).sum() - 2 * (weights * self.cross).sum()
        shifted = self.count * offset.square().sum() + 2 * offset @ (self.input_sum @ weights - self.output_sum)
        return max(self.output_square + float(fitted + shifted), 0.0)


def choose_penalty(fitted, held_out, penalties=PENALTIES):
    """The penalty whose solution of `fitted` leaves the least error on `held_out`, or None where y = 0 leaves less."""
    errors = {None: held_out.output_square}
    for penalty in penalties:
        errors[penalty] = held_out.error(*fitted.solve(penalty))
    return min(errors, key=errors.get)
