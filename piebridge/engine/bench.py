"""A compiled step beside PyTorch's own on the same network: milliseconds measured in turns, and bytes. `piebridge engine bench`."""

import functools
import logging
import statistics
import time

import torch
from torchvision import models

from piebridge.core.errors import UserError
from piebridge.core.networks import ARCHITECTURES, load_network
from piebridge.engine.byte_counter import ByteCounter
from piebridge.engine.compiling import compile as compile_step
from piebridge.engine.eager_step import EagerStep
from piebridge.engine.interpreter import Interpreter
from piebridge.engine.losses import cross_entropy
from piebridge.engine.passes import TRADING_TIME
from piebridge.engine.program import UPDATE
from piebridge.engine.segments import cut
from piebridge.engine.step_graph import Part
from piebridge.engine.update_rules import RULES

LOG = logging.getLogger(__name__)
MIB = 1 << 20
RATE = 1e-3
EAGER = {  # name of the figure -> what is trained, options of EagerStep
    "eager_full_ms": ("full", {}),  # as users run it
    "eager_full_channels_last_ms": ("full", {"is_channels_last": True}),
    "eager_full_bf16_ms": ("full", {"is_channels_last": True, "is_bf16": True}),
    "eager_scheme_ms": ("scheme", {"is_channels_last": True}),
}


def bench(network, scheme, batch_size=8, image_size=224, rule="sgd", turns=7, clock=time.perf_counter, **settings):
    """Figures of a scheme on a network: a dict of JSON values.

    network: a name or file (see network_of), or a module on images [B, 3, S, S] -> [B, C]. scheme, rule: see compile; scheme None trains
    everything. turns: how often each step is timed, one after the other. settings: of compile; all candidates, and no cache, by default;
    off: passes that are left out in any case: where time is measured, those that trade it for memory are too.

    Medians in ms: eager_full_ms, eager_full_channels_last_ms, eager_full_bf16_ms, eager_scheme_ms (channels last), step_ms (the program),
    full_step_ms (the program that trains everything). choice, full_choice: see backends.choose; compile_seconds, full_compile_seconds: from
    the network to the program, choosing included.
    MiB beside the weights, with the rule's states: pytorch_full_extra_mib (eager full, counted), masked_full_extra_mib and
    sparse_extra_mib (the reference executor, NCHW, on the compiled full step and on the scheme's, counted, while the trained part runs with
    what the frozen part before it gave: that part is what inference takes as well). Of the scheme's whole step, without the states:
    planned_peak_mib and measured_peak_mib.
    """
    module = network_of(network) if isinstance(network, str) else network
    rule = RULES[rule]() if isinstance(rule, str) else rule
    settings = {"candidates": "all", "cache": False, **settings}
    example = _example(module, batch_size, image_size)
    off = tuple(settings.pop("off", ()))
    program, whole = [compile_step(module, cross_entropy, rule, trained, example, off=(*TRADING_TIME, *off), **settings)
                      for trained in (scheme, None)]
    parts = {"full": {key: Part() for key, _ in module.named_parameters()}, "scheme": program.steps[UPDATE].parts}
    figures = {"network": network if isinstance(network, str) else type(module).__name__, "scheme": program.facts["scheme"],
               "rule": type(rule).__name__, "batch_size": batch_size, "image_size": image_size, "turns": turns,
               "threads": torch.get_num_threads(), "choice": program.facts["choice"], "compile_seconds": round(program.compile_seconds, 3),
               "full_choice": whole.facts["choice"], "full_compile_seconds": round(whole.compile_seconds, 3)}
    figures.update(_times(module, parts, rule, {"step_ms": program, "full_step_ms": whole}, example, turns, clock))
    del program, whole
    settings.update(candidates=None, is_channels_last=False, off=off)
    full, sparse = [compile_step(module, cross_entropy, rule, trained, example, **settings) for trained in (None, scheme)]
    figures.update(_bytes(EagerStep(module, cross_entropy, rule, parts["full"]), full, sparse, example))
    return figures


def network_of(name):
    """A network by name or file as load_network gives it; where its pretrained weights cannot be had, with random ones, which take as long.
    Also any of torchvision's classifiers by its name there, with random weights.
    """
    if name not in ARCHITECTURES and name in models.list_models(models):
        return models.get_model(name, weights=None).eval()
    try:
        return load_network(name)
    except UserError as problem:
        if name not in ARCHITECTURES:
            raise
        LOG.warning("random weights: %s", problem)
        return load_network(name, is_pretrained=False)


def _example(module, batch_size, image_size):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    with torch.no_grad():
        classes = module.eval()(images[:1]).shape[1]
    return images, torch.randint(classes, (batch_size,), generator=generator)


def _times(module, parts, rule, programs, example, turns, clock):
    runs = {name: _eager(EagerStep(module, cross_entropy, rule, parts[trained], **options), example)
            for name, (trained, options) in EAGER.items()}
    runs.update({name: functools.partial(program, *example, rate=RATE) for name, program in programs.items()})
    seconds = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            run()  # threads of the step before spin for a while, see probe_step.py
            begin = clock()
            run()
            if turn:  # the first run of each warms up
                seconds[name].append(clock() - begin)
    return {name: round(1000 * statistics.median(values), 2) for name, values in seconds.items()}


def _bytes(eager, full, sparse, example):
    counted = {"eager": _counted(_eager(eager, example)), "full": _counted(lambda: full(*example, rate=RATE)),
               "sparse": _counted(lambda: sparse(*example, rate=RATE))}
    states = {"full": full.memory.state_bytes, "sparse": sparse.memory.state_bytes}
    extra = {
        "pytorch_full_extra_mib": counted["eager"] + states["full"], "masked_full_extra_mib": counted["full"] + states["full"],
        "sparse_extra_mib": _counted_rest(sparse, example) + states["sparse"],
        "planned_peak_mib": sparse.memory.peak_bytes, "measured_peak_mib": counted["sparse"]}
    return {name: round(value / MIB, 2) for name, value in extra.items()}


def _counted(run):
    """Bytes that one step allocates at most at one time; the step before it warms up."""
    run()
    with ByteCounter() as counter:
        run()
    return counter.peak


def _counted_rest(program, example):
    """Bytes at most while what follows the frozen prefix runs, with what crosses over from the prefix."""
    division = cut(program.steps[UPDATE])
    if division.prefix is None:
        return _counted(lambda: program(*example, rate=RATE))
    images, labels = example
    crossing = Interpreter(division.prefix, program.tensors).results([images])
    rest, weights = Interpreter(division.rest, program.tensors), torch.full((len(images),), 1.0 / len(images))
    return division.crossing_bytes + _counted(lambda: rest.run([*crossing, labels], weights, RATE, 1))


def _eager(step, example):
    weights = torch.full((len(example[0]),), 1.0 / len(example[0]))
    return lambda: step.run(list(example), weights, RATE, 1)
