"""Sizes as people write them: 512MiB, 2GiB, 1.5TB."""

import re

from piebridge.core.errors import UserError

_UNITS = {"": 1, "b": 1, "kb": 10 ** 3, "mb": 10 ** 6, "gb": 10 ** 9, "tb": 10 ** 12, "kib": 2 ** 10, "mib": 2 ** 20, "gib": 2 ** 30,
          "tib": 2 ** 40}


def parse_bytes(text):
    """`2GiB` -> bytes. UserError for anything that is no size."""
    found = re.match(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)$", str(text).strip().lower())
    if not found or found.group(2) not in _UNITS:
        raise UserError(f"{text!r} is not a size; write for example 512MiB or 2GiB")
    return int(float(found.group(1)) * _UNITS[found.group(2)])


def shown_bytes(count):
    """Bytes for a message: 1.5 GiB."""
    for unit, size in (("GiB", 2 ** 30), ("MiB", 2 ** 20), ("KiB", 2 ** 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count} bytes"
