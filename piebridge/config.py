"""Configuration: one frozen dataclass per section, read from YAML and overridden by `key=value`.

Everything that is wrong with a configuration is reported at once, one line a problem. Precedence, lowest first: the defaults
below, what the method stands for (`core.methods.METHODS`), the file, the overrides.
"""

import ast
import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, Optional, Tuple

from piebridge.config_file import read_yaml
from piebridge.core.errors import UserError


def option(default, text, choices=None, low=None, high=None):
    """A dataclass field with its help text and its bounds (`low` and `high` are included)."""
    return dataclasses.field(default=default, metadata={"text": text, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True)
class Splits:
    val_fraction: float = option(0.1, "share of each class kept for validation, where the data has no val folder", low=0.0, high=0.9)
    test_fraction: float = option(0.2, "share of each class kept for the test, where the data has no test folder", low=0.0, high=0.9)
    seed: int = option(0, "seed of the split; not changed by `seed`, so that all runs see the same test images", low=0)


@dataclass(frozen=True)
class Loader:
    batch_size: int = option(4, "images per training step", low=1, high=65536)
    eval_batch_size: int = option(16, "images per step of an evaluation", low=1, high=65536)
    workers: Any = option("auto", "decoding threads: auto or a number; 0 decodes in the training thread")
    augment: str = option("none", "fresh augmentation, each epoch anew", choices=("none", "flip", "crop_flip"))
    max_megapixels: float = option(64.0, "larger images are refused before they are decoded", low=0.01)
    max_bad_files: int = option(10, "unreadable images that are skipped before a run gives up", low=0)


@dataclass(frozen=True)
class Pet:
    kind: str = option("head", "what is trainable", choices=("head", "all"))


@dataclass(frozen=True)
class Optimizer:
    kind: str = option("adamw", "update rule", choices=("adamw", "sgd"))
    lr: float = option(1e-3, "peak learning rate", low=0.0)
    momentum: float = option(0.9, "momentum of sgd", low=0.0, high=0.9999)
    weight_decay: float = option(0.01, "weight decay", low=0.0)
    schedule: str = option("cosine", "learning rate over the run", choices=("cosine", "constant"))
    label_smoothing: float = option(0.1, "label smoothing", low=0.0, high=0.99)


@dataclass(frozen=True)
class Backend:
    name: str = option("auto", "what frozen segments run on: auto (measured) or a backend's name")
    tolerance: float = option(1e-3, "largest relative error of a feature vector against eager", low=0.0)


@dataclass(frozen=True)
class Cache:
    kind: str = option("none", "what is kept across epochs; auto: features where that is exact", choices=("none", "features", "auto"))


@dataclass(frozen=True)
class Proxies:
    levels: Tuple[str, ...] = option((), "proxies, such as 160px, 224px-drop2, 192px-int8")
    use: str = option("auto", "auto: only the levels that are predicted to pay; all: every level", choices=("auto", "all"))
    calibration_images: int = option(64, "unlabelled training images that fit the bridge maps", low=8, high=100000)


@dataclass(frozen=True)
class Router:
    kind: str = option("none", "how a sample gets its level: none, residual, random or level:N")
    tolerance: float = option(0.35, "largest predicted relative residual that a level may leave at the head's tap", low=0.0)


@dataclass(frozen=True)
class Gate:
    kind: str = option("none", "which samples run backward: none (all), loss, or auto: loss where skipping saves time",
                       choices=("none", "loss", "auto"))
    momentum: float = option(0.8, "momentum of the running loss that a sample is compared with", low=0.0, high=0.9999)


@dataclass(frozen=True)
class Checkpoint:
    seconds: float = option(60.0, "longest time between two checkpoints; there is one at each epoch's end too", low=0.0)


@dataclass(frozen=True)
class Config:
    method: str = option("ours", "row of the comparison table")
    network: str = option("efficientnet_lite0", "name of a network, or a network file")
    data: str = option("Clipart10", "name of a data set, or a folder of images")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    epochs: int = option(12, "passes over the training images", low=1, high=100000)
    seed: int = option(0, "seed of everything random", low=0, high=2 ** 31 - 1)
    output: Optional[str] = option(None, "run folder; default: beside the configuration")
    resume: str = option("auto", "auto: go on from a checkpoint; none: start anew", choices=("auto", "none"))
    overwrite: bool = option(False, "replace a finished run")
    trust_pickle: bool = option(False, "allow files that can run code when they are read")
    splits: Splits = Splits()
    loader: Loader = Loader()
    pet: Pet = Pet()
    optimizer: Optimizer = Optimizer()
    backend: Backend = Backend()
    cache: Cache = Cache()
    proxies: Proxies = Proxies()
    router: Router = Router()
    gate: Gate = Gate()
    checkpoint: Checkpoint = Checkpoint()

    def as_dict(self):
      
        """Nested plain values, ready for JSON and YAML."""
        return _plain(dataclasses.asdict(self))


SECTIONS = {field.name: type(field.default) for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.default)}


