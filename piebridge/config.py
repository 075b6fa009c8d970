"""Configuration: read from YAML, overridden by `key=value`, checked as a whole.

Everything that is wrong with a configuration is reported at once, one line a problem. Precedence, lowest first: the defaults of
the schema, what the method stands for (`core.methods.METHODS`), the file, the overrides.
"""

from collections import namedtuple

from piebridge.config_file import read_yaml
from piebridge.config_schema import SECTIONS, Config, describe_keys, known_keys
from piebridge.config_values import check_value, from_text, split_words
from piebridge.core.dotted_keys import dotted
from piebridge.core.errors import UserError
from piebridge.core.methods import METHODS, RELEASED, STRATEGIES, UNDER_A_STRATEGY, released_settings

__all__ = ["Config", "build_config", "describe_keys", "known_keys", "load_config", "parse_overrides", "read_yaml", "training_keys"]

# key=value: what the user chose; settings: what that stands for, in dotted keys
Preset = namedtuple("Preset", "key value settings text")

# what may change between a checkpoint and its continuation: nothing that changes the weights
FREE_KEYS = ("output", "resume", "overwrite", "checkpoint.seconds", "loader.workers", "loader.eval_batch_size", "cache.folder",
             "cache.budget")


def load_config(path, overrides=()):
    """Read `path` (YAML), apply `overrides` (a dict, or `key=value` texts) and return a Config. Raises UserError with all problems."""
    origin = "overrides" if isinstance(overrides, dict) else "command line"
    return build_config(read_yaml(path), parse_overrides(overrides), str(path), origin)


def parse_overrides(overrides):
    """`["optimizer.lr=0.01", "data=My Folder"]` or a dict -> dict, in the words of the command line (`config_values.from_text`)."""
    if isinstance(overrides, dict):
        return dict(overrides)
    return {key: from_text(key, text) for key, text in split_words(overrides).items()}


def build_config(values, overrides, source="configuration", origin="command line"):
    """Config from two dicts of nested or dotted keys; `source` and `origin` are where they came from, as errors name it."""
    given, place, refused, problems = {}, {}, set(), []
    for where, entries in ((source, values), (origin, overrides)):
        for key, value in dotted(entries, SECTIONS):
            value, problem = check_value(key, value)
            if place.get(key) == where:
                problem = f"{key}: is given twice"
            place[key] = where
            if problem:
                problems.append(f"{where}: {problem}")
                refused.add(key)
            else:
                given[key] = value
    settings = dict(given)
    if "method" not in refused:
        accepted = {key: value for key, value in given.items() if key not in refused}
        settings = dict(METHODS[given.get("method", Config.method)].defaults)
        for preset in _presets(accepted):
            problems += _against_preset(preset, accepted, place)
            settings.update(preset.settings)
        settings.update(given)
    config = _assemble(settings)
    for keys, text in _contradictions(config):
        if not refused.intersection(keys):
            where = origin if origin in [place.get(key) for key in keys] else source
            problems.append(f"{where}: {text}")
    if problems:
        raise UserError("\n".join(problems))
    return config


def training_keys(values):
    """{dotted key: value} of a configuration as nested dicts, without the keys that change neither weights nor results."""
    return {key: value for key, value in dotted(values, SECTIONS) if key not in FREE_KEYS}


def _presets(given):
    """The Presets that hold for the keys that were given; of two that set the same key, the later one counts."""
    method = given.get("method", Config.method)
    if given.get("as_released") and method in RELEASED:
        return [Preset("as_released", "true", released_settings(method, given.get("pet.kind", Config.pet.kind)),
                       f"the released artifact's {method}")]
    strategy = given.get("strategy", Config.strategy)
    own = Preset("method", method, dict(METHODS[method].fixed, **UNDER_A_STRATEGY.get((strategy, method), {})), METHODS[method].text)
    settings = {key: value for key, value in STRATEGIES[strategy].items() if key not in own.settings}  # an ablation goes before it
    return [Preset("strategy", strategy, settings, "the algorithm as published"), own]


def _against_preset(preset, given, place):
    """A line for each setting that says otherwise than the preset stands for."""
    for key, fixed in preset.settings.items():
        if key in given and given[key] != fixed:
            chosen = f"method {preset.value}" if preset.key == "method" else f"{preset.key}={preset.value}"
            told = chosen if place.get(preset.key, place[key]) == place[key] else f"{place[preset.key]}: {preset.key}={preset.value}"
            yield (f"{place[key]}: {key}={_written(given[key])} contradicts {told}, which stands for {key}={_written(fixed)}: "
                   f"{preset.text}")


