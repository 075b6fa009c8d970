"""Configuration: read from YAML, overridden by `key=value`, checked as a whole.

Everything that is wrong with a configuration is reported at once, one line a problem. Precedence, lowest first: the defaults of
the schema, what the method stands for (`core.methods.METHODS`), the file, the overrides.
"""

from piebridge.config_file import read_yaml
from piebridge.config_schema import SECTIONS, Config, describe_keys, known_keys
from piebridge.config_values import check_value, from_text, split_words
from piebridge.core.dotted_keys import dotted
from piebridge.core.errors import UserError
from piebridge.core.methods import METHODS

__all__ = ["Config", "build_config", "describe_keys", "known_keys", "load_config", "parse_overrides", "read_yaml", "training_keys"]

# what may change between a checkpoint and its continuation: nothing that changes the weights
FREE_KEYS = ("output", "resume", "overwrite", "checkpoint.seconds", "loader.workers", "loader.eval_batch_size")


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
        method = given.get("method", Config.method)
        problems += _against_method(method, {key: value for key, value in given.items() if key not in refused}, place)
        settings = dict(METHODS[method].defaults, **METHODS[method].fixed)
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


def _against_method(method, given, place):
    """A line for each setting that says otherwise than the method stands for."""
    for key, fixed in METHODS[method].fixed.items():
        if key in given and given[key] != fixed:
            told = f"method {method}" if place.get("method", place[key]) == place[key] else f"{place['method']}: method={method}"
            yield (f"{place[key]}: {key}={_written(given[key])} contradicts {told}, which stands for {key}={_written(fixed)}: "
                   f"{METHODS[method].text}")


def _contradictions(config):
    """(keys, text) of settings that cannot hold together, in the user's words."""
    if config.cache.kind == "features" and config.loader.augment != "none":
        yield (("cache.kind", "loader.augment"), "cache.kind=features keeps one view of each image, "
               f"loader.augment={config.loader.augment} asks for a fresh one each epoch")
    if config.step == "direct" and config.pet.kind != "head":
        yield ("step", "pet.kind"), "step=direct is the step of a linear head; use step=eager"
    if config.pet.kind == "all" and METHODS[config.method].fixed.get("pet.kind") != "all":
        yield ("pet.kind", "method"), f"pet.kind=all trains the whole network, method {config.method} a part of it; use method=FTAll"


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
