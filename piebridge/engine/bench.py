"""A compiled step beside PyTorch's own on the same network: milliseconds measured in turns, and bytes. `piebridge engine bench`."""

import statistics
import time

import torch

from piebridge.core.networks import load_network
from piebridge.engine.byte_counter import ByteCounter
from piebridge.engine.compiling import compile as compile_step
from piebridge.engine.eager_step import EagerStep
from piebridge.engine.interpreter import Interpreter
from piebridge.engine.losses import cross_entropy
from piebridge.engine.program import UPDATE
from piebridge.engine.step_graph import BUFFER, STATE, TRAINED, Part
from piebridge.engine.update_rules import RULES

MIB = 1 << 20
RATE = 1e-3
EAGER = {  # name of the figure -> what is trained, options of EagerStep
    "eager_full_ms": ("full", {}),  # as users run it
    "eager_full_channels_last_ms": ("full", {"is_channels_last": True}),
    "eager_full_bf16_ms": ("full", {"is_channels_last": True, "is_bf16": True}),
    "eager_scheme_ms": ("scheme", {"is_channels_last": True}),
}


def bench(network, scheme, batch_size=8, image_size=224, optimizer="sgd", turns=7, clock=time.perf_counter, **settings):
    """Figures of a scheme on a network: a dict of JSON values.

    network: a name or file (see load_network) or a module on images [B, 3, S, S]. scheme: see compile; None trains everything. settings: of
    compile, such as tolerance and budget_seconds of the backends' choice. turns: how often each step is timed, one after the other.

    Medians in ms: eager_full_ms, eager_full_channels_last_ms, eager_full_bf16_ms, eager_scheme_ms (channels last), step_ms (the program).
    choice: see backends.choose; compile_seconds: from the network to the program, choosing included.
    MiB beside the weights, the rule's states included: pytorch_full_extra_mib (eager full, counted), masked_full_extra_mib and
    sparse_extra_mib (the reference executor on the compiled full and scheme's step, counted); of the scheme's step planned_peak_mib and
    measured_peak_mib, without the states.
    """
    module = load_network(network) if isinstance(network, str) else network
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    with torch.no_grad():
        classes = module.eval()(images[:1]).shape[1]
    example = images, torch.randint(classes, (batch_size,), generator=generator)
    started = clock()
    program = compile_step(module, "cross_entropy", optimizer, scheme, example, backend="auto", **settings)
    figures = {"network": network if isinstance(network, str) else type(module).__name__, "scheme": program.facts["scheme"],
               "optimizer": optimizer, "batch_size": batch_size, "image_size": image_size, "turns": turns,
               "threads": torch.get_num_threads(), "choice": program.facts["choice"], "compile_seconds": round(clock() - started, 3)}
    parts = {"full": {key: Part() for key, _ in module.named_parameters()}, "scheme": program.steps[UPDATE].parts}
    figures.update(_times(module, parts, RULES[optimizer](), program, example, turns, clock))
    figures.update(_bytes(module, parts["full"], optimizer, program, example))
    return figures


def _times(module, parts, rule, program, example, turns, clock):
    weights = _mean(example)
    runs = {name: _eager(EagerStep(module, cross_entropy, rule, parts[trained], **options), example, weights)
            for name, (trained, options) in EAGER.items()}
    runs["step_ms"] = lambda: program(*example, rate=RATE)
    seconds = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            begin = clock()
            run()
            if turn:  # the first run of each warms up
                seconds[name].append(clock() - begin)
    return {name: round(1000 * statistics.median(values), 2) for name, values in seconds.items()}


def _eager(step, example, weights):
    return lambda: step.run(list(example), weights, RATE, 1)


def _bytes(module, full, optimizer, program, example):
    weights = _mean(example)
    eager = EagerStep(module, cross_entropy, RULES[optimizer](), full)
    compiled_full = compile_step(module, "cross_entropy", optimizer, full, example)
    sparse, plan = _counted(_reference(program), example, weights), program.memory
    extra = {
        "pytorch_full_extra_mib": _counted(eager, example, weights) + _state_bytes(eager.tensors),
        "masked_full_extra_mib": _counted(_reference(compiled_full), example, weights) + compiled_full.memory.state_bytes,
        "sparse_extra_mib": sparse + plan.state_bytes, "planned_peak_mib": plan.peak_bytes, "measured_peak_mib": sparse}
    return {name: round(value / MIB, 2) for name, value in extra.items()}


def _counted(executor, example, weights):
    """Bytes that one step allocates at most at one time; the step before it warms up."""
    executor.run(list(example), weights, RATE, 1)
    with ByteCounter() as counter:
        executor.run(list(example), weights, RATE, 2)
    return counter.peak


def _reference(program):
    """The reference executor on copies of a program's tensors."""
    tensors = {key: tensor.clone() if key[0] in (TRAINED, STATE, BUFFER) else tensor for key, tensor in program.tensors.items()}
    return Interpreter(program.steps[UPDATE], tensors)


def _state_bytes(tensors):
    return sum(tensor.nbytes for (role, _), tensor in tensors.items() if role == STATE)


def _mean(example):
    return torch.full((len(example[0]),), 1.0 / len(example[0]))
