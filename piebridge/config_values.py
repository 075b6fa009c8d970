"""One value of a configuration: from a YAML or command-line value to the key's type, within its bounds."""

import ast
import math
import os
import warnings
from typing import Optional

from piebridge.config_schema import SECTIONS, known_keys
from piebridge.core.errors import UserError
from piebridge.core.names import closest


def split_words(words):
    """`["epochs=3", "data=My Folder"]` -> {key: text}, the last one winning. Raises UserError for a word without a key or a `=`."""
    texts = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key.strip():
            raise UserError(f"'{word}' is not an override: write key=value, for example epochs=3")
        texts[key.strip()] = text
    return texts


def from_text(key, text, keys=None):
    """What `key=text` on a command line means. For a key that wants a text it is that text, so that a folder may be called 2024.10
    or 1e3, without the quotes around it if there are any; for any other key it is a Python literal where it reads as one.

    keys: {key: dataclass field}, those of a run's configuration by default.
    """
    field = (known_keys() if keys is None else keys).get(key)
    if field is None or not _is_text(field):
        return literal(text)
    if text.lower() in ("none", "null") and (field.default is None or _knows_none(field)):
        return None
    if text[:1] in ("'", '"') and isinstance(literal(text), str):
        return literal(text)
    return text


def literal(text):
    """A Python literal, true, false, none and null in any case, or the text itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's parser has remarks about texts that are nearly code
            return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return {"true": True, "false": False, "none": None, "null": None}.get(text.strip().lower(), text)


def check_value(key, value, keys=None, listing="`piebridge configs keys`"):
    """(the value in the key's type, None), or (None, what is wrong with it). keys: as for `from_text`; listing: what lists them."""
    if keys is None:
        keys = known_keys()
        if key in SECTIONS:
            first = next(known for known in keys if known.startswith(key + "."))
            return None, f"{key}: is a section; write its keys below it, for example {first}"
    if key not in keys:
        return None, f"{shown(key)}: unknown key{_closest_key(key, keys)}; {listing} lists them"
    field = keys[key]
    if value is None and _knows_none(field):  # `gate.kind=none` may come as the literal None
        value = "none"
    value, problem = _convert(value, field)
    problem = problem or _out_of_bounds(value, field.metadata)
    return (None, f"{key}: {problem}") if problem else (value, None)


def shown(value):
    """A value as it appears in a message: on one line, and cut where it is long."""
    try:
        text = " ".join(str(value).split())
    except ValueError:  # Python refuses to write out numbers of thousands of digits
        return "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


def _convert(value, field):
    """Bring a YAML or command-line value to the type of its key: (value, problem)."""
    default = field.default
    if field.metadata["accepts"]:
        return (value, None) if field.metadata["accepts"](value) else (None, f"'{shown(value)}' is not {field.metadata['wanted']}")
    if _is_text(field):
        return _text(value, field)
    if isinstance(default, bool):
        return (value, None) if isinstance(value, bool) else (None, f"'{shown(value)}' is not true or false")
    if isinstance(default, int):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return (value, None) if is_whole else (None, f"'{shown(value)}' is not a whole number")
    if isinstance(default, float):
        return _number(value)
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value), None
    return None, f"'{shown(value)}' is not a list of texts"


def _text(value, field):
    if value is None and field.default is None:
        return None, None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if field.metadata["choices"]:
        return value, None  # what it must be is known; _out_of_bounds says so
    if not isinstance(value, str):
        return None, f"'{shown(value)}' is not a text; write it in quotes"
    if not value:
        return None, "is empty; give a text"
    if "\0" in value:
        return None, "holds a null character"
    return os.path.expanduser(value) if field.metadata["is_path"] and value.startswith("~") else value, None


def _number(value):
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a text
        value = literal(value)
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value):
            return float(value), None
    except OverflowError:  # a whole number beyond every float
        pass
    return None, f"'{shown(value)}' is not a finite number"


def _out_of_bounds(value, allowed):
    """What is wrong with a value of the right type, or None."""
    choices, low, high, check = (allowed[name] for name in ("choices", "low", "high", "check"))
    if choices and value not in choices:
        return f"'{shown(value)}' is not one of {', '.join(choices)}{closest(value, choices)}"
    if low is not None and value < low:
        return f"{shown(value)} is below the least allowed, {low}"
    if high is not None and value > high:
        return f"{shown(value)} is above the most allowed, {high}"
    return check(value) if check else None


def _is_text(field):
    return field.type in (str, Optional[str])


def _knows_none(field):
    """Whether the word `none` is a value of the key."""
    return "none" in (field.metadata["choices"] or ()) or bool(field.metadata["accepts"] and field.metadata["accepts"]("none"))


def _closest_key(key, keys):
    """A key that is spelled alike; for a name without its section (`lr`), the key that ends with it."""
    inner = [known for known in keys if known.endswith("." + key)]
    return f" (did you mean {inner[0]!r}?)" if inner else closest(key, keys)
