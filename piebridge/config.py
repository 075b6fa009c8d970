"""Configuration: read from YAML, overridden by `key=value`, checked as a whole.

Everything that is wrong with a configuration is reported at once, one line a problem. Precedence, lowest first: the defaults of
the schema, what the method stands for (`core.methods.METHODS`), the file, the overrides.
"""

import dataclasses

from piebridge.config_file import read_yaml
from piebridge.config_schema import SECTIONS, Config, describe_keys, known_keys
from piebridge.config_values import check_value, literal
from piebridge.core.errors import UserError
from piebridge.core.methods import METHODS
from piebridge.core.names import closest

__all__ = ["Config", "build_config", "describe_keys", "known_keys", "load_config", "parse_overrides"]


def load_config(path, overrides=()):
    """Read `path` (YAML), apply `overrides` (a dict, or `key=value` texts) and return a Config. Raises UserError with all problems."""
    source = str(path)
    return build_config(_flatten(read_yaml(path), source), parse_overrides(overrides), source)


def build_config(values, overrides, source="configuration"):
    """Config from two flat dicts of dotted keys; `source` is named in errors."""
    problems = []
    given = {}
    for origin, entries in ((source, values), ("command line", overrides)):
        for key, value in entries.items():
            problem, checked = check_value(key, value)
            if problem:
                problems.append(f"{origin}: {problem}")
            else:
                given[key] = checked
    method = given.get("method", Config.method)
    if not problems and method not in METHODS:
        problems.append(f"{source}: method: '{method}' is not one of {', '.join(METHODS)}{closest(method, METHODS)}")
    if problems:
        raise UserError("\n".join(problems))
    chosen = METHODS[method]
    for key, fixed in chosen.fixed.items():
        if key in given and given[key] != fixed:
            problems.append(f"{source}: {key}={given[key]} contradicts method {method}, which stands for {key}={fixed}: {chosen.text}")
    if problems:
        raise UserError("\n".join(problems))
    merged = dict(chosen.defaults)
    merged.update(chosen.fixed)
    merged.update(given)
    config = _assemble(merged)
    problems = [f"{source}: {problem}" for problem in _contradictions(config)]
    if problems:
        raise UserError("\n".join(problems))
    return config


def _contradictions(config):
    """Settings that cannot hold together, in the user's words."""
    is_whole = config.pet.kind == "all"
    if config.cache.kind == "features" and config.loader.augment != "none":
        yield f"cache.kind=features keeps one view of each image, loader.augment={config.loader.augment} asks for a fresh one each epoch"
    if is_whole and config.cache.kind == "features":
        yield "cache.kind=features keeps what frozen layers give, and pet.kind=all freezes none"
    if is_whole and config.proxies.levels:
        yield "proxies.levels stand in for frozen layers, and pet.kind=all freezes none; use method=FTAll"


def parse_overrides(overrides):
    """`["optimizer.lr=0.01", "data=My Folder"]` or a dict -> flat dict; values are Python literals where they parse as one."""
    if isinstance(overrides, dict):
        return _flatten(overrides, "overrides")
    result = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise UserError(f"'{text}' is not an override: write key=value, for example epochs=3")
        result[key.strip()] = literal(value)
    return result


def _flatten(values, source):
    flat = {}
    for key, value in values.items():
        key = str(key)
        if key in SECTIONS and isinstance(value, dict):
            for inner, content in value.items():
                flat[f"{key}.{inner}"] = content
        elif key in SECTIONS:
            first = dataclasses.fields(SECTIONS[key])[0].name
            raise UserError(f"{source}: {key}: is a section; write its keys below it, for example {key}.{first}")
        else:
            flat[key] = value
    return flat


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
