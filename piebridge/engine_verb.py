"""`piebridge engine`: show, search, compile and bench sparse training steps."""

import functools
import json
import sys

from piebridge.core.byte_sizes import parse_bytes, shown_bytes
from piebridge.core.errors import UserError
from piebridge.core.files import expand_user, write_text

BENCHED = ("mobilenet_v2", "mobilenet_v3_large", "resnet50", "efficientnet_lite0")
FIGURES = ("eager_full_ms", "eager_full_channels_last_ms", "eager_full_bf16_ms", "eager_scheme_ms", "step_ms", "full_step_ms",
           "compile_seconds", "full_compile_seconds",
           "pytorch_full_extra_mib", "masked_full_extra_mib", "sparse_extra_mib", "planned_peak_mib", "measured_peak_mib")


def run(arguments):
    """The text to print."""
    if sys.version_info < (3, 10):
        raise UserError(f"engine: works on a workstation with Python 3.10 or newer (this is {sys.version.split()[0]})")
    from piebridge.engine_settings import engine_settings

    networks = [word for word in arguments.words if "=" not in word]
    settings = engine_settings([word for word in arguments.words if "=" in word])
    if arguments.action != "bench" and len(networks) != 1:
        raise UserError(f"engine {arguments.action}: name one network, such as efficientnet_lite0 (given: {', '.join(networks) or 'none'})")
    return ACTIONS[arguments.action](arguments, networks, settings)


def _show(arguments, networks, settings):
    from piebridge.engine.bench import network_of
    from piebridge.engine.memory_picture import bars, table, write_png
    from piebridge.engine.show import render_scheme

    module, example = _network(networks[0], settings, network_of)
    program = _compiled(module, example, settings, candidates=None)
    plan = program.memory
    if arguments.out is not None:
        write_png(plan, expand_user(arguments.out), f"{networks[0]}, batch {settings.batch_size}: memory of one step")
    return "\n\n".join([render_scheme(module, settings.scheme, example[0]), table(plan), bars(plan)]
                       + ([f"picture  {arguments.out}"] if arguments.out is not None else []))


def _search(arguments, networks, settings):
    from piebridge.engine.layer_times import layer_times_of
    from piebridge.engine.layers import layers_of
    from piebridge.engine.losses import cross_entropy
    from piebridge.engine.planned import extra_bytes_of
    from piebridge.engine.search import SearchSettings, search

    if arguments.memory is None or settings.data is None:
        raise UserError(f"engine search {networks[0]}: give --memory SIZE, such as 64MiB, and data=NAME|DIR, on which layers show what "
                        "they are worth")
    budget = parse_bytes(arguments.memory)
    module, batches, validation = _network_and_batches(networks[0], settings)
    times = latency = None
    if arguments.latency is not None:
        layers, latency = layers_of(module, batches[0][0]), arguments.latency
        times = functools.partial(layer_times_of(module, layers, batches[0], cross_entropy).milliseconds, layers)
    rule = _rule(settings)
    found = search(module, cross_entropy, batches, budget, extra_bytes_of(module, cross_entropy, rule, batches[0]), latency, times,
                   SearchSettings(contribution=settings.contribution, method=settings.method, states=len(rule.slots), seed=settings.seed),
                   _short_runs(module, batches, validation) if settings.contribution == "runs" else None)
    text = found.scheme.text()
    if arguments.out is not None:
        write_text(expand_user(arguments.out), text)
    duration = f", {found.milliseconds:.1f} ms" if found.milliseconds is not None else ""
    return "\n".join([text, f"planned extra memory {shown_bytes(found.planned_bytes)} of {shown_bytes(budget)}{duration}; contributions "
                      f"{found.report['contribution_seconds']:.1f} s, search {found.report['search_seconds']:.1f} s"]
                     + ([f"scheme  {arguments.out}"] if arguments.out is not None else []))


def _compile(arguments, networks, settings):
    from piebridge.engine.backends import reason
    from piebridge.engine.memory_picture import table

    if arguments.out is None:
        raise UserError(f"engine compile {networks[0]}: give --out FILE for the program, such as step.safetensors")
    module, example = _network(networks[0], settings)
    program = _compiled(module, example, settings, candidates=_candidates(settings))
    program.write(expand_user(arguments.out))
    choice = program.facts.get("choice")
    return "\n".join([table(program.memory), "", f"compiled in {program.compile_seconds:.1f} s; "
                      + (reason(choice) if choice else "runs on the reference executor"), f"program  {arguments.out}"])


def _bench(arguments, networks, settings):
    from piebridge.engine.bench import bench, network_of

    rows = []
    for name in networks or BENCHED:
        module, example = _network(name, settings, network_of)
        rows.append(dict(bench(module, settings.scheme, settings.batch_size, example[0].shape[-1], _rule(settings), settings.turns,
                               candidates=_candidates(settings), tolerance=settings.tolerance, off=settings.off), network=name))
    if arguments.json:
        return json.dumps(rows, indent=1)
    return "\n\n".join(_figures(row) for row in rows)


