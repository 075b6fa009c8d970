"""Proxy sets of every family: each level comes back as it was pruned, level 0 bit for bit, and memory and disk are shared."""

import pytest
import torch
from forge_examples import random_tensors

from piebridge.core.capture import capture
from piebridge.core.descriptions import read_description
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.network_file import load_network_file
from piebridge.core.proxy_set import Proxy, load_proxy_set, write_proxy_set
from piebridge.core.safetensors_file import read_header
from piebridge.core.slices import cut
from piebridge.forge import in_nested_order, nested_levels, nested_order, prune, structure_of, tensor_cuts

pytestmark = pytest.mark.usefixtures("one_thread")

models = pytest.importorskip("torchvision.models")
timm = pytest.importorskip("timm")
HALVES = ([0.5] * 3, [0.5] * 3)


def with_random_weights(description):
    return GraphNetwork(description, random_tensors(expected_shapes(description), dtype=torch.float32)).eval()


def small_vit():
    return models.VisionTransformer(32, 8, num_layers=3, num_heads=6, hidden_dim=96, mlp_dim=192, num_classes=5)


def small_deit():
    return timm.create_model("deit_base_distilled_patch16_224", img_size=32, patch_size=8, depth=3, num_heads=4, embed_dim=64,
                             num_classes=5)


# of each name: what gives the description, and the pixels of the images
FAMILIES = {
    "efficientnet_lite0": (lambda: read_description("efficientnet_lite0"), 64),
    "mobilenet_v3_large": (lambda: read_description("mobilenet_v3_large"), 64),
    "resnet50": (lambda: read_description("resnet50"), 64),
    "vit": (lambda: capture(small_vit(), "vit", [3, 32, 32], *HALVES).description, 32),
    "deit": (lambda: capture(small_deit(), "deit", [3, 32, 32], *HALVES).description, 32),
}


class Forged:
    """A family's original and a set of it: three pruned proxies in nested order, on disk."""

    def __init__(self, name, folder):
        describe, self.size = FAMILIES[name]
        self.original = with_random_weights(describe())
        self.structure = structure_of(self.original, self.size)
        generator = torch.Generator().manual_seed(1)
        scores = {name: torch.rand(group.size, generator=generator) for name, group in self.structure.groups.items()}
        levels = nested_levels(self.structure, scores, count=3, narrowest=0.5)
        self.order = tensor_cuts(self.structure, nested_order(self.structure, levels))
        self.levels = in_nested_order(self.structure, levels)
        self.pruned = [prune(self.original, level.kept, self.structure) for level in self.levels[1:]]
        proxies = [Proxy(f"p{level.number}", network, self.size, kept=level.kept, cuts=tensor_cuts(self.structure, level.kept),
                         facts={"macs": level.macs}) for level, network in zip(self.levels[1:], self.pruned)]
        write_proxy_set(folder, self.original, proxies, {"images": 3}, order=self.order)
        self.folder = folder
        self.images = torch.randn(2, 3, self.size, self.size, generator=generator)


@pytest.fixture(scope="module", params=list(FAMILIES))
def forged(request, tmp_path_factory):
    return Forged(request.param, tmp_path_factory.mktemp(request.param) / "set")


def in_double(network):
    tensors = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in network.state_dict().items()}
    return GraphNetwork(network.description, tensors).eval()


def memory(networks):
    """{address: bytes} of what the networks' tensors lie in, each once."""
    found = {}
    for network in networks:
        for tensor in list(network.parameters()) + list(network.buffers()):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def test_level_0_is_the_original_bit_for_bit(forged):
    loaded = load_proxy_set(forged.folder)
    assert loaded.original.fingerprint() == forged.original.fingerprint() == loaded.manifest["original"]["fingerprint"]
    with torch.no_grad():
        assert torch.equal(loaded.original(forged.images), forged.original(forged.images))
    alone = load_network_file(forged.folder / "original.safetensors")
    assert alone.fingerprint() == forged.original.fingerprint()


