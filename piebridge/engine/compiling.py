"""`piebridge.engine.compile`: from a network, a loss, an optimizer and a scheme to a step program."""

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import Optional, Tuple, Union

import torch
from torch import nn

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.engine.capture import capture
from piebridge.engine.channel_choice import FISHER, fisher_information
from piebridge.engine.losses import LOSSES
from piebridge.engine.passes import TRADING_TIME, run_passes
from piebridge.engine.program import ACCUMULATE, UPDATE, StepProgram
from piebridge.engine.program_cache import ProgramCache
from piebridge.engine.scheme import Scheme
from piebridge.engine.step_function import StepSettings
from piebridge.engine.step_graph import BUFFER, FROZEN, INDEX, STATE, TRAINED, Part
from piebridge.engine.update_rules import RULES

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileSettings:
    """clip, accumulation, is_training: see step_function.StepSettings. seed: of dropout's draws. off: names of passes to leave out,
    () for the least memory.
    is_channels_last: for the reference executor; None where the network has 2-d convolutions. candidates: names of executors to measure
    beside the reference (see candidates.py), "all", or None to take the reference unmeasured; tolerance: that they have to keep.
    cache: True for the user's cache folder, False for none, or a folder.
    """

    clip: Optional[float] = None
    accumulation: int = 1
    is_training: bool = False
    seed: int = 0
    off: Tuple[str, ...] = TRADING_TIME
    is_channels_last: Optional[bool] = None
    candidates: Union[None, str, Tuple[str, ...]] = None
    tolerance: float = 1e-3
    cache: Union[bool, str] = True

    @property
    def of_step(self):
        return StepSettings(clip=self.clip, accumulation=self.accumulation, is_training=self.is_training)


def compile(module, loss="cross_entropy", optimizer="sgd", scheme=None, example=None, **settings):
    """A StepProgram that trains `module`, which itself stays as it is; `program.load_into(module)` brings the tuned values.

    loss: a name from losses.py, or (outputs, *targets) -> float [B]. optimizer: a name from update_rules.py or a rule. scheme: what is
    trained: a scheme.Scheme, its text, file or preset; {key: Part}; None for everything. Channels by Fisher information are chosen on the
    example. example: (inputs, targets), each a tensor or a tuple of tensors, with the shapes and types of every batch to come.
    settings: of CompileSettings. UserError where the network cannot be traced, and for an unknown name.
    """
    watch, settings = _Stopwatch(), _settings(settings)
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise UserError("engine: compile needs example=(inputs, targets), a batch as the step will get it")
    loss, rule = _named(loss, LOSSES, "loss"), _rule(optimizer)
    parts, scheme_text = _parts(scheme, module, loss, example)
    watch.lap("scheme")
    steps = _captured(module, loss, rule, parts, example, settings)
    own = _tensors(steps, module)
    facts = {"scheme": scheme_text, "settings": _kept_settings(settings, module), "mixes_samples": _mixing_layer(module, settings)}
    watch.lap("capture")
    cache = ProgramCache(None if settings.cache is True else settings.cache) if settings.cache else None
    key = cache.key(steps, own, dict(facts, settings=dict(facts["settings"], seed=None))) if cache else None
    found = cache.find(key) if cache else None
    if found:
        steps, cached, before = found
        tensors, facts["choice"] = {name: own.get(name, tensor) for name, tensor in cached.items()}, before.get("choice")
        watch.lap("cache")
    else:
        tensors = _passed(steps, own, settings.off)
        watch.lap("passes")
    executor = _executor(settings, facts, module, loss, rule, example)
    program = StepProgram(steps, tensors, facts, executor)
    program.facts.update(choice=getattr(executor, "choice", None), is_cached=bool(found))
    watch.lap("executor")
    if cache and not found:
        cache.keep(key, steps, tensors, program.facts)
        watch.lap("cache")
    program.facts.update(compile_phases=watch.seconds, compile_seconds=sum(watch.seconds.values()))
    _report(program)
    return program


class _Stopwatch:
    """seconds: {phase: since the end of the one before}."""

    def __init__(self):
        self.seconds, self._last = {}, time.perf_counter()

    def lap(self, phase):
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now


def _report(program):
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in program.facts["compile_phases"].items())
    calls = sum(node.op == "call_function" for node in program.steps[UPDATE].graph.nodes)
    LOG.info("engine: %s in %.1f s (%s): %d calls", "found in the cache" if program.facts["is_cached"] else "compiled",
             program.compile_seconds, phases, calls)


