"""Configuration: read from YAML, overridden by `key=value`, checked as a whole.

Everything that is wrong with a configuration is reported at once, one line a problem. Precedence, lowest first: the defaults of
the schema, what the method stands for (`core.methods.METHODS`), the file, the overrides.
"""

from collections import namedtuple

from piebridge.config_contradictions import contradictions
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
    for keys, text in contradictions(config):
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