def load_config(path, overrides=()):
    """Read `path` (YAML), apply `overrides` (a dict, or `key=value` texts) and return a Config. Raises UserError with all problems."""
    source = str(path)
    return build_config(_flatten(read_yaml(path), source), parse_overrides(overrides), source)


def build_config(values, overrides, source="configuration"):
    """Config from two flat dicts of dotted keys; `source` is named in errors."""
    from piebridge.core.methods import METHODS

    problems = []
    given = {}
    for origin, entries in ((source, values), ("command line", overrides)):
        for key, value in entries.items():
            problem, checked = _check(key, value)
            if problem:
                problems.append(f"{origin}: {problem}")
            else:
                given[key] = checked
    method = given.get("method", Config.method)
    if not problems and method not in METHODS:
        problems.append(f"{source}: method: unknown method '{method}'{_closest(method, METHODS)}")
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
    return _assemble(merged)


def parse_overrides(overrides):
    """`["optimizer.lr=0.01", "data=My Folder"]` or a dict -> flat dict; values are Python literals where they parse as one."""
    if isinstance(overrides, dict):
        return _flatten(overrides, "overrides")
    result = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise UserError(f"'{text}' is not an override: write key=value, for example epochs=3")
        result[key.strip()] = _literal(value)
    return result


def known_keys():
    """Every dotted key with its dataclass field."""
    keys = {}
    for field in dataclasses.fields(Config):
        if field.name not in SECTIONS:
            keys[field.name] = field
    for name, section in SECTIONS.items():
        for field in dataclasses.fields(section):
            keys[f"{name}.{field.name}"] = field
    return keys


def describe_keys():
    """(key, default, text) of every key, in file order; choices are part of the text."""
    rows = []
    for key, field in known_keys().items():
        choices = field.metadata["choices"]
        rows.append((key, field.default, field.metadata["text"] + (f" ({' | '.join(choices)})" if choices else "")))
    return rows


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


def _literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def _check(key, value):
    """(problem or None, value converted to the key's type)."""
    keys = known_keys()
    if key not in keys:
        return f"{key}: unknown key{_closest(key, keys)}", None
    field = keys[key]
    if key in ("resume", "loader.workers") and isinstance(value, (str, int)) and not isinstance(value, bool):
        value = str(value) if key == "resume" else value
        if key == "loader.workers":
            return _check_workers(value)
    if key == "resume" and value is None:  # `resume=none` parses as the literal None
        value = "none"
    if field.name == "kind" and value is None:
        value = "none"
    value, problem = _convert(key, value, field.default)
    if problem:
        return problem, None
    choices, low, high = (field.metadata[name] for name in ("choices", "low", "high"))
    if choices and value not in choices:
        return f"{key}: '{value}' is not one of {', '.join(choices)}{_closest(str(value), choices, listed=True)}", None
    if low is not None and value < low:
        return f"{key}: {value} is below the least allowed, {low}", None
    if high is not None and value > high:
        return f"{key}: {value} is above the most allowed, {high}", None
    if key == "router.kind" and value not in ("none", "residual", "random") and not _is_level(value):
        return f"{key}: '{value}' is not one of none, residual, random, level:N", None
    return None, value


def _convert(key, value, default):
    """Bring a YAML or command-line value to the type of its default; (value, problem)."""
    if key == "output" and (value is None or isinstance(value, str)):
        return value, None
    if isinstance(default, bool):
        return (value, None) if isinstance(value, bool) else (None, f"{key}: '{value}' is not true or false")
    if isinstance(default, int):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return (value, None) if whole else (None, f"{key}: '{value}' is not a whole number")
    if isinstance(default, float):
        if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a text
            value = _literal(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None, f"{key}: '{value}' is not a finite number"
        return float(value), None
    if isinstance(default, tuple):
        if isinstance(value, str):
            value = [value]
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value), None
        return None, f"{key}: '{value}' is not a list of texts"
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value), None
    return None, f"{key}: '{value}' is not a text"


def _check_workers(value):
    if value == "auto" or (isinstance(value, int) and 0 <= value <= 256):
        return None, value
    return f"loader.workers: '{value}' is neither auto nor a number from 0 to 256", None


def _is_level(text):
    return text.startswith("level:") and text[len("level:"):].isdigit()


def _closest(word, known, listed=False):
    near = difflib.get_close_matches(word, list(known), n=1)
    if not near and "." not in word:  # `lr` means optimizer.lr
        near = [key for key in known if key.endswith("." + word)][:1]
    hint = f"; did you mean {near[0]}?" if near else ""
    return hint if listed else f"{hint or ''} (known: {', '.join(known)})"


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


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
