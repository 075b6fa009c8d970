"""The forge on a network with random weights: is the set whole, and do the features of pruned levels come nearer to the original's?

    python doc/experiments/forge_random.py NETWORK [key=value ...]      resnet50, mobilenet_v3_large, vit_b_16, ...; three minutes

Batch-norm statistics are those of the images, without which features of random weights are all alike. Images: the embedded set's.
The file of the network and the set go to proxynetworks/random_NETWORK; the settings of `piebridge forge` can be given.
"""

import shutil
import sys
import time
from pathlib import Path

import torch
from features import images, open_part
from torch import nn

from piebridge.core.costs import network_costs
from piebridge.core.network_file import save_network
from piebridge.core.networks import load_network
from piebridge.core.proxy_set import load_proxy_set
from piebridge.forge import forge
from piebridge.forge.text_table import text_table
from piebridge.forge_settings import forge_settings

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("levels=3", "least=0.95", "images=32", "held_out=16", "widths=2", "narrowest=0.5", "resolutions=224", "precisions=float",
            "drops=0", "policy_epochs=2")
HEADER = ("level", "MACs", "counted", "parameters", "own MB", "taps of equal shape", "cosine at the blocks", "aligned", "at the head",
          "aligned", "relative error", "aligned")


def random_network(name):
    torch.manual_seed(0)
    network = load_network(name, is_pretrained=False)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    if norms:
        with torch.no_grad():
            for batch in images(network, open_part("Clipart10", "train")[:32]).split(16):
                network.train()(batch)
    return network.eval()


def shapes(network, size, taps):
    with torch.no_grad():
        values = network.values(torch.zeros(1, 3, size, size), taps)
    return {tap: values[tap].shape for tap in taps}


def row(proxy, entry, whole, wanted, tap):
    macs = network_costs(proxy.network, [3, proxy.resolution, proxy.resolution])["macs"]
    found = shapes(proxy.network, proxy.resolution, list(wanted))
    before, after = (proxy.facts["alignment"][when] for when in ("before", "after"))
    blocks = [sum(each["cosine"] for name, each in measured.items() if name != tap) / max(len(measured) - 1, 1)
              for measured in (before, after)]
    parameters, equal = sum(each.numel() for each in proxy.network.parameters()), sum(found[name] == wanted[name] for name in wanted)
    figures = blocks + [each[tap][key] for key in ("cosine", "relative_error") for each in (before, after)]
    return (proxy.name, f"{100 * entry['macs'] / whole:.1f} %", "yes" if macs == entry["macs"] else f"NO: {macs}",
            f"{parameters / 1e6:.2f} M", f"{entry['bytes'] / 1e6:.1f}", f"{equal} of {len(wanted)}",
            *[f"{figure:.4f}" for figure in figures])


def main(name, *words):
    folder = ROOT / "proxynetworks" / f"random_{name}"
    path = folder.with_suffix(".safetensors")
    shutil.rmtree(str(folder), ignore_errors=True)
    save_network(random_network(name), path)
    start = time.perf_counter()
    given = dict(word.split("=", 1) for word in SETTINGS + words)
    forge(path, ROOT / "datasets" / "Clipart10", folder, forge_settings([f"{key}={text}" for key, text in given.items()]))
    seconds = time.perf_counter() - start
    proxy_set = load_proxy_set(folder)
    manifest, tap = proxy_set.manifest, proxy_set.original.description["tap"]
    taps = [block["output"] for block in proxy_set.original.description["blocks"]]
    wanted = shapes(proxy_set.original, manifest["facts"]["resolution"], taps)
    rows = [row(proxy, entry, manifest["original"]["macs"], wanted, tap) for proxy, entry in zip(proxy_set.proxies, manifest["proxies"])]
    print(f"{name}, random weights: {len(rows)} levels in {seconds:.0f} s; {', '.join(sorted(each.name for each in folder.iterdir()))}")
    print(text_table([HEADER] + rows, "left" + " right" * (len(HEADER) - 1)))


if __name__ == "__main__":
    main(*sys.argv[1:])
