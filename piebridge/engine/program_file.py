"""A step program as one .safetensors file: in its metadata the graphs as JSON, beside it the tensors. The state is a file of its own.

Metadata "program", a JSON object: "graphs" {"update": graph_text, "accumulate": graph_text where gradients are accumulated}, "parts"
{key: dimension that the index counts along, null for a whole tensor}, "state" {name: {"dtype", "shape"}} of the state file, and "facts"
(scheme, settings, timings, choice). Metadata "hash": SHA-256 over the program and every tensor. Tensors are named "role/name";
"trained/..." are the values that training starts from, "constant/GRAPH/..." what passes computed beforehand.
Reading runs no code from the file: operators are looked up in a list, and every shape is computed anew.
"""

import hashlib
import json

import torch

from piebridge.core.errors import UserError
from piebridge.core.safetensors_file import read_safetensors, tensor_bytes, write_safetensors
from piebridge.engine.graph_text import LARGEST_VALUE_BYTES, graph_from_json, graph_to_json
from piebridge.engine.propagate import propagate
from piebridge.engine.step_graph import BUFFER, FROZEN, INDEX, STATE, TRAINED, WEIGHTS, Part

FORMAT, VERSION = "piebridge step program", 1
STATE_FORMAT = "piebridge step state"
GRAPHS = ("update", "accumulate")
STORED = (TRAINED, FROZEN, BUFFER, INDEX)
COUNT_NAME = "step_count"


def write_program(path, steps, tensors, facts):
    """steps: {"update": StepGraph, perhaps "accumulate"}. tensors: {(role, name): tensor}. facts: JSON value. Returns the hash."""
    content, stored = _program(steps, tensors, facts)
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    content_hash = _hash(text, stored)
    try:
        write_safetensors(path, stored, {"format": FORMAT, "version": str(VERSION), "program": text, "hash": content_hash})
    except ValueError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None
    return content_hash


def read_program(path):
    """(steps, tensors, facts, hash) of a program file; states are zero. UserError, one line, for whatever is wrong with the file."""
    stored, metadata = read_safetensors(path)
    try:
        _expect(metadata.get("format") == FORMAT, f"not a step program, its format is {metadata.get('format')!r:.40}")
        _expect(metadata.get("version") == str(VERSION), f"has version {metadata.get('version')!r:.20}, and this reads {VERSION}")
        text = metadata.get("program", "")
        _expect(metadata.get("hash") == _hash(text, stored), "its content is not what its hash was made of: it was damaged or altered")
        steps, tensors, facts = _read(_parsed(text), stored)
    except UserError as error:
        raise UserError(f"{path}: {error}; write it again") from None
    return steps, tensors, facts, metadata["hash"]


def write_state(path, state, program_hash=""):
    """state: {name: tensor}, as `StepProgram.state` gives it."""
    write_safetensors(path, state, {"format": STATE_FORMAT, "version": str(VERSION), "program": program_hash})


def read_state(path):
    """{name: tensor} of a state file; whether it fits a program shows when that restores it."""
    state, metadata = read_safetensors(path)
    if metadata.get("format") != STATE_FORMAT:
        raise UserError(f"{path}: not the state of a step program; StepProgram.write_state writes one")
    return state


def state_layout(step):
    """[(name in the state file, Value, Part)] of what a step changes."""
    return [(f"{value.role}/{value.name}", value, step.parts[value.name] if value.role == TRAINED else Part())
            for value in step.outputs if value.role in (TRAINED, STATE, BUFFER)]


def content_key(steps, tensors, facts):
    """Hash of everything that compiling depends on: the graphs as captured, what is frozen, and `facts`. Trained values do not count."""
    content, stored = _program(steps, {key: tensor for key, tensor in tensors.items() if key[0] != TRAINED}, facts)
    return _hash(json.dumps(content, sort_keys=True), stored)


def _program(steps, tensors, facts):
    graphs, stored, state = {}, {}, {}
    for name, step in steps.items():
        graphs[name] = graph_to_json(step)
        for constant in graphs[name]["constants"]:
            key = f"constant/{name}/{constant[1]}"
            stored[key] = getattr(step.graph_module, constant[1])
            constant[1] = key
        for _, value in step.inputs_of(*STORED):
            if (value.role, value.name) in tensors:
                stored[f"{value.role}/{value.name}"] = tensors[value.role, value.name]
        for key, part in step.parts.items():
            if not part.is_whole:
                stored[f"{INDEX}/{key}"] = part.index
        for key, value, _ in state_layout(step):
            state[key] = {"dtype": str(value.dtype).partition(".")[2], "shape": list(value.shape)}
    parts = {key: part.dim for key, part in steps[GRAPHS[0]].parts.items()}
    return {"graphs": graphs, "parts": parts, "state": state, "facts": facts}, stored


