"""The words by which a scheme names layers.

    all                                     every layer
    head                                    the head
    last 7 blocks                           from there on to the network's end (so with "layers", with "convolutions")
    last 7 of 19 blocks                     the same share of a network of another depth, rounded up
    first 1x1 of the last 7 blocks          of each block the first such layer; without "first" each; kinds: see KINDS
    attention of all blocks, linear of block encoder.layer.3
    convolution 27, layer 27                by number, from 0, in order of execution; convolutions alone, or linear layers too
    blocks.5.*                              anything else is a pattern on paths, as for file names
"""

import fnmatch
import re

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.engine.layer import CONV, CONVOLUTIONS, DEPTHWISE, LINEAR, NORM, POINTWISE, TRUNK

KINDS = {
    POINTWISE: lambda layer: layer.kind == POINTWISE,
    DEPTHWISE: lambda layer: layer.kind == DEPTHWISE,
    CONV: lambda layer: layer.kind in CONVOLUTIONS,
    LINEAR: lambda layer: layer.kind == LINEAR,
    "attention": lambda layer: layer.role.startswith("attention"),
    "mlp linear": lambda layer: layer.role == "mlp",
    NORM: lambda layer: layer.kind == NORM,
    "layer": lambda layer: layer.kind in TRUNK,
}
_ORDINALS = {"first": 0, "second": 1, "third": 2, "last": -1}
_LAST = r"last (?P<count>\d+)(?: of (?P<total>\d+))? (?P<unit>block|layer|convolution)s?"
_LAST_PATTERN = re.compile(_LAST)
_OF_PATTERN = re.compile(rf"(?:(?P<ordinal>{'|'.join(_ORDINALS)}) )?(?P<kind>{'|'.join(KINDS)})s? of (?:the )?"
                         rf"(?:{_LAST}|all blocks|block (?P<block>\S+))")
_NUMBER_PATTERN = re.compile(r"(?P<unit>layer|convolution) (?P<number>\d+)")


def select(text, layers):
    """The layers that `text` names, in order. UserError where there are none, with the closest path; or fewer blocks than it counts."""
    words = " ".join(str(text).split())
    if words == "all":
        return list(layers)
    if words == "head":
        return _head(layers)
    last, of, number = (pattern.fullmatch(words) for pattern in (_LAST_PATTERN, _OF_PATTERN, _NUMBER_PATTERN))
    if last:
        return _from(words, layers, _units(words, last, layers))
    if of:
        found = _of_kind(words, of, [layer for layer in layers if not layer.is_added])
    elif number:
        found = _trunk(layers, number["unit"])[int(number["number"]):][:1]
    else:
        found = [layer for layer in layers if fnmatch.fnmatchcase(layer.path, words)]
    if not found:
        paths = [layer.path for layer in layers]
        raise UserError(f"scheme: {words!r} matches no layer{closest(words, paths)}; the layers: {_some(paths)}")
    return found


def is_pattern(text):
    """Whether it is no phrase, but a pattern on paths."""
    words = " ".join(str(text).split())
    return words not in ("all", "head") and not any(each.fullmatch(words) for each in (_LAST_PATTERN, _OF_PATTERN, _NUMBER_PATTERN))


def _some(names, count=6):
    return ", ".join(names[:count]) + (f", ... ({len(names)} in all)" if len(names) > count else "")


def _head(layers):
    found = [layer for layer in layers if layer.is_head]
    if not found:
        raise UserError("scheme: 'head': the network ends in a block, not in a layer of its own; name the layer by its path")
    return found


def _trunk(layers, unit):
    kinds = CONVOLUTIONS if unit == "convolution" else TRUNK
    return [layer for layer in layers if layer.kind in kinds and not layer.is_added]


def _units(words, match, layers):
    """The last blocks (paths), or layers, that a phrase counts."""
    unit = match["unit"]
    units = list(dict.fromkeys(layer.block for layer in layers if layer.block)) if unit == "block" else _trunk(layers, unit)
    if not units:
        raise UserError(f"scheme: {words!r}: no {unit}s were found in this network; count layers, or name them by their paths")
    count = int(match["count"])
    if match["total"] is not None:
        if not 0 < count <= int(match["total"]):
            raise UserError(f"scheme: {words!r}: the first number must lie between 1 and the second")
        count = -(-count * len(units) // int(match["total"]))
    if not 0 < count <= len(units):
        raise UserError(f"scheme: {words!r}: the network has {len(units)} {unit}s; give 1 to {len(units)}")
    return units[-count:]


def _from(words, layers, units):
    """The layers from the first unit on."""
    first = next(place for place, layer in enumerate(layers) if layer is units[0] or layer.block == units[0])
    return list(layers[first:])


def _of_kind(words, match, layers):
    if match["count"] is not None:
        if match["unit"] != "block":
            raise UserError(f"scheme: {words!r}: count blocks here")
        blocks = _units(words, match, layers)
    elif match["block"] is not None:
        blocks = [match["block"]]
    else:
        blocks = list(dict.fromkeys(layer.block for layer in layers if layer.block))
    found = []
    for block in blocks:
        own = [layer for layer in layers if layer.block == block and KINDS[match["kind"]](layer)]
        if match["ordinal"] is not None:
            place = _ORDINALS[match["ordinal"]]
            own = own[place:place + 1 or None]
        found += own
    return found
