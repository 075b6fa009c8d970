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
from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.losses import LOSSES
from piebridge.engine.passes import run_passes
from piebridge.engine.program import ACCUMULATE, UPDATE, StepProgram
from piebridge.engine.program_cache import ProgramCache
from piebridge.engine.step_graph import BUFFER, FROZEN, INDEX, STATE, TRAINED, Part
from piebridge.engine.update_rules import RULES

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileSettings:
    """clip, accumulation, is_training: see capture.StepSettings. seed: of dropout's draws. off: names of passes to leave out.
    is_channels_last: for the reference executor; None where the network has 2-d convolutions. cache: True for the user's cache folder,
    False for none, or a folder.
    """

    clip: Optional[float] = None
    accumulation: int = 1
    is_training: bool = False
    seed: int = 0
    off: Tuple[str, ...] = ()
    is_channels_last: Optional[bool] = None
    cache: Union[bool, str] = True


def compile(module, loss="cross_entropy", optimizer="sgd", scheme=None, example=None, **settings):
    """A StepProgram that trains `module`, which itself stays as it is; `program.load_into(module)` brings the tuned values.

    loss: a name from losses.py, or (outputs, *targets) -> float [B]. optimizer: a name from update_rules.py or a rule. scheme: what is
    trained: a scheme.Scheme, its text, file or preset; {key: Part}; None for everything. example: (inputs, targets), each a tensor or a
    tuple of tensors, with the shapes and types of every batch to come. settings: of CompileSettings.
    UserError where the network cannot be traced, and for an unknown name.
    """
    started = time.perf_counter()
    settings = _settings(settings)
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise UserError("engine: compile needs example=(inputs, targets), a batch as the step will get it")
    parts, scheme_text = _parts(scheme, module, example)
    steps = _captured(module, _named(loss, LOSSES, "loss"), _rule(optimizer), parts, tuple(example), settings)
    facts = {"scheme": scheme_text, "settings": _kept_settings(settings, module), "mixes_samples": _mixing_layer(module, settings)}
    tensors = _tensors(steps, module)
    cache = ProgramCache(None if settings.cache is True else settings.cache) if settings.cache else None
    key = cache.key(steps, tensors, dict(facts, settings=dict(facts["settings"], seed=None))) if cache else None
    found = cache.find(key) if cache else None
    if found:
        steps, cached, _ = found
        tensors = {name: tensors[name] if name[0] == TRAINED else tensor for name, tensor in cached.items()}
    else:
        tensors = _passed(steps, tensors, settings.off)
        if cache:
            cache.keep(key, steps, tensors, facts)
    facts.update(compile_seconds=time.perf_counter() - started, is_cached=bool(found))
    LOG.info("engine: compiled in %.1f s%s: %d calls", facts["compile_seconds"], " (from the cache)" if found else "",
             sum(node.op == "call_function" for node in steps[UPDATE].graph.nodes))
    return StepProgram(steps, tensors, facts)


def _settings(given):
    known = [each.name for each in dataclasses.fields(CompileSettings)]
    for name in given:
        if name not in known:
            raise UserError(f"engine: no setting {name!r}; there are {', '.join(known)}{closest(name, known)}")
    settings = CompileSettings(**dict(given, off=tuple(given.get("off", ()))))
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


def _parts(scheme, module, example):
    """({key: Part}, text of the scheme)."""
    if scheme is None:
        return {key: Part() for key, _ in module.named_parameters()}, "everything"
    if isinstance(scheme, dict):
        return scheme, "parts"
    from piebridge.engine.scheme import Scheme

    scheme = scheme if isinstance(scheme, Scheme) else Scheme.read(scheme)
    return scheme.resolve(module, example), str(scheme)


def _captured(module, loss, rule, parts, example, settings):
    step_settings = StepSettings(clip=settings.clip, accumulation=settings.accumulation, is_training=settings.is_training)
    names = (UPDATE, ACCUMULATE) if settings.accumulation > 1 else (UPDATE,)
    return {name: capture(module, loss, rule, parts, example, step_settings, is_accumulating=name == ACCUMULATE) for name in names}


def _kept_settings(settings, module):
    """Those that the program needs when it runs, and those that say how it was made."""
    kept = dataclasses.asdict(settings)
    del kept["cache"]
    if settings.is_channels_last is None:
        kept["is_channels_last"] = any(isinstance(each, nn.Conv2d) for each in module.modules())
    return dict(kept, off=list(settings.off))


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
