"""One proxy of a set in one `.safetensors`: only what the original does not have. Reading one needs the original and runs no code.

In its metadata, as JSON: under "piebridge" the description of the proxy's network, as in a network file; under "proxy" what else the
proxy is. A tensor of the network is, in this order,

* in the file, under its own key, where training or new statistics made it another;
* that of an earlier proxy of the set ("shared": {key: file});
* a part of the original's tensor ("cuts": {key: [[axis, number of a list], ...]});
* the original's tensor, whole.

Lists of positions are tensors `positions/0`, ...; those of the bridge map are `bridge/scale`, ... .
"""

import json
import re
from collections import namedtuple

import numpy as np
import torch
from torch import nn

from piebridge.core.bridge_map import BridgeMap
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.network_file import KEY, MAX_INPUT_SIZE, checked_json, description_of
from piebridge.core.position_lists import PREFIX, PositionLists, StoredLists
from piebridge.core.proxy_specs import LEAST_PIXELS
from piebridge.core.safetensors_file import read_safetensors, tensor_bytes, write_safetensors
from piebridge.core.slices import cut

FORMAT, VERSION = "piebridge-proxy", 1
PROXY_KEY = "proxy"
BRIDGE = "bridge/"
PRECISIONS = ("float", "bf16", "int8")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}\Z")
_BRIDGE_ARRAYS = ("scale", "mean_proxy", "mean_original", "left", "right")
_AS_ORIGINAL = ("head", "normalization", "class_names")  # keys of the description that a proxy must have in common with it


class Proxy(namedtuple("Proxy", "name network resolution precision bridge kept cuts facts")):
    """A cheaper network that stands for the original's frozen blocks.

    name: unique in its set. network: GraphNetwork. resolution: pixels of its square input. precision: "float", "bf16" or "int8" (made
    from the float network when a backend loads it). bridge: BridgeMap for the head's tap, or None. kept: {group: indices} of
    pruning, of the original's file. cuts: {key: [(axis, positions)]} of the original's tensors that follow from it, see
    core/slices.py. facts: JSON object, such as macs.
    """

    def __new__(cls, name, network, resolution, precision="float", bridge=None, kept=None, cuts=None, facts=None):
        return super().__new__(cls, name, network, resolution, precision, bridge, kept or {}, cuts or {}, facts or {})


class OnDemandProxy(Proxy):
    """A Proxy whose network is read from its file each time it is asked for."""

    @classmethod
    def of(cls, proxy, read):
        """proxy: a Proxy, whose network is let go; read: () -> the same Proxy."""
        return cls._make(proxy._replace(network=read))

    @property
    def network(self):
        return self[self._fields.index("network")]().network


def named_tensors(network):
    """{state dict key: parameter or buffer}, the objects themselves."""
    return dict(network.named_buffers(), **dict(network.named_parameters()))


def write_proxy_file(path, proxy, original, original_sha256, earlier=None):
    """Write one proxy. original: GraphNetwork; original_sha256: of its file. earlier: {file name: Proxy}, of the set's proxies so far."""
    wholes, lists = named_tensors(original), PositionLists()
    others = {name: named_tensors(each.network) for name, each in (earlier or {}).items()}
    stored, shared = {}, {}
    for key, tensor in named_tensors(proxy.network).items():
        if key in wholes and _has_same_bits(tensor, _part(wholes[key], proxy.cuts.get(key, []))):
            continue
        source = next((name for name, tensors in others.items() if key in tensors and _has_same_bits(tensor, tensors[key])), None)
        if source is None:
            stored[key] = tensor
        else:
            shared[key] = source
    content = {"format": FORMAT, "version": VERSION, "name": proxy.name, "resolution": proxy.resolution,
               "precision": proxy.precision, "original": original_sha256, "cuts": lists.pack(proxy.cuts), "shared": shared,
               "kept": {group: lists.number(indices) for group, indices in proxy.kept.items()}, "facts": proxy.facts}
    stored.update(lists.tensors())
    if proxy.bridge is not None:
        stored.update({BRIDGE + name: torch.from_numpy(np.array(getattr(proxy.bridge, name), np.float32)) for name in _BRIDGE_ARRAYS})
    write_safetensors(path, stored, {KEY: _to_json(proxy.network.description), PROXY_KEY: _to_json(content)})


def _to_json(value):
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False)


def _part(whole, slices):
    return cut(whole.detach(), slices)


def _has_same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(tensor_bytes(one), tensor_bytes(other))


def read_proxy_file(path, source, original_sha256, earlier=None):
    """The Proxy of a file, its network in eval mode.

    source: `shared_tensors.SharedTensors` of the original. earlier: {file name: Proxy} of the set's proxies so far. UserError, which
    names the file and what is wrong with it.
    """
    tensors, metadata = read_safetensors(path)
    description = description_of(path, metadata)
    content = checked_json(path, metadata.get(PROXY_KEY, "null"), "proxy", FORMAT, VERSION, _KEYS,
                           "; give a proxy of a set, made by piebridge forge")
    if content["original"] != original_sha256:
        raise UserError(f"{path}: made for another original (sha256 {content['original']!r:.20}, not {original_sha256[:16]}...); take "
                        "both from the same set")
    for key in _AS_ORIGINAL:
        if description[key] != source.description[key]:
            raise UserError(f"{path}: {key}={description[key]!r:.60} in its description; the original has {source.description[key]!r:.60}")
    weight = description["head"] + ".weight"
    if expected_shapes(description)[weight] != source.shapes[weight]:
        raise UserError(f"{path}: tensor {weight!r} of its head is to have shape {list(expected_shapes(description)[weight])}; the "
                        f"original's has {list(source.shapes[weight])}")
    lists = StoredLists(path, _taken(tensors, PREFIX))
    bridge = _bridge(path, _taken(tensors, BRIDGE), source.shapes[weight][1])
    cuts = lists.unpack(content["cuts"], source.shapes)
    kept = {group: lists.of(f"kept of {group!r:.80}", number) for group, number in content["kept"].items()}
    network = GraphNetwork(description, _network_tensors(path, description, tensors, source, cuts, content["shared"], earlier or {}))
    return Proxy(content["name"], network.eval(), content["resolution"], content["precision"], bridge, kept,
                 source.cuts_in_memory(cuts), content["facts"])


