"""The reference executor: runs a step's calls one by one, frees each value after its last use, and updates the live tensors in place.

What a call needs is looked up when the interpreter is built: a run is one flat list of (callable, arguments, place of the result,
places to free) over a list of registers.
"""

import functools
import operator

import torch
from torch import fx

from piebridge.core.errors import UserError
from piebridge.engine import compat
from piebridge.engine.lifetime import frees, tensors_of
from piebridge.engine.step_graph import BATCH, BUFFER, COUNT, DRAW, FROZEN, INDEX, LOSSES, OUTPUTS, RATE, STATE, TRAINED, WEIGHTS

LIVE = (TRAINED, FROZEN, BUFFER, INDEX, STATE)  # what stays between steps
GIVEN = (BATCH, WEIGHTS, RATE, COUNT, DRAW)  # what each run brings


class Interpreter:
    """step: StepGraph, propagated. tensors: {(role, name): tensor} of every input that stays between steps; the trained ones, the states
    and the buffers are updated in place. is_channels_last: 4-d values lie with their channels last, which convolutions on CPUs are
    faster with; 4-d tensors in `tensors` are then replaced by such ones.

    UserError where a tensor is missing or has another shape or type, and where a graph does not go with channels last.
    """

    draws_late = True  # takes functions for draws

    def __init__(self, step, tensors, is_channels_last=False):
        self._is_channels_last = is_channels_last
        if is_channels_last:
            _put_channels_last(step, tensors)
        builder = _Builder(step, tensors, self._laid_out if is_channels_last else None)
        self._instructions, self._registers, self._results = builder.build()
        self._given = step.inputs_of(*GIVEN)
        self._scalars = {place: torch.zeros((), dtype=value.dtype, device=builder.device) for place, value in step.inputs_of(RATE, COUNT)}

    def run(self, batch, weights, rate, count, draws=()):
        """batch: tensors in the order of the step's BATCH inputs. weights: float [B]. rate, count: numbers. draws: in the
        order of the DRAW inputs, each a tensor or a function that makes it, called when it is first needed.
        Returns (losses [B], outputs). The outputs are made in inference mode: clone them before autograd gets them.
        """
        losses, outputs = self.results(batch, weights, rate, count, draws)
        return losses.clone(), outputs

    def results(self, batch, weights=None, rate=None, count=None, draws=()):
        """What is put out and not written back, in the order of the step's outputs; also for a graph without losses."""
        with torch.inference_mode():
            registers = self._registers.copy()
            given = {BATCH: iter(batch), WEIGHTS: iter((weights,)), RATE: iter((rate,)), COUNT: iter((count,)), DRAW: iter(draws)}
            for place, value in self._given:
                each = next(given[value.role])
                registers[place] = self._scalars[place].fill_(each) if place in self._scalars else self._laid_out(each)
            del batch, draws, given, each  # or they would stay until the end
            for call, arguments, place, free in self._instructions:
                registers[place] = call(*arguments(registers))
                for register in free:
                    registers[register] = None
            return [registers[place] for place in self._results]

    def _laid_out(self, tensor):
        has_channels = self._is_channels_last and isinstance(tensor, torch.Tensor) and tensor.dim() == 4
        return tensor.contiguous(memory_format=torch.channels_last) if has_channels else tensor


def _put_channels_last(step, tensors):
    aten = compat.aten()
    for node in step.graph.nodes:
        if node.target in (aten.as_strided.default, aten.empty_strided.default, aten.new_empty_strided.default):
            raise UserError(f"engine: {node.name} = {node.target} fixes the layout of its value; compile with is_channels_last=False")
    for key, tensor in tensors.items():
        if tensor.dim() == 4:
            tensors[key] = tensor.contiguous(memory_format=torch.channels_last)


