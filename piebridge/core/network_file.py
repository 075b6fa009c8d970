"""Network files: a network's description and tensors in one `.safetensors`. Reading one runs no code from it.

The description is JSON text in the file's metadata, under "piebridge". Whatever it names is looked up in the allow-list of
core/operations.py, whatever it says is checked, and the tensors' shapes are compared with it before a module is made.
"""

import json
import math
import re

import torch

from piebridge.core import operations
from piebridge.core.errors import UserError
from piebridge.core.graph import FORMAT, INPUT, VERSION
from piebridge.core.network import GraphNetwork, check_tensors
from piebridge.core.packages import one_line
from piebridge.core.safetensors_file import read_header, read_safetensors, write_safetensors

KEY = "piebridge"
MAX_NODES = 20000
MAX_INPUT_SIZE = 4096
_NAME = re.compile(r"[A-Za-z0-9_]{1,200}\Z")
_PATH = re.compile(r"[A-Za-z0-9_]{1,100}(\.[A-Za-z0-9_]{1,100}){0,30}\Z")
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")


def save_network(network, path, metadata=None):
    """Write a GraphNetwork; `metadata` is more text for the file ({str: str}), such as where the network came from."""
    texts = dict(metadata or {})
    texts[KEY] = json.dumps(network.description, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    write_safetensors(path, network.state_dict(), texts)


def load_network_file(path):
    """The GraphNetwork of a file, in eval mode. UserError names the file, and the node or key that is wrong."""
    header = read_header(path)
    description = description_of(path, header.metadata)
    try:
        check_tensors(description, {name: entry.shape for name, entry in header.entries.items()})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    tensors, _ = read_safetensors(path)
    return GraphNetwork(description, tensors).eval()


def description_of(path, metadata):
    """The checked description in a file's metadata. UserError."""
    if KEY not in metadata:
        raise UserError(f"{path}: holds tensors but no network description; make it with piebridge (save_network), "
                        "or give a .pth state dict of a known architecture")
    description = checked_json(path, metadata[KEY], "description", FORMAT, VERSION, _KEYS)
    _check_nodes(path, description["nodes"])
    _check_references(path, description)
    return description


def checked_json(path, text, what, wanted_format, version, keys, cure=""):
    """The JSON object in a file's metadata, of a format and version, with the right value at each key. UserError.

    what: the word for it in errors. keys: {key: (value -> whether it is right, what it must be, in words)}; further keys are
    allowed. cure: what to give instead of something of another format.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its {what} is no JSON ({str(error)[:100]})") from None
    if not isinstance(content, dict) or content.get("format") != wanted_format:
        raise UserError(f"{path}: its {what} is not a {wanted_format}{cure}")
    if content.get("version") != version:
        raise UserError(f"{path}: {what} version {content.get('version')!r:.20}; this piebridge reads version {version}")
    for key, (is_right, wanted) in keys.items():
        if key not in content:
            raise UserError(f"{path}: its {what} lacks the key {key!r}")
        if not is_right(content[key]):
            raise UserError(f"{path}: {key}={content[key]!r:.60} in its {what} must be {wanted}")
    return content


def _refuse_constant(text):
    raise ValueError(f"the number {text}")


def _is_text(value):
    return isinstance(value, str) and 0 < len(value) <= 200


def _are_numbers(values):
    return (isinstance(values, list) and len(values) == 3
            and all(type(each) in (int, float) and math.isfinite(each) for each in values))


def _is_normalization(value):
    return (isinstance(value, dict) and set(value) == {"mean", "std"} and all(_are_numbers(each) for each in value.values())
            and all(each > 0 for each in value["std"]))


def _is_input_size(value):
    return (isinstance(value, list) and len(value) == 3 and all(type(each) is int for each in value) and value[0] == 3
            and all(1 <= each <= MAX_INPUT_SIZE for each in value))


def _are_class_names(value):
    return value is None or isinstance(value, list) and 0 < len(value) and all(isinstance(each, str) for each in value)


_KEYS = {
    "name": (_is_text, "a text"),
    "input_size": (_is_input_size, f"[3, height, width], at most {MAX_INPUT_SIZE}"),
    "normalization": (_is_normalization, "mean and std of three channels"),
    "interpolation": (lambda value: value in _INTERPOLATIONS, "one of " + ", ".join(_INTERPOLATIONS)),
    "crop_fraction": (lambda value: type(value) in (int, float) and 0 < value <= 1, "a number over 0 and up to 1"),
    "class_names": (_are_class_names, "null or a list of texts"),
    "head": (_is_text, "a module's path"),
    "tap": (_is_text, "a node's name"),
    "blocks": (lambda value: isinstance(value, list), "a list"),
    "nodes": (lambda value: isinstance(value, list) and 0 < len(value) <= MAX_NODES, f"a list of 1 to {MAX_NODES} nodes"),
    "output": (_is_text, "a node's name"),
}


def _check_nodes(path, nodes):
    seen, owners = {INPUT}, {}
    for number, node in enumerate(nodes):
        where = f"{path}: node {number}"
        if not isinstance(node, dict) or not isinstance(node.get("name"), str) or not _NAME.match(node["name"]):
            raise UserError(f"{where} has no proper name")
        where = f"{path}: node {node['name']!r}"
        if node["name"] in seen:
            raise UserError(f"{where}: a second node of this name")
        operations.check_operation(where, node.get("operation"))
        extra = _OWN_KEY.get(_kind(node["operation"]))
        wanted = {"name", "operation", "inputs", "arguments"} | ({extra} if extra else set())
        if set(node) != wanted:
            raise UserError(f"{where}: its keys must be {', '.join(sorted(wanted))}")
        if not isinstance(node["inputs"], list) or not isinstance(node["arguments"], dict):
            raise UserError(f"{where}: its inputs must be a list and its arguments an object")
        for name in node["inputs"]:
            if not isinstance(name, str) or name not in seen:
                raise UserError(f"{where}: its input {name!r:.60} is no node before it")
        operations.check_arguments(where, node["operation"], node["arguments"], len(node["inputs"]))
        if extra:
            _check_owner(where, node, node[extra], owners)
        seen.add(node["name"])
    _check_nesting(path, owners)


_OWN_KEY = {"module": "module", "parameter": "parameter"}


def _kind(operation):
    return "module" if operation in operations.MODULES else "parameter" if operation == operations.PARAMETER else "function"


def _check_owner(where, node, owner, owners):
    if not isinstance(owner, str) or not _PATH.match(owner):
        raise UserError(f"{where}: {owner!r:.60} is no module path")
    same = (node["operation"], node["arguments"])
    if owners.setdefault(owner, same) != same:
        raise UserError(f"{where}: {owner!r} is described twice, differently")


def _check_nesting(path, owners):
    for owner in owners:
        parts = owner.split(".")
        for length in range(1, len(parts)):
            if ".".join(parts[:length]) in owners:
                raise UserError(f"{path}: {owner!r} lies below {'.'.join(parts[:length])!r}, itself a module or parameter")


def _check_references(path, description):
    """Head, tap, output and blocks must fit the nodes (which are checked already)."""
    by_name = {node["name"]: node for node in description["nodes"]}
    output = by_name.get(description["output"])
    if output is None or output["operation"] != "Linear" or output["module"] != description["head"]:
        raise UserError(f"{path}: output {description['output']!r} must be the node of head {description['head']!r}, a Linear")
    if output["inputs"] != [description["tap"]]:
        raise UserError(f"{path}: the tap {description['tap']!r} must be the input of the head, {output['inputs'][0]!r}")
    names = description["class_names"]
    if names is not None and len(names) != output["arguments"]["out_features"]:
        raise UserError(f"{path}: {len(names)} class names for a head of {output['arguments']['out_features']} outputs")
    for number, block in enumerate(description["blocks"]):
        is_right = (isinstance(block, dict) and set(block) == {"name", "input", "output", "is_residual"}
                    and all(_is_text(block[key]) for key in ("name", "input", "output")) and type(block["is_residual"]) is bool
                    and block["output"] in by_name and (block["input"] in by_name or block["input"] == INPUT))
        if not is_right:
            raise UserError(f"{path}: block {number} must have a name, an input and an output that are nodes, and is_residual")


def check_runs(network, path):
    """Bring a network from a file to float32 and try it on one image of zeros; UserError where its parts do not fit together."""
    size = network.description["input_size"]
    try:
        network.float()
        with torch.no_grad():
            features = network.features(torch.zeros([1] + list(size)))
            logits = network.head(features)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(f"{path}: does not run on an image of {size[-2]} x {size[-1]} pixels: {one_line(error)[:200]}") from None
    if features.dim() != 2 or logits.dim() != 2 or not bool(torch.isfinite(logits).all()):
        raise UserError(f"{path}: gives no finite feature vector for an image of zeros; is the file whole?")
