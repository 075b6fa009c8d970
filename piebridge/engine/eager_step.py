"""The step by PyTorch itself: forward, autograd's backward, torch.optim's update. The baseline of every comparison, and a candidate."""

import contextlib
import copy

import torch
from torch import nn

from piebridge.engine.capture import StepSettings
from piebridge.engine.step_graph import BUFFER, STATE, TRAINED
from piebridge.engine.update_rules import AdamW


class EagerStep:
    """An executor (see interpreter.py) over a copy of a module, which itself is left as it is.

    loss, rule, parts, settings: as `capture` takes them. tensors: {(role, name): tensor}, the live trained ones, states and buffers,
    updated in place; None: copies of the module's own and fresh states. Frozen ones are the module's. is_channels_last: 4-d tensors lie
    with their channels last; in `tensors` they are then replaced.
    is_bf16: the forward runs under autocast to bfloat16, the loss in float. is_foreach: torch's update of all tensors together; if not, its
    default, as users run it. (Its fused one gave other momenta for EfficientNet-Lite0's head, torch 2.14.1.) input_count: how many
    of the batch's tensors the module takes; the loss takes the others. Dropout draws its own numbers here.
    """

    def __init__(self, module, loss, rule, parts, settings=None, tensors=None, is_channels_last=False, is_bf16=False, is_foreach=False,
                 is_accumulating=False, input_count=1):
        self._loss, self._parts, self._settings = loss, parts, settings or StepSettings()
        self._is_accumulating, self._input_count = is_accumulating, input_count
        self._is_channels_last, self._is_bf16 = is_channels_last, is_bf16
        self.tensors = _own_tensors(module, rule, parts, self._settings) if tensors is None else tensors
        if is_channels_last:
            self.tensors.update({name: _channels_last(tensor) for name, tensor in self.tensors.items() if name[0] in (TRAINED, STATE)})
        self._module = _with_tensors(module, parts, self.tensors, _channels_last if is_channels_last else torch.Tensor.detach)
        if not self._settings.is_training:
            self._module.eval()
        self._trained = {key: parameter for key, parameter in self._module.named_parameters() if key in parts}
        # what torch.optim updates: the parameters themselves, or copies of the trained parts
        self._leaves = {key: parameter if parts[key].is_whole else nn.Parameter(parts[key].of(parameter.detach()))
                        for key, parameter in self._trained.items()}
        self._optimizer, self._counts = _optimizer(rule, self._leaves, self.tensors, is_foreach)

    def run(self, batch, weights, rate, count, draws=()):
        """batch: the module's inputs, then the loss's targets. weights: float [B]. rate, count: numbers. -> (losses [B], outputs)."""
        losses, outputs = self._forward(batch)
        (losses * weights).sum().backward()
        with torch.no_grad():
            for key, parameter in self._trained.items():
                if self._leaves[key] is not parameter:
                    self._leaves[key].grad = self._parts[key].of(parameter.grad)
                    parameter.grad = None
            if self._settings.accumulation > 1:
                self._accumulate()
            if not self._is_accumulating:
                self._update(float(rate), float(count))
        for leaf in self._leaves.values():
            leaf.grad = None
        return losses.detach(), outputs.detach()

    def _forward(self, batch):
        inputs, targets = batch[:self._input_count], batch[self._input_count:]
        if self._is_channels_last:
            inputs = [_channels_last(each) for each in inputs]
        is_bf16 = self._is_bf16
        with torch.autocast(inputs[0].device.type, torch.bfloat16) if is_bf16 else contextlib.nullcontext():
            outputs = self._module(*inputs)
        outputs = outputs.float() if is_bf16 else outputs
        return self._loss(outputs, *targets), outputs

    def _accumulate(self):
        for key, leaf in self._leaves.items():
            total = self.tensors[STATE, f"{key}/gradient"]
            total += leaf.grad
            if not self._is_accumulating:
                leaf.grad = total.clone()
                total.zero_()

    def _update(self, rate, count):
        if self._settings.clip is not None:
            nn.utils.clip_grad_norm_(self._leaves.values(), self._settings.clip)
        for key, leaf in self._leaves.items():
            if leaf is not self._trained[key]:  # somebody may have restored the whole since
                leaf.copy_(self._parts[key].of(self._trained[key]))
        for each in self._counts:
            each.fill_(count - 1)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        for key, leaf in self._leaves.items():
            if leaf is not self._trained[key]:
                self._trained[key].index_copy_(self._parts[key].dim, self._parts[key].index, leaf)


def _own_tensors(module, rule, parts, settings):
    parameters = dict(module.named_parameters())
    tensors = {(BUFFER, key): buffer.detach().clone() for key, buffer in module.named_buffers()}
    slots = rule.slots + (("gradient",) if settings.accumulation > 1 else ())
    for key, part in parts.items():
        tensors[TRAINED, key] = parameters[key].detach().clone()
        for slot in slots:
            tensors[STATE, f"{key}/{slot}"] = torch.zeros_like(part.of(tensors[TRAINED, key]))
    return tensors


def _with_tensors(module, parts, tensors, laid):
    """A copy of the module on these tensors, its frozen ones laid out by `laid`; tied parameters stay tied."""
    memo = {}
    for key, parameter in module.named_parameters():
        is_trained = key in parts
        memo[id(parameter)] = nn.Parameter(tensors[TRAINED, key] if is_trained else laid(parameter.detach()), requires_grad=is_trained)
    for key, buffer in module.named_buffers():
        memo[id(buffer)] = tensors.get((BUFFER, key), buffer)
    return copy.deepcopy(module, memo)


def _channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _optimizer(rule, leaves, tensors, is_foreach):
    """(torch.optim's optimizer for a rule, whose states are the live tensors; the counts that it keeps)."""
    def state(key, slot):
        return tensors[STATE, f"{key}/{slot}"]

    options, parameters = {"foreach": True} if is_foreach else {}, list(leaves.values())
    if not isinstance(rule, AdamW):
        optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=rule.momentum, weight_decay=rule.weight_decay, **options)
        for key, leaf in leaves.items():
            if rule.momentum:
                optimizer.state[leaf]["momentum_buffer"] = state(key, "velocity")
        return optimizer, []
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(rule.beta_mean, rule.beta_square), eps=rule.epsilon,
                                  weight_decay=rule.weight_decay, **options)
    counts = [torch.tensor(0.0) for _ in leaves]
    for (key, leaf), count in zip(leaves.items(), counts):
        optimizer.state[leaf].update(step=count, exp_avg=state(key, "mean"), exp_avg_sq=state(key, "square"))
    return optimizer, counts
