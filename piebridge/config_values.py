"""One value of a configuration: from a YAML or command-line value to the key's type, within its bounds."""

import ast
import math

from piebridge.config_schema import known_keys
from piebridge.core.names import closest


def literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def check_value(key, value):
    """(problem or None, value converted to the key's type)."""
    keys = known_keys()
    if key not in keys:
        return f"{key}: unknown key{_closest_key(key, keys)}; `piebridge configs keys` lists them", None
    field = keys[key]
    choices, accepts, low, high = (field.metadata[name] for name in ("choices", "accepts", "low", "high"))
    if value is None and choices and "none" in choices:  # `gate.kind=none` parses as the literal None
        value = "none"
    if accepts:
        return (None, value) if accepts(value) else (f"{key}: '{value}' is not {field.metadata['wanted']}", None)
    value, problem = _convert(key, value, field.default)
    if problem:
        return problem, None
    if choices and value not in choices:
        return f"{key}: '{value}' is not one of {', '.join(choices)}{closest(value, choices)}", None
    if low is not None and value < low:
        return f"{key}: {value} is below the least allowed, {low}", None
    if high is not None and value > high:
        return f"{key}: {value} is above the most allowed, {high}", None
    return None, value


def _convert(key, value, default):
    """Bring a YAML or command-line value to the type of its default; (value, problem)."""
    if isinstance(default, bool):
        return (value, None) if isinstance(value, bool) else (None, f"{key}: '{value}' is not true or false")
    if isinstance(default, int):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return (value, None) if whole else (None, f"{key}: '{value}' is not a whole number")
    if isinstance(default, float):
        if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a text
            value = literal(value)
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


def _closest_key(key, keys):
    """A key that is spelled alike; for a name without its section (`lr`), the key that ends with it."""
    inner = [known for known in keys if known.endswith("." + key)]
    return f" (did you mean {inner[0]!r}?)" if inner else closest(key, keys)
