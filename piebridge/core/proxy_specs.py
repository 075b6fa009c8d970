"""What a proxy is, in writing: `160px`, `224px-drop2`, `192px-drop1-int8`. Free of torch, so that a configuration can be checked."""

import re
from collections import namedtuple

from piebridge.core.errors import UserError

LEAST_PIXELS = 8
_SPEC = re.compile(r"(?P<resolution>[0-9]{1,4})px(-drop(?P<dropped>[0-9]{1,3}))?(-(?P<precision>int8))?$")


class ProxySpec(namedtuple("ProxySpec", "resolution dropped precision")):
    """What a proxy is: input pixels, number of dropped blocks, `float` or `int8`."""

    def __str__(self):
        return (f"{self.resolution}px" + (f"-drop{self.dropped}" if self.dropped else "")
                + ("-int8" if self.precision == "int8" else ""))


def parse_spec(text):
    """`160px`, `224px-drop2`, `192px-drop1-int8` -> ProxySpec. Raises UserError for anything else."""
    match = _SPEC.match(str(text))
    if not match or int(match.group("resolution")) < LEAST_PIXELS:
        raise UserError(f"proxies.levels: '{text}' is not a proxy; write PIXELSpx[-dropN][-int8], for example 160px or 224px-drop2-int8")
    return ProxySpec(int(match.group("resolution")), int(match.group("dropped") or 0), match.group("precision") or "float")