def test_every_level_keeps_every_tap_and_comes_back_as_pruned(forged):
    loaded = load_proxy_set(forged.folder)
    taps = [block.tap for block in forged.structure.blocks]
    with torch.no_grad():
        wanted = {key: value.shape for key, value in loaded.original.values(forged.images[:1], taps).items()}
    assert [proxy.name for proxy in loaded.proxies] == ["p1", "p2", "p3"]
    for proxy, pruned, level, entry in zip(loaded.proxies, forged.pruned, forged.levels[1:], loaded.manifest["proxies"]):
        assert proxy.network.description == pruned.description and not proxy.network.training
        assert {group: tuple(indices) for group, indices in proxy.kept.items()} == level.kept
        assert proxy.cuts == tensor_cuts(forged.structure, level.kept)
        assert (proxy.resolution, proxy.precision, proxy.bridge, proxy.facts) == (forged.size, "float", None, {"macs": level.macs})
        assert entry["macs"] == level.macs
        assert proxy.network.fingerprint() == pruned.fingerprint()
        with torch.no_grad():
            assert {key: value.shape for key, value in proxy.network.values(forged.images[:1], taps).items()} == wanted
            torch.testing.assert_close(proxy.network.features(forged.images), pruned.features(forged.images))


def test_a_set_costs_little_more_than_the_original_on_disk(forged):
    sizes = {path.name: path.stat().st_size for path in forged.folder.iterdir()}
    original = sizes.pop("original.safetensors")
    tensors = {name: read_header(forged.folder / name).entries for name in sizes if name.endswith(".safetensors")}
    assert all(name.startswith("positions/") for entries in tensors.values() for name in entries)
    if original > 10 << 20:  # the descriptions' JSON counts in a small network
        assert sum(sizes.values()) < 0.05 * original


def test_proxies_share_memory_with_the_original(forged):
    loaded = load_proxy_set(forged.folder)
    own = dict(loaded.original.named_parameters())
    for proxy in loaded.proxies:
        for key, parameter in proxy.network.named_parameters():
            assert (parameter is own[key]) == (key not in proxy.cuts)
    joint = [key for key in own if key.rpartition(".")[2].startswith("in_proj") or ".qkv." in key]  # three prefixes, which no view is
    proxies = memory(proxy.network for proxy in loaded.proxies)
    copies = sum(dict(proxy.network.named_parameters())[key].numel() * 4 for proxy in loaded.proxies for key in joint if key in proxy.cuts)
    buffers = sum(buffer.numel() * buffer.element_size() for proxy in loaded.proxies for buffer in proxy.network.buffers())
    nested = sum(own[key].numel() * 4 for key in forged.order if key in own and key not in joint)
    whole = sum(size for address, size in memory([loaded.original]).items() if address in proxies)
    assert sum(proxies.values()) - whole <= nested + copies + buffers


def test_without_a_second_order_the_original_is_all_there_is(forged):
    loaded = load_proxy_set(forged.folder, is_reordered=True)
    assert loaded.original.fingerprint() != forged.original.fingerprint()
    with torch.no_grad():
        found, wanted = (in_double(network)(forged.images[:1, :, :32, :32].double()) for network in (loaded.original, forged.original))
    assert (found - wanted).abs().max() < 1e-9 * wanted.abs().max()  # other sums, rounded otherwise
    for proxy, pruned in zip(loaded.proxies, forged.pruned):
        assert proxy.network.fingerprint() == pruned.fingerprint()
        for key, tensor in loaded.original.state_dict().items():
            assert torch.equal(cut(tensor, proxy.cuts.get(key, [])), proxy.network.state_dict()[key])
    one = memory([loaded.original])
    for proxy in loaded.proxies:
        for key, parameter in proxy.network.named_parameters():
            is_joint = key.rpartition(".")[2].startswith("in_proj") or ".qkv." in key
            assert is_joint or parameter.untyped_storage().data_ptr() in one, key
    assert loaded.in_own_order(loaded.original).fingerprint() == forged.original.fingerprint()  # undone, bit for bit
    own = load_proxy_set(forged.folder)
    assert own.in_own_order(own.original) is own.original
