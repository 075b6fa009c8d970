"""A key of a configuration: its default, its help text, and what it allows."""

import dataclasses
import re

from piebridge.core.byte_sizes import parse_bytes
from piebridge.core.errors import UserError
from piebridge.core.proxy_specs import parse_spec


def option(default, text, choices=None, low=None, high=None, accepts=None, wanted=None, check=None, is_path=False):
    """A dataclass field with its help text and what it allows.

    choices: the allowed texts; low, high: bounds, included; accepts: a test for values of no single type, `wanted` its words;
    check: value of the right type -> what is wrong with it, or None; is_path: a leading ~ stands for the user's home.
    """
    allowed = {"choices": choices, "low": low, "high": high, "accepts": accepts, "wanted": wanted, "check": check, "is_path": is_path}
    return dataclasses.field(default=default, metadata=dict(allowed, text=text))


def _is_count(value, most):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def workers_option():
    return option("auto", "decoding threads: auto or a number; 0 decodes in the training thread",
                  accepts=lambda value: value == "auto" or _is_count(value, 256), wanted="auto or a number from 0 to 256")


def is_router(value):
    """Whether it is a word for router.kind."""
    level = str(value)[len("level:"):]
    is_word = value in ("none", "residual", "policy", "shuffled", "importance", "random")
    return is_word or (str(value).startswith("level:") and level in map(str, range(1000)))


def check_size(text):
    """What is wrong with a number of bytes such as 512MiB, or None."""
    try:
        parse_bytes(text)
    except UserError as error:
        return str(error)
    return None


def check_limit(text):
    """As check_size; an empty text is no limit."""
    return check_size(text) if text else None


def are_blocks(value):
    """Whether it says which blocks: all, last:N, a name or a list of names."""
    if isinstance(value, str):
        return bool(re.fullmatch("last:0*[1-9][0-9]{0,3}", value)) if value.startswith("last:") else bool(value)
    return (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(name, str) and name for name in value))


def check_levels(levels):
    """What is wrong with a list of proxies such as 160px, or None."""
    try:
        for text in levels:
            parse_spec(text)
    except UserError as error:
        return str(error).partition(": ")[2]  # the key is named by the caller
    return None
