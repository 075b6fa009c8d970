"""How long each level takes on this device: forward alone, and forward and backward through it.

Levels are compared with each other, so they take turns: one call of each per round, and whatever slows the device down for a
while slows all of them down. Backends and batch sizes are measured one after the other, so that no more than one network per
level is in memory.
"""

import logging
import statistics
import time
from collections import namedtuple

import torch

from piebridge.core.backends import BACKENDS, PROXY_BACKENDS, build_segment, missing_packages
from piebridge.core.backends.registry import BF16_ROUNDING
from piebridge.core.device import describe_device
from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.core.packages import one_line, package_version
from piebridge.core.progress_bar import progress_bar
from piebridge.forge.backward import DIFFERENTIABLE, forward_and_backward
from piebridge.forge.structure import structure_of

LOG = logging.getLogger(__name__)
BATCH_SIZES = (1, 4, 32)
FORWARD, BACKWARD = "forward_ms", "backward_ms"
WARM_UPS = 1
LEAST_REPEATS, MOST_REPEATS = 3, 50
VERSIONED = ("torch", "openvino", "onnxruntime", "onnx")

# what measure() takes; a Proxy of a set is one as well
Level = namedtuple("Level", "name network resolution precision")
# levels that take turns. backend: of all but int8 levels, which run with OpenVINO's; weight: of its share of the seconds
_Group = namedtuple("_Group", "direction backend batch_size levels weight")


def original_level(network):
    """The Level of the original."""
    return Level("original", network, network.description["input_size"][-1], "float")


def measure(levels, seconds=300.0, batch_sizes=BATCH_SIZES, backends=None, clock=time.perf_counter):
    """Milliseconds per image of every level, as JSON values:

    {"device", "versions", "levels": {level: {backend: {"forward_ms": {batch size: {"median", "iqr", "repeats"}}, "backward_ms":
    likewise}}}, "refused": [{"level", "backend", "direction", "batch_size", "reason"}]}. iqr: from the first to the third quartile.

    levels: with `name`, `network`, `resolution`, `precision` ("float", "bf16", "int8"), all networks on one device, the original
    first. seconds: about how long it may take; LEAST_REPEATS of each are measured in any case. backends: names; None: every
    installed one. A level runs on the backends that compute at its precision; backward through an int8 level runs in float, int8 has
    none. Forward goes from images to features in memory of the CPU. Backward adds the gradient from the head's tap back to the first tap
    at which a trainable block can sit, the output of the original's first block; parameters are frozen. What fails is listed in
    "refused", and the rest goes on.
    UserError: no levels, two of one name, an unknown backend, a batch size or seconds out of range.
    """
    levels = list(levels)
    _check(levels, seconds, batch_sizes, backends)
    device = next(levels[0].network.parameters()).device
    table = {"device": describe_device(device), "versions": {name: package_version(name) for name in VERSIONED},
             "levels": {level.name: {} for level in levels}, "refused": []}
    groups = _groups(levels, batch_sizes, backends, device, table)
    taps = _first_taps(levels)
    deadline = clock() + seconds
    for number, group in enumerate(progress_bar(groups, desc="measuring", unit="group")):
        share = group.weight / sum(each.weight for each in groups[number:])
        _measure_group(group, taps, max(0.0, deadline - clock()) * share, clock, table)
    return table


def take_turns(calls, seconds, clock=time.perf_counter):
    """({key: [seconds of each counted call]}, {key: why it failed}) of calls, {key: function}, that take turns.

    After WARM_UPS rounds that do not count come at least LEAST_REPEATS that do, and more while another one fits into `seconds`.
    """
    calls, times, refused = dict(calls), {key: [] for key in calls}, {}

    def take_turn(is_counted):
        for key, call in list(calls.items()):
            start = clock()
            try:
                call()
            except Exception as failure:  # whatever a library raises, the others can still run
                LOG.debug("%s failed", key, exc_info=True)
                refused[key] = one_line(failure)
                del calls[key], times[key]
                continue
            if is_counted:
                times[key].append(clock() - start)

    for _ in range(WARM_UPS):
        take_turn(is_counted=False)
    start = clock()
    for done in range(MOST_REPEATS):
        if done >= LEAST_REPEATS and (clock() - start) * (done + 1) / done > seconds:
            break
        take_turn(is_counted=True)
    return times, refused


def summary(times, batch_size):
    """{"median", "iqr", "repeats"}, ms per image, of the seconds of at least two calls."""
    low, median, high = statistics.quantiles([1000 * each / batch_size for each in times], n=4, method="inclusive")
    return {"median": round(median, 5), "iqr": round(high - low, 5), "repeats": len(times)}