def _hash(text, stored):
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace"))
    for name in sorted(stored):
        digest.update(f"\n{name} {stored[name].dtype} {list(stored[name].shape)}\n".encode("utf-8", "backslashreplace"))
        digest.update(tensor_bytes(stored[name]))
    return digest.hexdigest()


def _parsed(text):
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"its program is no JSON: {str(error)[:80]}") from None
    _expect(isinstance(content, dict) and set(content) == {"graphs", "parts", "state", "facts"}, "its program has other keys")
    _expect(all(isinstance(each, dict) for each in content.values()), "its program is no object of objects")
    _expect(GRAPHS[0] in content["graphs"] and set(content["graphs"]) <= set(GRAPHS), f"its graphs are {list(content['graphs'])!r:.60}")
    return content


def _read(content, stored):
    parts = {key: _part(key, dim, stored) for key, dim in content["parts"].items()}
    steps, tensors = {}, {}
    for name, graph in content["graphs"].items():
        try:
            step = graph_from_json(graph, stored, dict(parts))
        except RecursionError:
            raise UserError("its arguments are nested too deeply") from None
        for _, value in step.inputs_of(*STORED, STATE):
            tensors[value.role, value.name] = _tensor(value, stored)
        _check(propagate(step))
        steps[name] = step.finish()
    return steps, tensors, content["facts"]


def _part(key, dim, stored):
    if dim is None:
        return Part()
    trained, index = stored.get(f"{TRAINED}/{key}"), stored.get(f"{INDEX}/{key}")
    _expect(trained is not None and index is not None, f"the tensors of {key!r:.60}, which it trains a part of, are missing")
    _expect(type(dim) is int and 0 <= dim < trained.dim(), f"{key!r:.60} has no dimension {dim!r:.20}")
    extent = trained.shape[dim]
    is_ascending = index.dtype == torch.int64 and index.dim() == 1 and bool((index[1:] > index[:-1]).all())
    _expect(is_ascending and len(index) and 0 <= int(index[0]) and int(index[-1]) < extent,
            f"the channels of {key!r:.60} are not ascending numbers below {extent}")
    return Part(dim, index)


def _tensor(value, stored):
    if value.role == STATE:
        return torch.zeros(value.shape, dtype=value.dtype)
    tensor = stored.get(f"{value.role}/{value.name}")
    _expect(tensor is not None, f"its {value.role} tensor {value.name!r:.60} is missing")
    _expect(tuple(tensor.shape) == value.shape and tensor.dtype == value.dtype,
            f"its {value.role} tensor {value.name!r:.60} is {tensor.dtype} {list(tensor.shape)} where the graph takes "
            f"{value.dtype} {list(value.shape)}")
    return tensor


def _check(step):
    """Every value is of a bearable size, and every result of the shape and type that it says."""
    for node in step.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            _expect(not isinstance(value, torch.Tensor) or value.numel() * value.element_size() <= LARGEST_VALUE_BYTES,
                    f"{node.name} would take more than {LARGEST_VALUE_BYTES >> 30} GiB")
    inputs = {(value.role, value.name): value for value in step.inputs}
    roles = [value.role for value in step.outputs]
    _expect(roles.count("losses") == 1 and roles.count("outputs") == 1, "its results are not one of losses and one of outputs")
    _expect(len(step.inputs_of(WEIGHTS)) == 1, "its inputs are not one of weights")
    for node, value in zip(step.results, step.outputs):
        found = node.meta["val"]
        _expect(isinstance(found, torch.Tensor) and tuple(found.shape) == value.shape and found.dtype == value.dtype,
                f"its {value.role} {value.name!r:.60} is not {value.dtype} {list(value.shape)}")
        if value.role in (TRAINED, STATE, BUFFER):
            old = inputs.get((value.role, value.name))
            _expect(old is not None, f"its {value.role} {value.name!r:.60} is put out and does not come in")
            shape, part = list(old.shape), step.parts.get(value.name, Part()) if value.role == TRAINED else Part()
            if not part.is_whole:
                shape[part.dim] = len(part.index)
            _expect(value.shape == tuple(shape) and value.dtype == old.dtype,
                    f"its {value.role} {value.name!r:.60} changes its shape or type")


def _expect(holds, problem):
    if not holds:
        raise UserError(problem)
