"""Plain PyTorch beside a captured step, and a step run as it stands: for the tests of the engine."""

import copy

import torch
from engine_networks import batch_of, family, loss_of, parts_of, with_lora
from torch import nn

from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.step_graph import BATCH, BUFFER, COUNT, DRAW, FROZEN, INDEX, LOSSES, OUTPUTS, RATE, STATE, TRAINED, WEIGHTS
from piebridge.engine.update_rules import SGD, AdamW

LEARNING_RATE = 0.01
ADAMW = AdamW(0.1, epsilon=1e-4)  # its usual 1e-8 makes steps of full size from gradients that are rounding alone
RULES = {"full": SGD(0.9, 1e-3), "bias": ADAMW, "layers": SGD(), "channels": ADAMW, "lora": SGD(0.9)}


class Reference:
    """Plain autograd and torch.optim on what `parts` names: each part is a leaf of its own that is put into the whole tensor."""

    def __init__(self, module, loss, parts, optimizer):
        """optimizer: leaves -> torch.optim.Optimizer."""
        self.module, self.loss, self.parts = copy.deepcopy(module), loss, parts
        self.whole = {key: parameter.detach() for key, parameter in self.module.named_parameters()}
        self.leaves = {key: part.of(self.whole[key]).clone().requires_grad_(True) for key, part in parts.items()}
        self.optimizer = optimizer(list(self.leaves.values()))

    def tensors(self):
        return {key: leaf if self.parts[key].is_whole else self.whole[key].index_copy(self.parts[key].dim, self.parts[key].index, leaf)
                for key, leaf in self.leaves.items()}

    def backward(self, batch, weights):
        """Adds to the leaves' gradients; (losses, outputs)."""
        inputs, targets = (value if isinstance(value, tuple) else (value,) for value in batch)
        outputs = torch.func.functional_call(self.module, self.tensors(), inputs, tie_weights=True)
        losses = self.loss(outputs, *targets)
        (losses * weights).sum().backward()
        return losses.detach(), outputs.detach()

    def update(self, clip=None):
        if clip is not None:
            nn.utils.clip_grad_norm_(list(self.leaves.values()), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def tensors_of(step, module):
    """{(role, name): tensor}: copies of the module's tensors, the chosen channels, and states of zero."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {(value.role, value.name): named[value.name].detach().clone() for _, value in step.inputs_of(TRAINED, FROZEN, BUFFER)}
    tensors.update({(value.role, value.name): step.parts[value.name].index for _, value in step.inputs_of(INDEX)})
    tensors.update({(value.role, value.name): torch.zeros(value.shape, dtype=value.dtype) for _, value in step.inputs_of(STATE)})
    return tensors


def advance(step, tensors, batch, weights, rate, count, draws=()):
    """Run a step graph as it stands and write what it puts out into `tensors`; (losses, outputs)."""
    flat = [tensor for value in batch for tensor in (value if isinstance(value, tuple) else (value,))]
    given = {BATCH: iter(flat), WEIGHTS: iter([weights]), DRAW: iter(draws)}
    scalars = {RATE: rate, COUNT: count}
    arguments = []
    for value in step.inputs:
        if value.role in given:
            arguments.append(next(given[value.role]))
        elif value.role in scalars:
            arguments.append(torch.tensor(scalars[value.role], dtype=value.dtype))
        else:
            arguments.append(tensors[value.role, value.name])
    results = {(value.role, value.name): tensor for value, tensor in zip(step.outputs, step(*arguments))}
    for (role, name), tensor in results.items():
        if role == TRAINED and not step.parts[name].is_whole:
            tensors[role, name].index_copy_(step.parts[name].dim, step.parts[name].index, tensor)
        elif role in (TRAINED, STATE, BUFFER):
            tensors[role, name].copy_(tensor)
    return results[LOSSES, "losses"], results[OUTPUTS, "outputs"]


def optimizer_of(rule):
    if isinstance(rule, SGD):
        return lambda leaves: torch.optim.SGD(leaves, LEARNING_RATE, rule.momentum, weight_decay=rule.weight_decay)
    return lambda leaves: torch.optim.AdamW(leaves, LEARNING_RATE, eps=rule.epsilon, weight_decay=rule.weight_decay)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def assert_same_tensors(tensors, reference):
    for key, whole in reference.tensors().items():
        assert_close(tensors[TRAINED, key], whole.detach())
    for key, buffer in reference.module.named_buffers():
        assert_close(tensors[BUFFER, key], buffer)


def check_steps(name, scheme, is_training):
    """Three steps of a family and a scheme equal autograd's and torch.optim's: losses, outputs, trained tensors, statistics."""
    module = family(name).train(is_training)
    if scheme == "lora":
        module = with_lora(module)
    parts, rule, weights = parts_of(module, scheme), RULES[scheme], torch.tensor([0.4, 0.0, 0.3, 0.3], dtype=torch.float64)
    reference = Reference(module, loss_of(name), parts, optimizer_of(rule))
    step = capture(module, loss_of(name), rule, parts, batch_of(name), StepSettings(is_training=is_training))
    tensors = tensors_of(step, module)
    for number in range(1, 4):
        batch = batch_of(name, seed=number)
        found, expected = advance(step, tensors, batch, weights, LEARNING_RATE, number), reference.backward(batch, weights)
        reference.update()
        assert_close(found, expected)
        assert_same_tensors(tensors, reference)
