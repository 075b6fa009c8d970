"""The plain-Python safetensors reader and writer, against the reference package and against hostile files."""

import json

import pytest
import torch

from piebridge.core.errors import UserError
from piebridge.core.safetensors_file import MAX_HEADER_BYTES, read_header, read_safetensors, write_safetensors

safetensors_torch = pytest.importorskip("safetensors.torch")


def every_type():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 4, generator=generator) * 50
    tensors = {name: numbers.to(getattr(torch, name)) for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "bool")}
    tensors["uint8"] = numbers.abs().to(torch.uint8)
    tensors["scalar"] = torch.tensor(3)
    tensors["bfloat16 scalar"] = torch.tensor(1.5, dtype=torch.bfloat16)
    tensors["empty"] = torch.zeros(0, 5)
    tensors["channels_last"] = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    tensors["strided"] = numbers[:, ::2]
    return tensors


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape and torch.equal(found[name], tensor), name


def test_the_reference_package_reads_what_is_written(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, every_type(), {"piebridge": "ä {\"x\": 1}"})
    assert_same(safetensors_torch.load_file(str(path)), every_type())
    with safetensors_torch.safe_open(str(path), "pt") as reader:
        assert reader.metadata() == {"piebridge": "ä {\"x\": 1}"}


def test_reads_what_the_reference_package_writes(tmp_path):
    path = tmp_path / "b.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in every_type().items()}
    safetensors_torch.save_file(tensors, str(path), {"made": "elsewhere"})
    found, metadata = read_safetensors(path)
    assert_same(found, tensors)
    assert metadata == {"made": "elsewhere"}


def test_writes_the_same_bytes_in_any_order(tmp_path):
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int8), "c": torch.zeros(1, dtype=torch.float64)}
    write_safetensors(tmp_path / "1", tensors, {"x": "1", "y": "2"})
    write_safetensors(tmp_path / "2", dict(reversed(list(tensors.items()))), {"y": "2", "x": "1"})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    header = read_header(tmp_path / "1")
    assert header.data_start % 8 == 0
    assert (header.entries["b"].begin % 4, header.entries["c"].begin % 8) == (0, 0), "tensors are aligned to their types"


def test_refuses_to_write_what_the_format_cannot_hold(tmp_path):
    with pytest.raises(ValueError, match="cannot write tensor 'z' of type torch.complex64"):
        write_safetensors(tmp_path / "a", {"z": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(TypeError, match="is text"):
        write_safetensors(tmp_path / "a", {}, {"epoch": 3})
    assert list(tmp_path.iterdir()) == []


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return dict({"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}, **more)


def write_raw(path, header, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


HOSTILE = {
    "larger than its file": (dict(header={"a": entry(shape=(10 ** 12,), offsets=(0, 4 * 10 ** 12))}), "8 bytes of tensors where"),
    "shape against bytes": (dict(header={"a": entry(shape=(3,))}), "8 bytes where its type and shape need 12"),
    "product that overflows": (dict(header={"a": entry(shape=(2 ** 32, 2 ** 32), offsets=(0, 0))}), "0 bytes where"),
    "type against bytes": (dict(header={"a": entry(dtype="F64")}), "need 16"),
    "unknown type": (dict(header={"a": entry(dtype="F8_E4M3")}), "type 'F8_E4M3'; known: F64, F32"),
    "type that is no text": (dict(header={"a": entry(dtype=["F32"])}), "has the type"),
    "negative size": (dict(header={"a": entry(shape=(-2, -1))}), r"shape \[-2, -1\]"),
    "size that is a truth value": (dict(header={"a": entry(shape=(True, 2))}), "shape"),
    "fraction": (dict(header={"a": entry(shape=(2.0,))}), "not a whole one"),
    "not a number": (dict(header=b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'), "the number NaN"),
    "endless": (dict(header=b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}}' % (b"9" * 100000)), "the number 999"),
    "many dimensions": (dict(header={"a": entry(shape=(1,) * 100 + (2,))}), "shape"),
    "negative offset": (dict(header={"a": entry(offsets=(-8, 0))}), "offsets"),
    "backward offsets": (dict(header={"a": entry(offsets=(8, 0))}), "-8 bytes"),
    "three offsets": (dict(header={"a": entry(offsets=(0, 4, 8))}), "offsets"),
    "overlap": (dict(header={"a": entry(), "b": entry(shape=(1,), offsets=(4, 8))}), "'b' overlaps another tensor"),
    "same bytes twice": (dict(header={"a": entry(), "b": entry()}), "overlaps another tensor"),
    "gap": (dict(header={"a": entry(offsets=(4, 12))}, data=b"\0" * 12), "'a' follows a gap"),
    "bytes left over": (dict(header={"a": entry()}, data=b"\0" * 9), "9 bytes of tensors where its header tells of 8"),
    "cut short": (dict(header={"a": entry()}, data=b"\0" * 7), "cut short"),
    "one name twice": (dict(header=b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)), "the name 'a' twice"),
    "one key twice": (dict(header=b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'), "name 'dtype' twice"),
    "more keys": (dict(header={"a": entry(code="import os")}), "other keys than"),
    "entry that is no object": (dict(header={"a": [1]}), "other keys than"),
    "metadata that is no text": (dict(header={"__metadata__": {"x": 1}}, data=b""), "metadata is not"),
    "metadata that is no object": (dict(header={"__metadata__": ["x"]}, data=b""), "metadata is not"),
    "list": (dict(header=[]), "no JSON object"),
    "no JSON": (dict(header=b"{'a': 1}"), "no JSON"),
    "no UTF-8": (dict(header=b'{"\xff": 1}'), "no JSON"),
    "nested without end": (dict(header=b"[" * 500000), "no JSON"),
    "header beyond the file": (dict(header={}, length=1 << 62), "a header of 4611686018427387904 bytes in a file of"),
    "header of all bits": (dict(header={}, length=(1 << 64) - 1), "bytes in a file of"),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_refuses_a_hostile_header(tmp_path, case):
    content, message = HOSTILE[case]
    path = write_raw(tmp_path / "bad.safetensors", **content)
    with pytest.raises(UserError, match=message) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(f"{path}: not a valid safetensors file (") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_refuses_short_missing_and_huge_headers(tmp_path):
    (tmp_path / "short").write_bytes(b"\x08\0\0")
    with pytest.raises(UserError, match="in a file of 3"):
        read_header(tmp_path / "short")
    with pytest.raises(UserError, match="none: no such file"):
        read_header(tmp_path / "none")
    with open(str(tmp_path / "sparse"), "wb") as stream:  # a sparse file: large, and not on the disk
        stream.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(UserError, match=f"more than {MAX_HEADER_BYTES}"):
        read_header(tmp_path / "sparse")


def test_damage_anywhere_is_a_user_error_or_harmless(tmp_path):
    """Each byte of the header, changed in turn: never another exception, never other shapes than the header says."""
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, {"k": "v"})
    good = path.read_bytes()
    refused = 0
    for position in range(read_header(path).data_start):
        for value in (0, ord("9"), ord('"'), 255):
            path.write_bytes(good[:position] + bytes([value]) + good[position + 1:])
            try:
                tensors, _ = read_safetensors(path)
                assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) <= len(good)
            except UserError:
                refused += 1
    assert refused > 300
