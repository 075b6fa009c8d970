"""A scheme on a network, in words: what is trained, how deep the backward pass reaches, what it keeps."""

from dataclasses import dataclass

from piebridge.engine.layer import NORM, TRUNK, Layer
from piebridge.engine.layers import layers_of
from piebridge.engine.scheme import Scheme

HEADER = ("layer", "kind", "block", "output", "trained", "numbers", "share", "kept")
_RIGHT = (5, 6, 7)  # columns


@dataclass(frozen=True)
class TrainedLayer:
    """words: what of the layer is trained. numbers, of: trained, and all that its weight and bias have. kept_bytes: of its input, for
    the gradient of its weight: by rule, what the passes make of it is the memory plan's to tell.
    """

    layer: Layer
    words: str
    numbers: int
    of: int
    kept_bytes: int


def trained_layers(layers, parts, parameters):
    """[TrainedLayer] in order of execution. layers: layers_of(...); parts: Scheme.resolve(...); parameters: {key: tensor}."""
    rows, seen = [], set()
    for layer in layers:
        keys = [key for key in (layer.weight, layer.bias) if key in parts and key not in seen]
        seen.update(keys)
        if keys:
            numbers = sum(_count(parameters[key], parts[key]) for key in keys)
            of = sum(parameters[key].numel() for key in (layer.weight, layer.bias) if key is not None)
            words = ", ".join(_words(layer, key, parts[key]) for key in keys)
            rows.append(TrainedLayer(layer, words, numbers, of, _kept(layer, parts.get(layer.weight))))
    return rows


def render_scheme(module, scheme, example, scores=None):
    """Text: a line on what is trained, one on the backward pass, one on what is kept, and a table of the trained layers.

    module: any nn.Module. scheme: Scheme, or what Scheme.read takes. example, scores: as for Scheme.resolve.
    """
    scheme, layers, parameters = Scheme.read(scheme), layers_of(module, example), dict(module.named_parameters())
    parts = scheme.resolve(module, example, scores, layers)
    rows = trained_layers(layers, parts, parameters)
    numbers, total = sum(_count(parameters[key], part) for key, part in parts.items()), sum(each.numel() for each in parameters.values())
    kept = sum(row.kept_bytes for row in rows)
    batch = rows[0].layer.input_shape[0] if rows and rows[0].layer.input_shape else 1
    name = getattr(module, "description", {}).get("name") or type(module).__name__
    lines = [f"{name}, scheme {scheme.name or 'given'}: trains {numbers} of {total} numbers "
             f"({_percent(numbers, total)}), in {len(rows)} of {len(layers)} layers; channels: {scheme.channels}",
             _backward_line(layers, rows),
             f"kept for the gradients of weights: {_mib(kept)} of inputs at batch {batch} (biases: none; in part: their share)", ""]
    return "\n".join(lines + _table([HEADER] + [_row(row) for row in rows]))


def backward_depth(layers, rows):
    """(the earliest trained layer, convolutions and linear layers from there to the end, all of them)."""
    trunk = [layer for layer in layers if layer.kind in TRUNK]
    place = layers.index(rows[0].layer)
    return rows[0].layer, sum(layer.kind in TRUNK for layer in layers[place:]), len(trunk)


def _backward_line(layers, rows):
    earliest, passed, count = backward_depth(layers, rows)
    return f"backward: down to {earliest.path}, through {passed} of {count} convolutions and linear layers; nothing below it"


def _count(parameter, part):
    return parameter.numel() if part.is_whole else parameter.numel() // parameter.shape[part.dim] * len(part.index)


def _words(layer, key, part):
    if key == layer.bias:
        return "bias"
    name = "weight" if layer.kind in TRUNK + (NORM,) else key.rpartition(".")[2]
    if part.is_whole:
        return name
    side = "output" if part.dim == layer.output_dim else "input"
    return f"{name} ({len(part.index)} of {layer.shape[part.dim]} {side} channels)"


def _kept(layer, part):
    if part is None:
        return 0
    is_selected = not part.is_whole and part.dim == layer.cut
    return layer.input_bytes * len(part.index) // layer.shape[part.dim] if is_selected else layer.input_bytes


def _row(row):
    layer = row.layer
    return (layer.path, layer.kind, layer.block or "-", "x".join(map(str, layer.output_shape)), row.words, str(row.numbers),
            _percent(row.numbers, row.of), _mib(row.kept_bytes) if row.kept_bytes else "-")


def _table(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return ["  ".join(cell.rjust(width) if column in _RIGHT else cell.ljust(width)
                      for column, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]


def _percent(part, whole):
    return f"{100 * part / whole:.3g} %"


def _mib(size):
    return f"{size / 2 ** 20:.3f} MiB"
