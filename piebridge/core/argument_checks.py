"""Checks of single arguments of operations: JSON value -> None when right, else what is wanted."""

import math

MAX_SIZE = 1 << 24  # no channel count of a real network comes near it


def _is_int(value, low, high=MAX_SIZE):
    return type(value) is int and low <= value <= high


def positive(value):
    return None if _is_int(value, 1) else f"a whole number from 1 to {MAX_SIZE}"


def index(value):
    return None if _is_int(value, -MAX_SIZE) else "a whole number"


def index_or_none(value):
    return None if value is None else index(value)


def flag(value):
    return None if type(value) is bool else "true or false"


def number(value):
    return None if type(value) in (int, float) and math.isfinite(value) else "a finite number"


def number_or_none(value):
    return None if value is None else number(value)


def fraction(value):
    return None if type(value) in (int, float) and 0.0 <= value <= 1.0 else "a number from 0 to 1"


def positive_sizes(value):
    """A size, or one for each of the two image axes."""
    return _sizes(value, 1, 1024, (2,))


def sizes(value):
    return _sizes(value, 0, 512, (2,))


def border(value):
    """Padding left, right, top, bottom."""
    return _sizes(value, 0, 512, (4,))


def _sizes(value, low, high, lengths):
    numbers = value if type(value) is list else [value]
    is_good = all(_is_int(each, low, high) for each in numbers) and (type(value) is not list or len(value) in lengths)
    return None if is_good else f"a whole number from {low} to {high}, or a list of {' or '.join(str(n) for n in lengths)}"


def index_list(value):
    is_good = type(value) is list and 1 <= len(value) <= 8 and all(_is_int(each, -8, MAX_SIZE) for each in value)
    return None if is_good else "a list of one to eight whole numbers"


def shape_list(value):
    """A shape; -1 stands for the batch."""
    is_good = type(value) is list and 1 <= len(value) <= 8 and all(_is_int(each, -1) and each != 0 for each in value)
    return None if is_good and value.count(-1) <= 1 else "a list of one to eight sizes, at most one of them -1"


def one_of(*choices):
    return lambda value: None if any(type(value) is type(each) and value == each for each in choices) else (
        "one of " + ", ".join(str(each).lower() for each in choices))