class _Builder:
    """The list of instructions. Registers: one per placeholder in their order, then the graph's other nodes and literals."""

    def __init__(self, step, tensors, laid_out):
        self._step, self._tensors, self._laid_out = step, tensors, laid_out
        self._nodes = list(step.graph.nodes)
        self._places, self._registers, self._instructions = {}, [], []
        self.device = next((tensor.device for tensor in tensors.values()), None)

    def build(self):
        """(instructions, registers as they are at the beginning, places of what is put out)."""
        for node, value in zip(self._step.placeholders, self._step.inputs):
            self._places[node] = self._literal(self._live(value) if value.role in LIVE else None)
        self._sink = self._literal(None)
        planned = self._schedule()
        draws = {self._step.placeholders[position] for position, _ in self._step.inputs_of(DRAW)}
        for node in self._nodes:
            if node.op == "get_attr":
                self._places[node] = self._literal(getattr(self._step.graph_module, node.target))
            elif node.op == "call_function":
                for draw in draws.intersection(node.all_input_nodes):
                    draws.remove(draw)
                    self._instructions.append((self._drawn, _picker([self._places[draw]]), self._places[draw], ()))
                self._call(node, planned.into.get(node))
            for number in planned.writes.get(node, ()):
                self._write(self._step.results[number], self._step.outputs[number])
            if node in planned.after:
                call, arguments, place, _ = self._instructions[-1]
                self._instructions[-1] = call, arguments, place, tuple(self._places[each] for each in planned.after[node])
        results = [node for node, value in zip(self._step.results, self._step.outputs) if value.role in (LOSSES, OUTPUTS)]
        return self._instructions, self._registers, [self._places[node] for node in results]

    def _drawn(self, draw):
        if callable(draw):
            draw = draw()
        return draw if self._laid_out is None else self._laid_out(draw)

    def _literal(self, value):
        self._registers.append(value)
        return len(self._registers) - 1

    def _live(self, value):
        tensor = self._tensors.get((value.role, value.name))
        if tensor is None:
            raise UserError(f"engine: the step needs the {value.role} tensor {value.name!r}, which is not there")
        if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
            raise UserError(f"engine: the {value.role} tensor {value.name!r} is {tensor.dtype} {list(tensor.shape)}, "
                            f"and the step was compiled for {value.dtype} {list(value.shape)}")
        return tensor.detach()

    def _schedule(self):
        """Frees, with what the caller gives let go after its last use."""
        step, position = self._step, {node: number for number, node in enumerate(self._nodes)}
        live = {storage for node in step.placeholders for storage in _storages(node)}
        for node, value in zip(step.results, step.outputs):
            if live.intersection(_storages(node)):
                raise UserError(f"engine: the step's {value.role} {value.name!r} is a view of an input; put a copy out, x.clone()")
        planned = frees(step)
        for node, value in zip(step.placeholders, step.inputs):
            readers = [user for user in node.users if user.op != "output"]
            if value.role in (BATCH, WEIGHTS, RATE, COUNT) and readers:
                planned.after.setdefault(max(readers, key=position.__getitem__), []).append(node)
        return planned

    def _part(self, value):
        return self._step.parts[value.name] if value.role == TRAINED else _WHOLE

    def _target(self, value):
        return self._registers[self._places[next(node for node, each in zip(self._step.placeholders, self._step.inputs)
                                                 if (each.role, each.name) == (value.role, value.name))]]

    def _call(self, node, into):
        target = node.target
        if self._laid_out is not None and target in (compat.aten().view.default, compat.aten()._unsafe_view.default):
            target = compat.aten().reshape.default  # a view of contiguous values, but not always of those with channels last
        keywords = dict(node.kwargs)
        if into is not None:
            target = compat.into(target)
        call = compat.callable_of(target)
        if any(isinstance(each, fx.Node) for each in keywords.values()):
            raise UserError(f"engine: {node.name} = {node.target} takes a value by keyword, which the interpreter does not")
        if keywords:
            call = functools.partial(call, **keywords)
        if into is not None:
            call = functools.partial(_call_into, call)
        self._places[node] = self._literal(None)
        arguments = node.args if into is None else (into, *node.args)
        self._instructions.append((call, self._getter(arguments), self._places[node], ()))

    def _write(self, node, value):
        target, part = self._literal(self._target(value)), self._part(value)
        if part.is_whole:
            self._instructions.append((torch.Tensor.copy_, _picker((target, self._places[node])), self._sink, ()))
        else:
            places = target, self._literal(part.dim), self._literal(part.index), self._places[node]
            self._instructions.append((torch.Tensor.index_copy_, _picker(places), self._sink, ()))

    def _getter(self, arguments):
        """A function from the registers to the positional arguments."""
        if not any(isinstance(each, (list, tuple)) and _has_nodes(each) for each in arguments):
            return _picker([self._places[each] if isinstance(each, fx.Node) else self._literal(_plain(each)) for each in arguments])
        getters = [self._nested(each) for each in arguments]
        return lambda registers: [get(registers) for get in getters]

    def _nested(self, argument):
        if isinstance(argument, (list, tuple)) and _has_nodes(argument):
            getters = [self._nested(each) for each in argument]
            return lambda registers: [get(registers) for get in getters]
        return operator.itemgetter(self._places[argument] if isinstance(argument, fx.Node) else self._literal(_plain(argument)))


class _Whole:
    is_whole = True


_WHOLE = _Whole()


def _call_into(call, out, *arguments, **keywords):
    return call(*arguments, out=out, **keywords)


def _storages(node):
    return [compat.storage_key(each) for each in tensors_of(node.meta["val"])]


def _has_nodes(argument):
    return any(isinstance(each, fx.Node) for each in argument)


def _plain(argument):
    """fx keeps lists of its own kind, which take longer to unpack."""
    return [_plain(each) for each in argument] if isinstance(argument, (list, tuple)) else argument


def _picker(places):
    """operator.itemgetter gives a tuple for two places or more only."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return (lambda registers: (registers[places[0]],)) if places else (lambda registers: ())
