"""The nested order of a set in a `.safetensors`: for each tensor that is cut anywhere, where its slices go."""

import json

from piebridge.core.errors import UserError
from piebridge.core.position_lists import PREFIX, PositionLists, StoredLists
from piebridge.core.safetensors_file import read_safetensors, write_safetensors

KEY = "order"


def write_order(path, order):
    """order: {state dict key: [(axis, all of its positions)]}."""
    lists = PositionLists()
    packed = lists.pack(order)
    write_safetensors(path, lists.tensors(), {KEY: json.dumps(packed, separators=(",", ":"), sort_keys=True)})


def read_order(path, shapes):
    """The order in a file, checked against {key: shape} of the original's tensors. UserError."""
    tensors, metadata = read_safetensors(path)
    try:
        packed = json.loads(metadata.get(KEY, "null"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its order is no JSON ({str(error)[:100]})") from None
    foreign = [name for name in tensors if not name.startswith(PREFIX)]
    if foreign:
        raise UserError(f"{path}: tensor {foreign[0]!r:.80} is no list of positions")
    order = StoredLists(path, tensors).unpack(packed, shapes)
    for key, slices in order.items():
        for axis, positions in slices:
            if len(positions) != shapes[key][axis]:
                raise UserError(f"{path}: order of {key!r:.80}: {len(positions)} positions on axis {axis}, which has {shapes[key][axis]}")
    return order