def _figures(row):
    lines = ["{network}, batch {batch_size}, {image_size} px, {threads} threads, medians of {turns} turns".format(**row)]
    lines += [f"  {name:<28}{row[name]:10.2f}" for name in FIGURES]
    eager = min(row[name] for name in ("eager_full_ms", "eager_full_channels_last_ms", "eager_full_bf16_ms"))
    lines += [f"  {words:<28}{above / below:10.2f}x" for words, above, below in (
        ("faster than eager full", row["eager_full_ms"], row["step_ms"]), ("than the best eager full", eager, row["step_ms"]),
        ("than eager, same scheme", row["eager_scheme_ms"], row["step_ms"]),
        ("full step, than best eager", eager, row["full_step_ms"]),
        ("less memory than eager full", row["pytorch_full_extra_mib"], row["sparse_extra_mib"]),
        ("full with masks, less", row["pytorch_full_extra_mib"], row["masked_full_extra_mib"]))]
    for words, choice in (("runs on", row["choice"]), ("full step runs on", row["full_choice"])):
        if choice:
            lines.append(f"  {words:<28}" + ", ".join(f"{part}: {name}" for part, name in choice["parts"].items()))
    return "\n".join(lines)


def _network(name, settings, load=None):
    """(module, example batch of noise) as the settings ask for. load: name -> module."""
    import torch

    from piebridge.core.networks import INPUT_SIZE, load_network

    torch.manual_seed(settings.seed)
    module = (load or load_network)(name)
    description = getattr(module, "description", None)
    if settings.classes and description is None:
        raise UserError(f"engine: classes={settings.classes}: {name} is torchvision's own, whose head stays; leave classes out")
    if settings.classes:
        module.replace_head([str(number) for number in range(settings.classes)])
    size = settings.image_size or (INPUT_SIZE if description is None else description["input_size"])[-1]
    images = torch.randn(settings.batch_size, 3, size, size)
    with torch.no_grad():
        classes = module.eval()(images[:1]).shape[1]
    return module, (images, torch.randint(classes, (settings.batch_size,)))


def _network_and_batches(name, settings):
    """(module with a head for the data's classes, training batches, validation batches), each batch (images, labels)."""
    import torch

    from piebridge.config_schema import Loader, Splits
    from piebridge.core.dataset import open_dataset
    from piebridge.core.networks import load_network

    torch.manual_seed(settings.seed)
    dataset, module = open_dataset(settings.data, Splits()), load_network(name)
    module.replace_head(dataset.classes)
    count = settings.batches * settings.batch_size
    chosen = torch.randperm(len(dataset.train))[:count].tolist()
    train = _batches(module, [dataset.train[index] for index in chosen], settings, Loader())
    if len(train[0][0]) < settings.batch_size:
        found = len(dataset.train)
        raise UserError(f"engine search: {settings.data} has {found} training images; use batch_size={found} or less")
    return module, train, _batches(module, dataset.val[:4 * count], settings, Loader())


def _batches(module, samples, settings, loading):
    import torch

    from piebridge.core.loader import ImageLoader, in_batches
    from piebridge.core.transforms import Transform

    size = settings.image_size or module.description["input_size"][-1]
    loader = ImageLoader(samples, Transform.for_network(module.description, size=size), loading.workers, loading.max_megapixels)
    return [(images, torch.tensor([samples[index].label for index in indices]))
            for indices, images in loader.batches(in_batches(len(samples), settings.batch_size)) if indices]


def _short_runs(module, batches, validation):
    from piebridge.engine.contribution import ShortRuns
    from piebridge.engine.losses import cross_entropy

    return ShortRuns(module, cross_entropy, batches, validation)


def _rule(settings):
    from piebridge.engine.update_rules import SGD, AdamW

    return AdamW() if settings.optimizer == "adamw" else SGD(settings.momentum)


def _candidates(settings):
    names = settings.candidates
    return None if names in ((), ("reference",)) else "all" if names == ("all",) else names


def _compiled(module, example, settings, candidates):
    from piebridge.engine.compiling import compile as compile_step
    from piebridge.engine.passes import TRADING_TIME

    traded = () if candidates is None else TRADING_TIME  # only the reference executor gains by them
    return compile_step(module, "cross_entropy", _rule(settings), settings.scheme, example, is_training=settings.is_training,
                        seed=settings.seed, off=(*traded, *settings.off), candidates=candidates, tolerance=settings.tolerance)


ACTIONS = {"show": _show, "search": _search, "compile": _compile, "bench": _bench}