def _settings(given):
    known = [each.name for each in dataclasses.fields(CompileSettings)]
    for name in given:
        if name not in known:
            raise UserError(f"engine: no setting {name!r}; there are {', '.join(known)}{closest(name, known)}")
    settings = CompileSettings(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
    if settings.accumulation < 1:
        raise UserError(f"engine: accumulation={settings.accumulation}; it counts batches per update, from 1")
    return settings


def _named(value, known, kind):
    if not isinstance(value, str):
        return value
    if value not in known:
        raise UserError(f"engine: no {kind} {value!r}; there are {', '.join(known)}{closest(value, known)}")
    return known[value]


def _rule(optimizer):
    rule = _named(optimizer, RULES, "optimizer")
    return rule() if isinstance(rule, type) else rule


def _parts(scheme, module, loss, example):
    """({key: Part}, text of the scheme)."""
    if scheme is None:
        return {key: Part() for key, _ in module.named_parameters()}, "everything"
    if isinstance(scheme, dict) and all(isinstance(part, Part) for part in scheme.values()):
        return scheme, "parts"
    scheme = Scheme.read(scheme)
    scores = fisher_information(module, loss, [tuple(example)]) if scheme.channels == FISHER else None
    return scheme.resolve(module, example[0], scores), scheme.text()


def _captured(module, loss, rule, parts, example, settings):
    names = (UPDATE, ACCUMULATE) if settings.accumulation > 1 else (UPDATE,)
    batch = tuple(example)
    return {name: capture(module, loss, rule, parts, batch, settings.of_step, is_accumulating=name == ACCUMULATE) for name in names}


def _executor(settings, facts, module, loss, rule, example):
    """What makes the executors; None for the reference."""
    if settings.candidates is None:
        return None
    from piebridge.engine.backends import FastestExecutor
    from piebridge.engine.candidates import Origin

    batch = [tensor for values in example for tensor in (values if isinstance(values, tuple) else (values,))]
    names = (settings.candidates,) if isinstance(settings.candidates, str) else settings.candidates
    candidates = None if "all" in names else names
    return FastestExecutor(batch, Origin(module, loss, rule, settings.of_step), facts.get("choice"), tolerance=settings.tolerance,
                           candidates=candidates)


def _kept_settings(settings, module):
    """Those that the program needs when it runs, and those that say how it was made."""
    kept = dataclasses.asdict(settings)
    del kept["cache"]
    if settings.is_channels_last is None:
        kept["is_channels_last"] = any(isinstance(each, nn.Conv2d) for each in module.modules())
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}


def _mixing_layer(module, settings):
    """The first layer whose result for one sample depends on the others in its batch, or None."""
    for path, layer in module.named_modules():
        is_training = settings.is_training and layer.training
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (is_training or not layer.track_running_stats):
            return f"batch norm {path!r}"
    return None


def _tensors(steps, module):
    """{(role, name): tensor} of all that stays between steps, as the network has it."""
    own = dict(module.named_parameters(), **dict(module.named_buffers()))
    tensors = {}
    for step in steps.values():
        for _, value in step.inputs_of(TRAINED, FROZEN, BUFFER):
            tensors[value.role, value.name] = own[value.name].detach()
        for _, value in step.inputs_of(INDEX):
            tensors[value.role, value.name] = step.parts[value.name].index
        for _, value in step.inputs_of(STATE):
            like = own[value.name.rpartition("/")[0]]
            tensors[value.role, value.name] = torch.zeros(value.shape, dtype=value.dtype, device=like.device)
    return tensors


def _passed(steps, tensors, off):
    """Run the passes on each graph -> the tensors that are then needed. What they compute beforehand may differ between the graphs."""
    needed = {}
    for name, step in steps.items():
        own = dict(tensors)
        run_passes(step, own, off)
        for position, value in step.inputs_of(TRAINED, FROZEN, BUFFER, INDEX, STATE):
            tensor = own[value.role, value.name]
            known = needed.setdefault((value.role, value.name), tensor)
            if known is not tensor and not (known.shape == tensor.shape and known.dtype == tensor.dtype and torch.equal(known, tensor)):
                step.inputs[position] = dataclasses.replace(value, name=f"{name}/{value.name}")
                needed[value.role, f"{name}/{value.name}"] = tensor
    return needed
