"""Test accuracy of heads that were trained on one level of a proxy set alone, and then moved to the original.

    python doc/experiments/level_heads.py SET [DATA [SEEDS]]        default Openclipart, 3 seeds, at least 2; five minutes on two cores
"""

import statistics
import sys
import tempfile

import piebridge
from piebridge.core.proxy_set import load_proxy_set


def accuracy(data, seed, **overrides):
    with tempfile.TemporaryDirectory() as folder:
        result = piebridge.train(f"efficientnet_lite0/{data}/ours", seed=seed, output=folder + "/run", **overrides)
        return 100 * result.results["test_accuracy"]


def main(folder, data="Openclipart", seeds="3"):
    if int(seeds) < 2:
        sys.exit(__doc__)  # a deviation takes two
    proxy_set, seeds = load_proxy_set(folder), range(int(seeds))
    network = str(proxy_set.folder / "original.safetensors")
    whole = [accuracy(data, seed, network=network, router={"kind": "none"}) for seed in seeds]
    print("| level | cosine at the head's tap | test accuracy % | against the original's head |\n|---|---:|---:|---:|")
    print(f"| original | 1 | {statistics.mean(whole):.1f} ± {statistics.stdev(whole):.1f} | |", flush=True)
    for number, proxy in enumerate(proxy_set.proxies, start=1):
        found = [accuracy(data, seed, network=network, proxies={"set": str(folder)}, router={"kind": f"level:{number}"}) for seed in seeds]
        differences = [own - base for own, base in zip(found, whole)]
        cosine = proxy.facts["alignment"]["after"][proxy_set.manifest["facts"]["tap"]]["cosine"]
        print(f"| {proxy.name} | {cosine:.3f} | {statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} | "
              f"{statistics.mean(differences):+.1f} ± {statistics.stdev(differences):.1f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
