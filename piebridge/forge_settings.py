"""The keys of `piebridge forge NETWORK key=value`: their types, defaults, meanings and bounds."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Tuple

from piebridge.config_options import option, workers_option
from piebridge.config_values import check_value, from_text, split_words
from piebridge.core.errors import UserError

ALIGNMENTS = ("none", "statistics", "closed", "blocks")


def _is_seconds(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 86400


def _check_sizes(sizes):
    wrong = [text for text in sizes if not (text.isdecimal() and len(text) < 10 and 1 <= int(text) <= 4096)]
    return f"'{wrong[0]}' is not a number from 1 to 4096" if wrong else None


def _check_some_sizes(sizes):
    return _check_sizes(sizes) if sizes else "is empty; give at least one number from 1 to 4096"


def _check_precisions(precisions):
    if not precisions:
        return "is empty; give at least one of float, bf16, int8"
    wrong = [text for text in precisions if text not in ("float", "bf16", "int8")]
    return f"'{wrong[0]}' is not one of float, bf16, int8" if wrong else None


@dataclass(frozen=True)
class ForgeSettings:
    levels: int = option(10, "most proxies that the set keeps", low=1, high=100)
    least: float = option(0.2, "measured time of the cheapest proxy over the original's; a set that cannot reach it is refused",
                          low=0.01, high=0.95)
    images: int = option(1024, "most images that alignment is fitted on", low=16, high=1000000)
    held_out: int = option(128, "most images that alignment is measured on, and never fitted on", low=8, high=100000)
    widths: int = option(4, "pruned widths to try beside the whole one; 0: no pruning", low=0, high=50)
    narrowest: float = option(0.4, "multiply-accumulates of the narrowest width over the original's", low=0.05, high=0.95)
    multiple: int = option(8, "channel counts are multiples of this", low=1, high=256)
    resolutions: Tuple[str, ...] = option((), "pixels of the smaller inputs to try; none given: 6/7, 5/7, 4/7 and 3/7 of the network's own",
                                          check=_check_sizes)
    precisions: Tuple[str, ...] = option(("float", "int8"), "number formats to try: float, bf16, int8", check=_check_precisions)
    drops: int = option(2, "most blocks to drop", low=0, high=50)
    align: str = option("closed", "alignment of pruned widths: none; statistics; closed: the last linear map of each block in closed form; "
                        "blocks: closed, then each block trained on the original's features", choices=ALIGNMENTS)
    policy: bool = option(True, "train the paper's policy network as well")
    policy_epochs: int = option(20, "passes of the policy's training over the images", low=1, high=10000)
    profile_seconds: Any = option(60, "seconds for the latency table of the finished set", accepts=_is_seconds,
                                  wanted="a number of seconds above 0")
    batch_sizes: Tuple[str, ...] = option(("1", "4", "32"), "with --profile: images per call", check=_check_some_sizes)
    batch_size: int = option(8, "images per forward pass", low=1, high=1024)
    workers: Any = workers_option()
    seed: int = option(0, "seed of everything random", low=0, high=2 ** 31 - 1)
    overwrite: bool = option(False, "replace a finished set")


def forge_settings(words):
    """ForgeSettings from `["levels=5", ...]` or a dict. Raises UserError with every problem, one a line."""
    keys = {field.name: field for field in dataclasses.fields(ForgeSettings)}
    given = words if isinstance(words, dict) else {key: from_text(key, text, keys) for key, text in split_words(words).items()}
    values, problems = {}, []
    for key, value in given.items():
        values[key], problem = check_value(key, _texts(keys.get(key), value), keys, "`piebridge forge --help`")
        problems += [problem] if problem else []
    if problems:
        raise UserError("\n".join(problems))
    return ForgeSettings(**values)


def describe_forge_keys():
    """(key, default, text) of every key, in order."""
    return [(field.name, field.default, field.metadata["text"]) for field in dataclasses.fields(ForgeSettings)]


def _texts(field, value):
    """`resolutions=192,160` or `[192, 160]` as texts."""
    if field is None or not isinstance(field.default, tuple):
        return value
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return [str(each) for each in value] if isinstance(value, (list, tuple)) else [str(value)]
