"""The keys of `piebridge engine ACTION NETWORK key=value`: their types, defaults, meanings and bounds."""

import dataclasses
from dataclasses import dataclass
from typing import Optional, Tuple

from piebridge.config_options import option
from piebridge.config_values import check_value, from_text, split_words
from piebridge.core.errors import UserError


@dataclass(frozen=True)
class EngineSettings:
    scheme: str = option("mobilenet_v2", "what is trained: a preset, a YAML file, or YAML text")
    batch_size: int = option(8, "images per step", low=1, high=65536)
    image_size: int = option(0, "pixels of the square images; 0: the network's own", low=0, high=4096)
    classes: int = option(0, "put a fresh head for so many classes in its place; 0: as it is, or as many as data has", low=0, high=10 ** 6)
    optimizer: str = option("sgd", "update rule", choices=("sgd", "adamw"))
    momentum: float = option(0.0, "of sgd; 0: no state", low=0.0, high=0.9999)
    is_training: bool = option(False, "batch norm and dropout in train mode")
    off: Tuple[str, ...] = option((), "passes to leave out")
    candidates: Tuple[str, ...] = option(("all",), "compile, bench: executors to measure; all, or reference for it alone")
    tolerance: float = option(1e-2, "largest relative error of an executor's outputs and updates against the reference", low=0.0, high=1.0)
    turns: int = option(7, "bench: how often each step is timed", low=1, high=10000)
    data: Optional[str] = option(None, "search: name of a data set, or a folder of images by class")
    batches: int = option(8, "search: batches that contributions are measured on", low=1, high=100000)
    contribution: str = option("fisher", "search: what a layer is worth: fisher (information, one pass) or runs (short runs of each layer)",
                               choices=("fisher", "runs"))
    method: str = option("knapsack", "search: knapsack (exact) or evolution (as published)", choices=("knapsack", "evolution"))
    seed: int = option(0, "seed of everything random", low=0, high=2 ** 31 - 1)


def engine_settings(words):
    """EngineSettings from `["batch_size=4", ...]`. Raises UserError with every problem, one a line."""
    keys = {field.name: field for field in dataclasses.fields(EngineSettings)}
    values, problems = {}, []
    for key, text in split_words(words).items():
        value = from_text(key, text, keys)
        if key in keys and isinstance(keys[key].default, tuple) and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        values[key], problem = check_value(key, value, keys, "`piebridge engine --help`")
        problems += [problem] if problem else []
    if problems:
        raise UserError("\n".join(problems))
    return EngineSettings(**values)