def _check(levels, seconds, batch_sizes, backends):
    names = [level.name for level in levels]
    if not levels:
        raise UserError("latency: there are no levels to measure; give the original and its proxies")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"latency: two levels are called {twice!r}; a table needs a name for each")
    wrong = next((size for size in batch_sizes if isinstance(size, bool) or not isinstance(size, int) or size < 1), None)
    if wrong is not None or not batch_sizes:
        raise UserError(f"latency: batch_sizes={batch_sizes!r}: give whole numbers of at least 1, for example 1,4,32")
    if not 0 < seconds < float("inf"):
        raise UserError(f"latency: seconds={seconds!r}: give a number above 0")
    known = dict(BACKENDS, **PROXY_BACKENDS)
    unknown = next((name for name in backends or () if name not in known), None)
    if unknown is not None:
        raise UserError(f"latency: unknown backend {unknown!r}{closest(unknown, list(known))}; known: {', '.join(known)}")


def _groups(levels, batch_sizes, backends, device, table):
    """The groups, small batches first; levels without a backend here are noted in the table."""
    members = {}
    for level in levels:
        names = _backends_of(level, level.precision, backends, device, table)
        for backend in names:
            members.setdefault((FORWARD, "openvino" if backend in PROXY_BACKENDS else backend), []).append((level, backend))
        for backend in _backends_of(level, "float", backends, device, table) if level.precision == "int8" else names:
            if backend in DIFFERENTIABLE:
                members.setdefault((BACKWARD, backend), []).append((level, backend))
    return [_Group(direction, name, batch_size, entries, batch_size ** 0.5)  # a large batch takes longer, a small one varies more
            for batch_size in sorted(set(batch_sizes)) for (direction, name), entries in members.items()]


def _backends_of(level, precision, wanted, device, table):
    at_precision = {"float": [name for name, known in BACKENDS.items() if known.rounding == 0.0],
                    "bf16": [name for name, known in BACKENDS.items() if known.rounding == BF16_ROUNDING],
                    "int8": list(PROXY_BACKENDS)}.get(precision, [])
    known = dict(BACKENDS, **PROXY_BACKENDS)
    here = [name for name in at_precision if not missing_packages(name) and (device.type == "cpu" or not known[name].is_cpu_only)]
    if not here:
        reason = f"precision {precision} needs {' or '.join(at_precision) or 'a backend that computes so'}, which is not here"
        table["refused"].append(_refusal(level.name, None, None, None, reason))
    return [name for name in here if wanted is None or name in wanted]


def _first_taps(levels):
    """{level: the node at which backward ends}: the output of the original's first block, or where that block was dropped."""
    original = levels[0].network.description
    output = structure_of(levels[0].network, levels[0].resolution).blocks[0].tap
    inputs = {block["output"]: block["input"] for block in original["blocks"]}
    taps = {}
    for level in levels:
        nodes = {node["name"] for node in level.network.description["nodes"]}
        taps[level.name] = output if output in nodes else inputs.get(output)
    return taps


def _measure_group(group, taps, seconds, clock, table):
    calls, refused = {}, {}
    for level, backend in group.levels:
        try:
            calls[level.name, backend] = _call(level, backend, group, taps[level.name])
        except Exception as failure:  # see take_turns
            LOG.debug("%s on %s cannot be built", level.name, backend, exc_info=True)
            refused[level.name, backend] = one_line(failure)
    times, failed = take_turns(calls, seconds, clock)
    for (name, backend), each in times.items():
        cells = table["levels"][name].setdefault(backend, {}).setdefault(group.direction, {})
        cells[str(group.batch_size)] = summary(each, group.batch_size)
    for (name, backend), reason in {**refused, **failed}.items():
        table["refused"].append(_refusal(name, backend, group.direction, group.batch_size, reason))


def _refusal(level, backend, direction, batch_size, reason):
    return {"level": level, "backend": backend, "direction": direction, "batch_size": batch_size, "reason": reason}


def _call(level, backend, group, tap):
    """A function without arguments that does once what is to be timed."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(group.batch_size, 3, level.resolution, level.resolution, generator=generator)
    if group.direction == FORWARD:
        segment = build_segment(backend, level.network, level.resolution, group.batch_size)
        if backend == "torchscript":
            segment(images)  # it specialises itself in two calls, and one is the warm-up
        return lambda: segment(images)
    return forward_and_backward(level.network, backend, tap, images)
