"""The manifest of a proxy set: which files it has, with their hashes and bytes, and what was measured of its networks.

    {"format": "piebridge-proxy-set", "version": 1,
     "original": {"file", "sha256", "bytes", "name", "macs", "fingerprint"},
     "proxies": [{"file", "sha256", "bytes", "name", "resolution", "precision", "macs", "facts"}, ...],   dearest first, as given
     "order", "policy", "predictor": {"file", "sha256", "bytes"} or null,
     "facts": {...}, "latency": {device: table}}
"""

import json
import re

from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_file

FORMAT, VERSION = "piebridge-proxy-set", 1
NAME = "manifest.json"
MAX_BYTES = 64 << 20
ORIGINAL, ORDER, POLICY, PREDICTOR = "original.safetensors", "order.safetensors", "policy.safetensors", "predictor.safetensors"
SINGLE = {"original": ORIGINAL, "order": ORDER, "policy": POLICY, "predictor": PREDICTOR}  # key: its file's name
PROXY_FILE = re.compile(r"proxy_[0-9]{2,3}\.safetensors\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
MOST = 10 ** 18  # of any count
# what a value must be: (test, its words)
COUNT = (lambda value: type(value) is int and 0 < value <= MOST, "a whole number above 0")
TEXT = (lambda value: isinstance(value, str), "a text")
OBJECT = (lambda value: isinstance(value, dict), "an object")


def is_set_file(name):
    """Whether a set may hold a file of this name."""
    return name in SINGLE.values() or name == NAME or bool(PROXY_FILE.match(name))


def file_entry(path, **facts):
    return dict({"file": path.name, "sha256": sha256_of_file(path), "bytes": path.stat().st_size}, **facts)


def is_set(folder):
    """Whether a folder has the manifest of a proxy set, whatever else is wrong with it."""
    try:
        return _read(folder / NAME).get("format") == FORMAT
    except UserError:
        return False


def read_manifest(folder):
    """The checked manifest of the set in a folder (a Path). UserError names the file and the key."""
    path = folder / NAME
    manifest = _read(path)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path}: is not the manifest of a {FORMAT}")
    if manifest.get("version") != VERSION:
        raise UserError(f"{path}: version {manifest.get('version')!r:.20}; this piebridge reads version {VERSION}")
    for key, kind in (("original", dict), ("proxies", list), ("facts", dict), ("latency", dict)):
        if not isinstance(manifest.get(key), kind):
            raise UserError(f"{path}: {key}={manifest.get(key)!r:.60} must be {'a list' if kind is list else 'an object'}")
    for key, name in SINGLE.items():
        if manifest.get(key) is not None:
            _check_entry(path, key, manifest[key], lambda file, name=name: file == name, repr(name))
    for number, entry in enumerate(manifest["proxies"]):
        _check_entry(path, f"proxy {number}", entry, PROXY_FILE.match, "'proxy_01.safetensors' or the like")
    check_values(path, _values(manifest))
    for key in ("file", "name"):
        found = [entry.get(key) for entry in manifest["proxies"]]
        twice = [value for value in found if found.count(value) > 1]
        if twice:
            raise UserError(f"{path}: two proxies have the {key} {twice[0]!r:.60}")
    return manifest


def check_files(folder, manifest):
    """Compare each file of the set with its hash. UserError names the first that is missing or another."""
    entries = [manifest[key] for key in SINGLE if manifest.get(key) is not None] + manifest["proxies"]
    for entry in entries:
        path = folder / entry["file"]
        if not path.is_file():
            raise UserError(f"{path}: no such file, and {NAME} lists it; fetch or forge the set again")
        if path.stat().st_size != entry["bytes"] or sha256_of_file(path) != entry["sha256"]:
            raise UserError(f"{path}: is not the file that {NAME} lists (damaged, or swapped); fetch or forge the set again")


def to_text(manifest):
    """JSON text, which other programs can read too: no NaN."""
    return json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def check_values(path, values):
    """values: (where, value, what it must be: a test and its words). UserError for the first that is something else."""
    for where, value, (is_right, wanted) in values:
        if not is_right(value):
            raise UserError(f"{path}: {where}={value!r:.60} must be {wanted}; fetch or forge the set again")


def or_none(kind):
    """What a value must be, where it may also be missing."""
    is_right, wanted = kind
    return (lambda value: value is None or is_right(value)), f"{wanted}, or null"


def _values(manifest):
    kinds = {"name": TEXT, "macs": COUNT, "fingerprint": or_none(TEXT)}
    for key, kind in kinds.items():
        yield f"original {key}", manifest["original"].get(key), kind
    kinds = {"name": TEXT, "macs": COUNT, "resolution": COUNT, "precision": TEXT, "facts": or_none(OBJECT)}
    for number, entry in enumerate(manifest["proxies"]):
        for key, kind in kinds.items():
            yield f"proxy {number}: {key}", entry.get(key), kind


def _read(path):
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the folder of a proxy set, made by piebridge forge")
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: {path.stat().st_size} bytes, more than a manifest can have")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no JSON ({str(error)[:100]})") from None
    return manifest if isinstance(manifest, dict) else {}


def _refuse(text):
    raise ValueError(f"the number {text}")


def _check_entry(path, what, entry, is_name, wanted):
    if not isinstance(entry, dict) or not isinstance(entry.get("file"), str) or not is_name(entry["file"]):
        raise UserError(f"{path}: {what}: its file must be {wanted}, is {entry.get('file') if isinstance(entry, dict) else entry!r:.60}")
    if not isinstance(entry.get("sha256"), str) or not _SHA256.match(entry["sha256"]) or type(entry.get("bytes")) is not int:
        raise UserError(f"{path}: {what}: lacks the sha256 (64 hexadecimal digits) or the bytes of {entry['file']}")
