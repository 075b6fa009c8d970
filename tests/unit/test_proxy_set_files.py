"""What a set of a small network shares, when it is replaced, and how files that are wrong or hostile are refused."""

import json
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import piebridge
from piebridge.core.bridge_map import BridgeMap
from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_file
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.network_file import KEY
from piebridge.core.proxy_file import PROXY_KEY
from piebridge.core.proxy_set import Proxy, load_proxy_set, remove_leftovers, write_proxy_set
from piebridge.core.safetensors_file import read_header, read_safetensors, write_safetensors
from piebridge.core.slices import cut
from piebridge.forge import prune, structure_of, tensor_cuts

HALVES = ([0.5] * 3, [0.5] * 3)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.block = nn.Sequential(nn.Conv2d(4, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.block(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return capture(Tiny().eval(), "tiny", [3, 16, 16], *HALVES)


def bridge_map():
    random = np.random.RandomState(0)
    arrays = [random.randn(*shape).astype(np.float32) for shape in ((4,), (4,), (4, 2), (2, 4))]
    return BridgeMap(np.float32(0.9), *arrays)


KEPT = {"block.0": [5, 1, 9, 3]}


def tiny_proxies(tiny):
    """A pruned one with statistics of its own, the same at int8 with a bridge map, and the whole at a lower resolution."""
    structure = structure_of(tiny)
    pruned, cuts = prune(tiny, KEPT, structure), tensor_cuts(structure, KEPT)
    pruned.get_submodule("block.1").running_mean.add_(0.5)
    return [Proxy("p25", pruned, 16, kept=KEPT, cuts=cuts),
            Proxy("p25-int8", prune(pruned, {}), 16, "int8", bridge_map(), KEPT, cuts, {"cosine": 0.5}),
            Proxy("12px", tiny.without_blocks([]), 12)]


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "tiny set"
    write_proxy_set(folder, tiny, tiny_proxies(tiny), {"data": "ünlabelled"}, policy=tiny)
    return folder


def test_networks_can_be_read_when_they_are_asked_for(written):
    kept, lean = load_proxy_set(written), load_proxy_set(written, keeps_networks=False)
    for proxy, other in zip(kept.proxies, lean.proxies):
        assert [getattr(proxy, key) for key in ("name", "resolution", "precision", "kept", "cuts", "facts")] == [
            getattr(other, key) for key in ("name", "resolution", "precision", "kept", "cuts", "facts")]
        assert (proxy.bridge is None) == (other.bridge is None)
        network, state = other.network, proxy.network.state_dict()
        assert not network.training and network.description == proxy.network.description
        assert set(state) == set(network.state_dict())
        assert all(torch.equal(tensor, state[key]) for key, tensor in network.state_dict().items())
        assert network.get_submodule("stem").weight is lean.original.get_submodule("stem").weight
        reference = weakref.ref(network)
        assert other.network is not network
        del network
        assert reference() is None, "nothing keeps it"



@pytest.fixture
def folder(written, tmp_path):
    return Path(shutil.copytree(str(written), str(tmp_path / "tiny set")))


def test_what_is_not_the_originals_is_stored_once(tiny, folder):
    entries = [set(read_header(folder / f"proxy_0{number}.safetensors").entries) for number in (1, 2, 3)]
    bridge = {f"bridge/{name}" for name in ("scale", "mean_proxy", "mean_original", "left", "right")}
    assert entries == [{"block.1.running_mean", "positions/0"}, {"positions/0"} | bridge, set()]
    loaded = piebridge.load_proxy_set(folder)
    first, second, third = (proxy.network for proxy in loaded.proxies)
    for key, parameter in third.named_parameters():
        assert parameter is dict(loaded.original.named_parameters())[key]
    for key, parameter in second.named_parameters():
        assert parameter is dict(first.named_parameters())[key]  # the same cuts of the original
    assert torch.equal(second.get_submodule("block.1").running_mean, first.get_submodule("block.1").running_mean)
    first.get_submodule("block.1").running_mean.zero_()  # buffers are each network's own
    third.get_submodule("block.1").running_mean.fill_(3)
    assert float(second.get_submodule("block.1").running_mean.abs().sum()) > 0
    assert loaded.original.fingerprint() == tiny.fingerprint()


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(16)), st.lists(st.integers(1, 16), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_any_levels_in_any_order_come_back(tiny, order, counts, is_ordered, is_reordered):
    structure = structure_of(tiny)
    proxies = []
    for number, count in enumerate(counts):
        kept = {"block.0": order[:count]}
        proxies.append(Proxy(f"p{number}", prune(tiny, kept, structure), 16, kept=kept, cuts=tensor_cuts(structure, kept)))
    with tempfile.TemporaryDirectory() as folder:
        write_proxy_set(folder, tiny, proxies, order=tensor_cuts(structure, {"block.0": order}) if is_ordered else None)
        loaded = load_proxy_set(folder, is_reordered)
    assert loaded.in_own_order(loaded.original).fingerprint() == tiny.fingerprint()
    for found, wanted in zip(loaded.proxies, proxies):
        assert found.network.fingerprint() == wanted.network.fingerprint() and found.kept == wanted.kept
        for key, tensor in loaded.original.state_dict().items():
            assert torch.equal(cut(tensor, found.cuts.get(key, [])), found.network.state_dict()[key])


def test_trained_parameters_are_shared_by_later_proxies(tiny, tmp_path):
    proxies = tiny_proxies(tiny)
    for proxy in proxies[:2]:
        with torch.no_grad():
            proxy.network.get_submodule("block.3").weight.fill_(0.25)
    write_proxy_set(tmp_path / "set", tiny, proxies)
    loaded = load_proxy_set(tmp_path / "set")
    first, second = (proxy.network.get_submodule("block.3").weight for proxy in loaded.proxies[:2])
    assert first is second and bool((first == 0.25).all())
    assert "block.3.weight" not in read_header(tmp_path / "set" / "proxy_02.safetensors").entries


def test_facts_bridge_and_policy_come_back(tiny, folder):
    loaded = load_proxy_set(str(folder))
    proxy = loaded.proxies[1]
    features = torch.randn(5, 4).numpy()
    assert np.array_equal(proxy.bridge(features), bridge_map()(features))
    assert (proxy.precision, proxy.kept, proxy.facts, loaded.proxies[2].resolution) == ("int8", KEPT, {"cosine": 0.5}, 12)
    assert loaded.policy.fingerprint() == tiny.fingerprint() and loaded.predictor is None
    manifest = loaded.manifest
    assert manifest["facts"] == {"data": "ünlabelled"} and manifest["latency"] == {}
    for entry in [manifest["original"], manifest["policy"]] + manifest["proxies"]:
        path = folder / entry["file"]
        assert (entry["sha256"], entry["bytes"]) == (sha256_of_file(path), path.stat().st_size)
    whole, pruned = manifest["original"]["macs"], manifest["proxies"][0]["macs"]
    assert whole - pruned == 14 * 14 * 12 * (4 + 4)  # 12 channels between two 1x1 convolutions over 14 x 14 places


def test_latency_tables_of_several_devices(folder):
    one, other = load_proxy_set(folder), load_proxy_set(folder)
    one.update_manifest("Intel(R) Xeon(R)", {"eager": [1.5, 0.5]})
    other.update_manifest("Jetson TX2", {"eager": [9, 4]})
    tables = {"Intel(R) Xeon(R)": {"eager": [1.5, 0.5]}, "Jetson TX2": {"eager": [9, 4]}}
    assert other.manifest["latency"] == load_proxy_set(folder).manifest["latency"] == tables
    with pytest.raises(ValueError):
        one.update_manifest("Jetson TX2", float("nan"))
    assert load_proxy_set(folder).manifest["latency"] == tables


# Writing: whole or not at all --------------------------------------------------------------------------------------------

def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else None


def test_a_set_is_replaced_only_when_asked(tiny, folder):
    before = content(folder)
    with pytest.raises(UserError, match="tiny set: holds a proxy set already; choose another folder, or give overwrite=true to replace it"):
        write_proxy_set(folder, tiny, tiny_proxies(tiny)[:1])
    assert content(folder) == before
    write_proxy_set(folder, tiny, tiny_proxies(tiny)[:1], overwrite=True)
    assert [proxy.name for proxy in load_proxy_set(folder).proxies] == ["p25"]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny set"]


def test_what_a_killed_writer_left_goes(tiny, folder):
    before, strange = content(folder), folder.with_name("set [1]*")
    for name in (".tiny set.0123abcd.part", ".set [1]*.0123abcd.part", ".other.0123abcd.part"):
        (folder.parent / name).mkdir()
    remove_leftovers(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".other.0123abcd.part", ".set [1]*.0123abcd.part", "tiny set"]
    remove_leftovers(strange)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".other.0123abcd.part", "tiny set"] and content(folder) == before


@pytest.mark.parametrize("name", ["notes.txt", ".hidden"])
def test_what_is_not_only_a_set_is_not_touched(tiny, folder, tmp_path, name):
    (folder / name).write_text("mine")
    with pytest.raises(UserError, match=f"tiny set: holds {name} beside its proxy set; move it elsewhere"):
        write_proxy_set(folder, tiny, [], overwrite=True)
    assert (folder / name).read_text() == "mine" and len(load_proxy_set(folder).proxies) == 3
    other = tmp_path / "photos"
    other.mkdir()
    (other / name).write_text("mine")
    with pytest.raises(UserError, match=f"photos: is a folder with other things in it \\({name}\\); choose another for the proxy set"):
        write_proxy_set(other, tiny, [], overwrite=True)
    with pytest.raises(UserError, match=f"{name}: is no folder; choose another name for the proxy set"):
        write_proxy_set(other / name, tiny, [], overwrite=True)
    assert content(other) == {name: b"mine"}


def test_an_empty_folder_and_a_link_to_a_set(tiny, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    write_proxy_set(tmp_path / "empty", tiny, [])
    assert load_proxy_set(tmp_path / "empty").proxies == []
    (tmp_path / "link").symlink_to(folder)
    write_proxy_set(tmp_path / "link", tiny, [], overwrite=True)
    assert (tmp_path / "link").is_symlink() and load_proxy_set(folder).proxies == []


@pytest.mark.parametrize("change, message", [
    (dict(resolution=8000), "resolution=8000 of a proxy must be pixels of a square image, 8 to 4096"),
    (dict(precision="fp4"), "precision='fp4' of a proxy must be one of float, bf16, int8"),
    (dict(name="../p"), "name='../p' of a proxy must be a name of letters"),
    (dict(name="p25"), "two proxies have the name 'p25'; each needs its own"),
    (dict(resolution=8, network="too small"), "proxy 12px: does not run on images of 8 x 8 pixels ("),
    (dict(facts={"cosine": float("nan")}), None),
])
def test_a_set_that_cannot_be_is_not_begun(tiny, folder, change, message):
    before, proxies = content(folder), tiny_proxies(tiny)
    if "network" in change:
        description = json.loads(json.dumps(tiny.description))
        description["nodes"][0]["arguments"]["kernel_size"] = [9, 9]
        change = dict(change, network=GraphNetwork(
            description, {key: torch.zeros(shape) for key, shape in expected_shapes(description).items()}))
    proxies[2] = proxies[2]._replace(**change)
    with pytest.raises(UserError if message else ValueError) as caught:
        write_proxy_set(folder, tiny, proxies, overwrite=True)
    assert message is None or message in str(caught.value)
    assert content(folder) == before and [path.name for path in folder.parent.iterdir()] == ["tiny set"]


def test_a_failed_rename_brings_the_old_set_back(tiny, folder, monkeypatch):
    before, rename = content(folder), os.rename

    def fail(source, target):
        if source.endswith(".part"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="No space left"):
        write_proxy_set(folder, tiny, [], overwrite=True)
    assert content(folder) == before and [path.name for path in folder.parent.iterdir()] == ["tiny set"]


# Files that are wrong or hostile -----------------------------------------------------------------------------------------

def refused(folder, message, name):
    with pytest.raises(UserError, match=message) as caught:
        load_proxy_set(folder)
    assert str(caught.value).startswith(f"{folder / name}: ") and "\n" not in str(caught.value)


def test_damaged_swapped_and_missing_files(folder):
    damaged = folder / "proxy_02.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(folder, r"is not the file that manifest.json lists \(damaged, or swapped\); fetch or forge the set again", damaged.name)
    damaged.write_bytes(whole[:-5])
    refused(folder, "is not the file that", damaged.name)
    shutil.copy(str(folder / "proxy_01.safetensors"), str(damaged))
    refused(folder, "is not the file that", damaged.name)
    damaged.unlink()
    refused(folder, "no such file, and manifest.json lists it", damaged.name)
    with pytest.raises(UserError, match="no such file; give the folder of a proxy set, made by piebridge forge"):
        load_proxy_set(folder / "none")


def change_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


@pytest.mark.parametrize("change, message", [
    (lambda m: m.update(format="other"), "is not the manifest of a piebridge-proxy-set"),
    (lambda m: m.update(version=2), "version 2; this piebridge reads version 1"),
    (lambda m: m.pop("proxies"), "proxies=None must be a list"),
    (lambda m: m.update(original=None), "original=None must be an object"),
    (lambda m: m["original"].update(file="../original.safetensors"), "original: its file must be 'original.safetensors', is '../orig"),
    (lambda m: m["proxies"][0].update(file="/etc/passwd"), "proxy 0: its file must be 'proxy_01.safetensors' or the like, is '/etc/p"),
    (lambda m: m["proxies"].__setitem__(0, 7), "proxy 0: its file must be .* is 7"),
    (lambda m: m["proxies"][1].update(sha256="0"), "proxy 1: lacks the sha256"),
    (lambda m: m["proxies"][1].pop("bytes"), "proxy 1: lacks .* or the bytes of proxy_02.safetensors"),
    (lambda m: m["proxies"].append(m["proxies"][0]), "two proxies have the file 'proxy_01.safetensors'"),
    (lambda m: m["proxies"][0].update(name="12px"), "two proxies have the name '12px'"),
    (lambda m: m.update(policy=[]), "policy: its file must be 'policy.safetensors'"),
    (lambda m: m.update(latency=3), "latency=3 must be an object"),
    (lambda m: m["original"].update(macs=0), "original macs=0 must be a whole number above 0; fetch or forge the set again"),
    (lambda m: m["original"].pop("macs"), "original macs=None must be a whole number above 0"),
    (lambda m: m["original"].update(fingerprint=[]), "original fingerprint=.* must be a text, or null"),
    (lambda m: m["proxies"][0].update(name=None), "proxy 0: name=None must be a text"),
    (lambda m: m["proxies"][1].update(macs=10 ** 30), "proxy 1: macs=1000.* must be a whole number above 0"),
    (lambda m: m["proxies"][1].update(resolution=True), "proxy 1: resolution=True must be a whole number"),
    (lambda m: m["proxies"][1].update(facts=[1]), "proxy 1: facts=.1. must be an object, or null"),
])
def test_a_manifest_that_lies(folder, change, message):
    change_manifest(folder, change)
    refused(folder, message, "manifest.json")


@pytest.mark.parametrize("text", ["{", "[" * 100000, "null", '{"format": NaN}'])
def test_a_manifest_that_is_none(folder, text):
    (folder / "manifest.json").write_text(text)
    refused(folder, "no JSON|is not the manifest", "manifest.json")


def test_a_proxy_under_another_name(folder):
    change_manifest(folder, lambda manifest: manifest["proxies"][0].update(name="other"))
    refused(folder, "holds the proxy 'p25' where manifest.json lists 'other'", "proxy_01.safetensors")


def rewrite(folder, name, change):
    """Change a file by change(tensors, description, content) and put its new hash into the manifest, as a forger would."""
    path = folder / name
    tensors, metadata = read_safetensors(path)
    description, content = json.loads(metadata[KEY]), json.loads(metadata[PROXY_KEY])
    change(tensors, description, content)
    write_safetensors(path, tensors, {KEY: json.dumps(description), PROXY_KEY: json.dumps(content)})

    def put_hash(manifest):
        entry = next(entry for entry in manifest["proxies"] if entry["file"] == name)
        entry.update(sha256=sha256_of_file(path), bytes=path.stat().st_size)

    change_manifest(folder, put_hash)


def set_key(key, value):
    return lambda tensors, description, content: content.update({key: value})


def set_tensor(key, tensor):
    return lambda tensors, description, content: tensors.update({key: tensor})


def set_cut(key, value):
    return lambda tensors, description, content: content["cuts"].update({key: value})


def set_width(width):
    def change(tensors, description, content):
        next(node for node in description["nodes"] if node.get("module") == "block.1")["arguments"]["num_features"] = width
    return change


def set_description(key, value):
    return lambda tensors, description, content: description.update({key: value})


def set_block_number(key, value):
    def change(tensors, description, content):
        description["nodes"][-1]["arguments"][key] = value
    return change


@pytest.mark.parametrize("change, message", [
    (set_key("format", "x"), "is not a piebridge-proxy; give a proxy of a set"),
    (set_key("version", 9), "proxy version 9; this piebridge reads version 1"),
    (set_key("original", "ab" * 32), "made for another original"),
    (set_key("resolution", 10 ** 6), "resolution=1000000 in its proxy must be pixels of a square image, 8 to 4096"),
    (set_key("resolution", True), "resolution=True"),
    (set_key("resolution", 16.0), "resolution=16.0"),
    (set_key("precision", "int4"), "precision='int4' in its proxy must be one of float, bf16, int8"),
    (set_key("precision", ["int8"]), "precision="),
    (set_key("name", "a b"), "name='a b' in its proxy must be a name"),
    (set_key("facts", []), "facts="),
    (set_key("facts", {"cosine": float("nan")}), "is no JSON .*NaN"),
    (set_key("cuts", 3), "cuts=3 in its proxy must be an object of tensors"),
    (set_cut("block.9.weight", [[0, 0]]), "cuts of 'block.9.weight': the original has no such tensor"),
    (set_cut("block.0.weight", [[4, 0]]), "cuts of 'block.0.weight': axis 4 is not one of its 4"),
    (set_cut("block.0.weight", [[-1, 0]]), "cuts of 'block.0.weight': axis -1"),
    (set_cut("block.0.weight", [[0, 0], [0, 0]]), "cuts of 'block.0.weight': axis 0 is not one of its 4, each at most once"),
    (set_cut("block.0.weight", [[1, 0]]), "cuts of 'block.0.weight': position 9 on axis 1, which has 4"),
    (set_cut("block.0.weight", [[0, 7]]), "cuts of 'block.0.weight': there is no list of positions 7"),
    (set_cut("block.0.weight", [[0, "0"]]), "cuts of 'block.0.weight': there is no list of positions '0'"),
    (set_cut("block.0.weight", []), r"cuts of 'block.0.weight' must be a list of \[axis, number\]"),
    (set_cut("block.0.weight", "ab"), r"cuts of 'block.0.weight' must be a list of \[axis, number\]"),
    (lambda t, d, c: c["cuts"].pop("block.0.weight"),
     r"tensor 'block.0.weight' has shape \[16, 4, 1, 1\] where its description says \[4, 4, 1, 1\]"),
    (set_key("kept", {"block.0": 3}), "kept of 'block.0': there is no list of positions 3"),
    (set_tensor("positions/0", torch.tensor([1, 1, 2, 3], dtype=torch.int32)), "tensor 'positions/0' must be a list of different"),
    (set_tensor("positions/0", torch.tensor([-1, 1, 2, 3], dtype=torch.int32)), "tensor 'positions/0' must be a list"),
    (set_tensor("positions/0", torch.ones(4)), "tensor 'positions/0' must be a list"),
    (set_tensor("positions/0", torch.zeros((0,), dtype=torch.int32)), "tensor 'positions/0' must be a list"),
    (set_tensor("positions/0", torch.tensor([1, 2, 3], dtype=torch.int32)), "tensor 'block.0.weight' has shape"),
    (set_tensor("block.1.weight", torch.ones(5)), r"tensor 'block.1.weight' has shape \[5\] where its description says \[4\]"),
    (set_tensor("block.1.weight", torch.ones(4).double()), "tensor 'block.1.weight' is torch.float64 where the original has torch.float32"),
    (set_tensor("block.1.weight", torch.full((4,), float("inf"))), "tensor 'block.1.weight' has values that are not finite"),
    (set_tensor("block.7.weight", torch.ones(4)), "tensor 'block.7.weight' belongs to no node of its description"),
    (set_key("shared", {"block.1.weight": "proxy_02.safetensors"}), "'block.1.weight' should be that of 'proxy_02.safetensors', which is"),
    (set_key("shared", {"block.1.weight": ["x"]}), "'block.1.weight' should be that of "),
    (set_key("shared", {"block.1.running_mean": "proxy_01.safetensors"}), "'block.1.running_mean' should be that of 'proxy_01"),
    (set_width(6), r"tensor 'block.1.\w+' has shape \[4\] where its description says \[6\]"),
    (set_description("normalization", {"mean": [0, 0, 0], "std": [1, 1, 1]}), "normalization=.* in its description; the original has"),
    (set_description("head", "block.0"), "output .* must be the node of head 'block.0', a Linear"),
    (set_block_number("in_features", 5), r"tensor 'head.weight' of its head is to have shape \[3, 5\]; the original's has \[3, 4\]"),
    (set_block_number("hook", 5), "Linear takes no argument 'hook'"),
    (set_tensor("bridge/scale", torch.tensor(1.0)), "tensor 'bridge/mean_proxy' is missing"),
])
def test_a_proxy_that_lies(folder, change, message):
    # of its own statistics nothing is left to find, where the change is to be found in a tensor of the original
    rewrite(folder, "proxy_01.safetensors", change)
    if "should be that of 'proxy_01" in message:
        rewrite(folder, "proxy_01.safetensors", lambda tensors, description, content: tensors.pop("block.1.running_mean"))
    refused(folder, message, "proxy_01.safetensors")


@pytest.mark.parametrize("key, tensor, message", [
    ("bridge/left", torch.full((4, 2), float("nan")), "tensor 'bridge/left' has values that are not finite"),
    ("bridge/left", torch.ones(5, 2), r"tensor 'bridge/left' must be float32 of shape \[4, 2\], and is torch.float32 of shape \[5, 2\]"),
    ("bridge/right", torch.ones(3, 4), r"tensor 'bridge/right' must be float32 of shape \[2, 4\]"),
    ("bridge/right", torch.ones(2, 4).double(), r"tensor 'bridge/right' must be float32 .* is torch.float64"),
    ("bridge/scale", torch.ones(1), r"tensor 'bridge/scale' must be float32 of shape \[\]"),
    ("bridge/left", torch.tensor(1.0), r"tensor 'bridge/left' must be float32 of shape \[4, 0\]"),
    ("bridge/extra", torch.ones(1), "tensor 'bridge/extra' belongs to no bridge map"),
])
def test_a_bridge_map_that_lies(folder, key, tensor, message):
    rewrite(folder, "proxy_02.safetensors", set_tensor(key, tensor))
    refused(folder, message, "proxy_02.safetensors")


def test_an_order_that_lies(tiny, tmp_path):
    structure = structure_of(tiny)
    order = tensor_cuts(structure, {"block.0": list(reversed(range(16)))})
    write_proxy_set(tmp_path / "set", tiny, [], order=order)
    path = tmp_path / "set" / "order.safetensors"
    tensors, metadata = read_safetensors(path)

    def put(tensors, metadata):
        write_safetensors(path, tensors, metadata)
        change_manifest(path.parent, lambda manifest: manifest["order"].update(sha256=sha256_of_file(path), bytes=path.stat().st_size))

    put({"positions/0": tensors["positions/0"][:4]}, metadata)
    refused(path.parent, r"order of 'block.0.bias': 4 positions on axis 0, which has 16", path.name)
    put({"positions/0": tensors["positions/0"], "more": torch.ones(1)}, metadata)
    refused(path.parent, "tensor 'more' is no list of positions", path.name)
    put(tensors, {"order": "{"})
    refused(path.parent, "its order is no JSON", path.name)
    put(tensors, {})
    refused(path.parent, "cuts=None must be an object of tensors", path.name)


def test_a_network_file_is_no_proxy(folder, tiny):
    path = folder / "proxy_01.safetensors"
    shutil.copy(str(folder / "policy.safetensors"), str(path))
    change_manifest(folder, lambda manifest: manifest["proxies"][0].update(sha256=sha256_of_file(path), bytes=path.stat().st_size))
    refused(folder, "is not a piebridge-proxy; give a proxy of a set, made by piebridge forge", path.name)