def _contradictions(config):
    """(keys, text) of settings that cannot hold together, in the user's words."""
    if config.cache.kind in ("features", "pixels") and config.loader.augment != "none" and not config.cache.views:
        yield (("cache.kind", "loader.augment"), f"cache.kind={config.cache.kind} keeps views of each image, loader.augment="
               f"{config.loader.augment} asks for a fresh one each epoch; set how many to keep, such as cache.views=4")
    if config.cache.views and config.loader.augment == "none":
        yield (("cache.views", "loader.augment"), f"cache.views={config.cache.views}: loader.augment=none shows one view of each image; "
               "use cache.views=0, or augment")
    if config.cache.augment != "none" and config.cache.kind not in ("features", "auto"):
        yield (("cache.augment", "cache.kind"), f"cache.augment={config.cache.augment} changes cached features, and cache.kind="
               f"{config.cache.kind} keeps none; use cache.kind=features")
    if config.cache.augment == "mixup" and config.cache.augment_strength > 1:
        yield (("cache.augment_strength",), f"cache.augment_strength={config.cache.augment_strength:g}: the weight of the other sample in "
               "a mixup is at most 1")
    if config.pseudo.kind != "none" and not config.splits.shots:
        yield (("pseudo.kind", "splits.shots"), f"pseudo.kind={config.pseudo.kind} labels what is unlabelled, and nothing is; add "
               "splits.shots=K")
    if config.pseudo.kind != "none" and 1 - config.optimizer.label_smoothing < config.pseudo.threshold:
        yield (("pseudo.threshold", "optimizer.label_smoothing"), f"optimizer.label_smoothing={config.optimizer.label_smoothing} teaches "
               f"to be less sure than pseudo.threshold={config.pseudo.threshold}, so that hardly an image gets a label; use "
               "optimizer.label_smoothing=0.0")
    if config.stream.samples:
        yield from _against_stream(config)
    if config.step == "direct" and config.pet.kind != "head":
        yield ("step", "pet.kind"), "step=direct is the step of a linear head; use step=eager"
    if config.step in ("prune_train", "elastic") and config.pet.kind != "all":
        yield ("step", "pet.kind"), f"step={config.step} is a step of the whole network; use pet.kind=all, not {config.pet.kind}"
    if config.router.kind in ("policy", "shuffled") and config.proxies.set is None:
        yield (("router.kind", "proxies.set"), f"router.kind={config.router.kind} asks the policy of a proxy set; give proxies.set=FOLDER, "
               "made by piebridge forge")
    if config.as_released and config.method not in RELEASED:
        yield ("as_released", "method"), f"as_released=true: the artifact has {', '.join(RELEASED)}, and not {config.method}"
    if config.strategy != "configured" and config.as_released:
        yield ("as_released", "strategy"), f"as_released=true does as the artifact does, strategy={config.strategy} does not; choose one"
    if config.strategy != "configured" and "proxies.set" in METHODS[config.method].fixed:
        yield (("strategy", "method"), f"strategy={config.strategy} trains through proxies, method {config.method} stands for none; "
               "use method=ours")
    if config.pet.kind == "all" and METHODS[config.method].fixed.get("pet.kind") != "all":
        yield ("pet.kind", "method"), f"pet.kind=all trains the whole network, method {config.method} a part of it; use method=FTAll"


def _against_stream(config):
    if config.cache.kind in ("features", "pixels") or config.cache.views:
        given = f"cache.views={config.cache.views}" if config.cache.views else f"cache.kind={config.cache.kind}"
        yield (("cache.kind", "cache.views", "stream.samples"), f"{given} keeps what is seen again, and a stream's samples are seen once; "
               f"use {given.partition('=')[0]}={0 if config.cache.views else 'none'}")
    if config.pseudo.kind != "none":
        yield ("pseudo.kind", "stream.samples"), "pseudo.kind: a stream's samples come with their labels, and do not come again; use none"
    if config.router.kind != "none" and not config.router.kind.startswith("level:"):
        yield (("router.kind", "stream.samples"), f"router.kind={config.router.kind} looks at all samples before it trains on them, and a "
               "stream's are seen once; use none or level:N")


def _assemble(flat):
    sections = {name: {} for name in SECTIONS}
    top = {}
    for key, value in flat.items():
        section, separator, name = key.partition(".")
        if separator:
            sections[section][name] = value
        else:
            top[key] = value
    return Config(**top, **{name: SECTIONS[name](**entries) for name, entries in sections.items()})


def _written(value):
    return "[" + ", ".join(value) + "]" if isinstance(value, tuple) else value
