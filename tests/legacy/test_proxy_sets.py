"""Proxy sets and network files that current torch writes give the same outputs on Python 3.6 with torch 1.10."""

from pathlib import Path

import numpy as np
import pytest
import torch
from read_set import outputs_of

from piebridge.core.bridge_map import BridgeMap
from piebridge.core.difficulty import fit_residual_predictor
from piebridge.core.networks import load_network
from piebridge.core.proxy_set import Proxy, write_proxy_set
from piebridge.forge import in_nested_order, nested_levels, nested_order, prune, structure_of, tensor_cuts
from piebridge.forge.policy_network import make_policy

pytestmark = pytest.mark.usefixtures("one_thread")

# of each network: pixels of its second level (a transformer has positions for one size only)
NETWORKS = {"efficientnet_lite0": 160, "mobilenet_v3_large": 160, "resnet50": 160, "vit_b_16": 224}
IMAGES = 2


def random_bridge(random, width, rank=8):
    arrays = [random.randn(*shape).astype(np.float32) / 10 for shape in ((width,), (width,), (width, rank), (rank, width))]
    return BridgeMap(np.float32(0.9), *arrays)


def write_set(folder, name):
    """Two pruned levels of random weights, nested, each with a bridge map, a policy and a predictor; the inputs of its networks."""
    random, generator = np.random.RandomState(0), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    original = load_network(name, is_pretrained=False)
    structure, width = structure_of(original), original.head.in_features
    scores = {key: torch.rand(group.size, generator=generator) for key, group in structure.groups.items()}
    levels = nested_levels(structure, scores, count=2, narrowest=0.5)
    proxies = [Proxy(f"p{level.number}", prune(original, level.kept, structure), size, bridge=random_bridge(random, width), kept=level.kept,
                     cuts=tensor_cuts(structure, level.kept))
               for level, size in zip(in_nested_order(structure, levels)[1:], (224, NETWORKS[name]))]
    policy = make_policy(original, len(levels))
    predictor, _ = fit_residual_predictor(random.randn(12, width), random.rand(12, 2))
    order = tensor_cuts(structure, nested_order(structure, levels))
    write_proxy_set(folder, original, proxies, policy=policy, predictor=predictor, order=order)
    sizes = {"images": 224, "policy images": policy.description["input_size"][-1], **{proxy.name: proxy.resolution for proxy in proxies}}
    return {key: random.randn(IMAGES, 3, size, size).astype(np.float32) for key, size in sizes.items()}


@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_set_gives_the_same_outputs(legacy_python, name, tmp_path):
    inputs = write_set(tmp_path / "set", name)
    np.savez(str(tmp_path / "inputs.npz"), **inputs)
    script = Path(__file__).with_name("read_set.py")
    legacy_python(script, tmp_path / "set", tmp_path / "inputs.npz", tmp_path / "outputs.npz")
    found, wanted = dict(np.load(str(tmp_path / "outputs.npz"))), outputs_of(tmp_path / "set", inputs)
    assert set(found) == set(wanted) and len(found) == 10
    for key, array in wanted.items():
        assert np.isfinite(array).all(), key
        assert np.abs(found[key] - array).max() <= 1e-5 * np.abs(array).max(), key