def _is_resolution(value):
    return type(value) is int and LEAST_PIXELS <= value <= MAX_INPUT_SIZE


def _is_object(value):
    return isinstance(value, dict)


_KEYS = {
    "name": (lambda value: isinstance(value, str) and NAME.match(value), "a name of letters, digits and any of _.+-"),
    "resolution": (_is_resolution, f"pixels of a square image, {LEAST_PIXELS} to {MAX_INPUT_SIZE}"),
    "precision": (lambda value: value in PRECISIONS, "one of " + ", ".join(PRECISIONS)),
    "original": (lambda value: isinstance(value, str), "the sha256 of the original's file"),
    "cuts": (_is_object, "an object of tensors"),
    "shared": (_is_object, "an object of tensors"),
    "kept": (_is_object, "an object of groups"),
    "facts": (_is_object, "an object"),
}


def check_proxy(where, proxy):
    """Refuse a Proxy that could not be read back, before it is written. UserError begins with `where`."""
    for key in ("name", "resolution", "precision", "facts"):
        is_right, wanted = _KEYS[key]
        if not is_right(getattr(proxy, key)):
            raise UserError(f"{where}: {key}={getattr(proxy, key)!r:.60} of a proxy must be {wanted}")


def _taken(tensors, prefix):
    """{name: tensor} of the tensors with this prefix, which are taken out."""
    return {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}


def _bridge(path, tensors, width):
    if not tensors:
        return None
    for name in _BRIDGE_ARRAYS:
        if BRIDGE + name not in tensors:
            raise UserError(f"{path}: tensor {BRIDGE + name!r} is missing")
    arrays = [tensors.pop(BRIDGE + name) for name in _BRIDGE_ARRAYS]
    if tensors:
        raise UserError(f"{path}: tensor {sorted(tensors)[0]!r:.80} belongs to no bridge map")
    rank = arrays[3].shape[-1] if arrays[3].dim() else 0
    for name, array, shape in zip(_BRIDGE_ARRAYS, arrays, ((), (width,), (width,), (width, rank), (rank, width))):
        if array.dtype != torch.float32 or array.shape != shape:
            raise UserError(f"{path}: tensor {BRIDGE + name!r} must be float32 of shape {list(shape)}, and is {array.dtype} of shape "
                            f"{list(array.shape)}")
        if not bool(torch.isfinite(array).all()):
            raise UserError(f"{path}: tensor {BRIDGE + name!r} has values that are not finite; forge the proxy again")
    return BridgeMap(np.float32(arrays[0].item()), *[array.numpy() for array in arrays[1:]])


def _network_tensors(path, description, stored, source, cuts, shared, earlier):
    """{key: tensor} of a proxy's network, each from where it is."""
    found, opened = {}, {}
    for key, shape in expected_shapes(description).items():
        if key in stored:
            tensor = stored.pop(key)
            wanted = source.dtypes.get(key, source.dtypes[source.description["head"] + ".weight"])
            if tensor.dtype != wanted:
                raise UserError(f"{path}: tensor {key!r} is {tensor.dtype} where the original has {wanted}")
            if not _is_finite(tensor):
                raise UserError(f"{path}: tensor {key!r} has values that are not finite; forge the proxy again")
        elif key in shared:
            tensor = _shared(path, key, shared[key], earlier, opened)
        elif key in source.shapes:
            tensor = source.part(key, cuts.get(key, []))
        else:
            raise UserError(f"{path}: tensor {key!r} of its network is missing: it is neither here nor in the original")
        if tensor.shape != shape:
            raise UserError(f"{path}: tensor {key!r} has shape {list(tensor.shape)} where its description says {list(shape)}")
        found[key] = tensor
    if stored:
        raise UserError(f"{path}: tensor {sorted(stored)[0]!r:.80} belongs to no node of its description")
    return found


def _is_finite(tensor):
    """In numpy where it can be: the thread that loads a level may run no parallel operation of torch (see core/level_loader.py)."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor).all() if tensor.dtype == torch.bfloat16 else np.isfinite(tensor.numpy()).all())


def _shared(path, key, name, earlier, opened):
    """A tensor of an earlier proxy. opened: {file: its tensors}, of those that were looked at, since their networks may be read anew."""
    if isinstance(name, str) and name in earlier and name not in opened:
        opened[name] = named_tensors(earlier[name].network)
    tensors = opened[name] if isinstance(name, str) and name in opened else {}
    if key not in tensors:
        raise UserError(f"{path}: tensor {key!r} should be that of {name!r:.60}, which is no earlier proxy of the set that has it")
    return tensors[key] if isinstance(tensors[key], nn.Parameter) else tensors[key].clone()  # batch norm writes to its buffers
