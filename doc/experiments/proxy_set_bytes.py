"""What a set of pruned proxies costs on disk and in memory, against its original alone; weights and scores are random.

    python doc/experiments/proxy_set_bytes.py [NETWORK [LEVELS [NARROWEST]]]    default efficientnet_lite0 10 0.3; seconds
"""

import sys
import tempfile
from pathlib import Path

import torch

from piebridge.core.networks import load_network
from piebridge.core.proxy_set import Proxy, load_proxy_set, write_proxy_set
from piebridge.forge import in_nested_order, nested_levels, nested_order, prune, structure_of, tensor_cuts


def memory(networks):
    """Bytes of the storages that the networks' tensors lie in, each counted once."""
    storages = {}
    for network in networks:
        for tensor in network.state_dict().values():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def main(name="efficientnet_lite0", count="10", narrowest="0.3"):
    network = load_network(name, is_pretrained=False)
    structure = structure_of(network)
    generator = torch.Generator().manual_seed(0)
    scores = {group.name: torch.rand(group.size, generator=generator) for group in structure.groups.values()}
    levels = nested_levels(structure, scores, int(count), float(narrowest))
    order = tensor_cuts(structure, nested_order(structure, levels))
    proxies = [Proxy(f"level_{level.number}", prune(network, level.kept, structure), structure.input_size[1], kept=level.kept,
                     cuts=tensor_cuts(structure, level.kept)) for level in in_nested_order(structure, levels)[1:]]
    alone = memory([network])
    print(f"{name}, {len(proxies)} levels down to {narrowest} of its MACs; ratios to the original alone")
    print(f"memory, each network by itself    {memory([network] + [proxy.network for proxy in proxies]) / alone:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        write_proxy_set(folder, network, proxies, order=order)
        sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
        print(f"disk, the set                     {sum(sizes.values()) / sizes['original.safetensors']:.3f}")
        for is_reordered, text in ((False, "own order, a nested copy"), (True, "nested order alone      ")):
            loaded = load_proxy_set(folder, is_reordered)
            total = memory([loaded.original] + [proxy.network for proxy in loaded.proxies])
            print(f"memory, {text}  {total / alone:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
