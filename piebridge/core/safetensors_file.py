"""The safetensors format in plain Python and numpy, so that a board needs no compiled package for it.

A file is: the header's length N (8 bytes, little-endian); N bytes of JSON, `{name: {"dtype": type, "shape": [sizes],
"data_offsets": [begin, end]}, ..., "__metadata__": {str: str}}`; the tensors' bytes, row-major, without gaps. The header is
checked wholly before any tensor is allocated, and no tensor is larger than its bytes in the file, so a hostile file costs little
more memory than its own size.
"""

import json
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import torch

from piebridge.core.errors import UserError
from piebridge.core.files import atomic_path

MAX_HEADER_BYTES = 16 << 20  # JSON of this size already takes some hundred MiB as Python objects
MAX_DIMENSIONS = 16
METADATA = "__metadata__"

# safetensors name -> (torch type, numpy type of the same bytes)
_TYPES = {
    "F64": (torch.float64, np.float64), "F32": (torch.float32, np.float32), "F16": (torch.float16, np.float16),
    "BF16": (torch.bfloat16, np.int16), "I64": (torch.int64, np.int64), "I32": (torch.int32, np.int32),
    "I16": (torch.int16, np.int16), "I8": (torch.int8, np.int8), "U8": (torch.uint8, np.uint8), "BOOL": (torch.bool, np.bool_),
}
_NAMES = {types[0]: name for name, types in _TYPES.items()}

Entry = namedtuple("Entry", "dtype shape begin end")  # begin and end count from the first byte after the header
Header = namedtuple("Header", "entries metadata data_start")


class _BadHeader(Exception):
    """What is wrong with a header, in words."""


def read_safetensors(path):
    """({name: tensor on the CPU}, {str: str} metadata). UserError names the file and what is wrong with it."""
    header = read_header(path)
    tensors = OrderedDict()
    with open(str(path), "rb") as stream:
        for name, entry in header.entries.items():
            tensors[name] = _read_tensor(path, stream, header.data_start, name, entry)
    return tensors, header.metadata


def read_header(path):
    """The checked Header(entries {name: Entry}, metadata, data_start) of a file. UserError when it is no safetensors file."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        return _parse(path)
    except _BadHeader as problem:
        raise UserError(f"{path}: not a valid safetensors file ({problem}); fetch or write it again") from None


def write_safetensors(path, tensors, metadata=None):
    """Write {name: tensor} and {str: str} metadata, atomically. The same content always gives the same bytes."""
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    # Wide types first keeps every tensor aligned to its own size, as the reference writer does.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, position = OrderedDict(), 0
    if metadata:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"metadata of a safetensors file is text: {key!r} is not")
        header[METADATA] = OrderedDict(sorted(metadata.items()))
    for name in names:
        tensor = tensors[name]
        if name == METADATA or tensor.dtype not in _NAMES:
            raise ValueError(f"cannot write tensor {name!r} of type {tensor.dtype} into a safetensors file")
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of {path} would be larger than {MAX_HEADER_BYTES >> 20} MiB")
    with atomic_path(path) as temporary, open(str(temporary), "wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name in names:
            stream.write(tensor_bytes(tensors[name]))


def tensor_bytes(tensor):
    """The row-major bytes of a tensor as a numpy array of uint8; no copy where the tensor lies so on the CPU already."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy has no such type
        tensor = tensor.view(torch.int16)
    return tensor.numpy().reshape(-1).view(np.uint8)


def _parse(path):
    file_bytes = path.stat().st_size
    with open(str(path), "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if file_bytes < 8 or length > file_bytes - 8:
            raise _BadHeader(f"a header of {length} bytes in a file of {file_bytes}")
        if length > MAX_HEADER_BYTES:
            raise _BadHeader(f"a header of {length} bytes, more than {MAX_HEADER_BYTES}")
        content = _parse_json(stream.read(length))
    if not isinstance(content, dict):
        raise _BadHeader("its header is no JSON object")
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _BadHeader("its metadata is not a JSON object of texts")
    entries = OrderedDict((name, _parse_entry(name, value)) for name, value in content.items())
    _check_layout(entries, file_bytes - 8 - length)
    return Header(entries, metadata, 8 + length)


def _parse_json(data):
    def unique(pairs):
        content = OrderedDict(pairs)
        if len(content) != len(pairs):
            names = [name for name, _ in pairs]
            raise _BadHeader(f"the name {next(name for name in names if names.count(name) > 1)!r:.80} twice")
        return content

    def whole(text):
        if len(text) > 18:  # beyond any offset; parsing very long numbers also takes quadratic time
            raise _BadHeader(f"the number {text[:24]}...")
        return int(text)

    def refuse(text):
        raise _BadHeader(f"the number {text[:24]}, which is not a whole one")

    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=unique, parse_int=whole, parse_float=refuse, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _BadHeader(f"its header is no JSON: {str(error)[:100]}") from None


def _parse_entry(name, value):
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _BadHeader(f"tensor {name!r:.80} has other keys than dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise _BadHeader(f"tensor {name!r:.80} has the type {dtype!r:.20}; known: {', '.join(_TYPES)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _BadHeader(f"tensor {name!r:.80} has the shape {shape!r:.60}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _BadHeader(f"tensor {name!r:.80} has the offsets {offsets!r:.60}")
    wanted = np.dtype(_TYPES[dtype][1]).itemsize
    for size in shape:
        wanted *= size
    if offsets[1] - offsets[0] != wanted:
        raise _BadHeader(f"tensor {name!r:.80} has {offsets[1] - offsets[0]} bytes where its type and shape need {wanted}")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(values):
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


def _check_layout(entries, data_bytes):
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            what = "overlaps another tensor" if entry.begin < position else "follows a gap"
            raise _BadHeader(f"tensor {name!r:.80} {what}: it begins at {entry.begin} instead of {position}")
        position = entry.end
    if position != data_bytes:
        raise _BadHeader(f"{data_bytes} bytes of tensors where its header tells of {position}; it may have been cut short")


def _read_tensor(path, stream, data_start, name, entry):
    torch_type, numpy_type = _TYPES[entry.dtype]
    array = np.empty((entry.end - entry.begin) // np.dtype(numpy_type).itemsize, dtype=numpy_type)
    stream.seek(data_start + entry.begin)
    if array.size and stream.readinto(memoryview(array).cast("B")) != array.nbytes:
        raise UserError(f"{path}: ended while tensor {name!r} was being read; fetch or write it again")
    tensor = torch.from_numpy(array)
    if tensor.dtype != torch_type:
        tensor = tensor.view(torch_type)
    return tensor.reshape(entry.shape)
