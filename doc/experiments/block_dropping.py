"""Which blocks to drop: by how little they change their input, or by how well the rest makes up for them; what is left, held out.

    python doc/experiments/block_dropping.py [DATA [IMAGES]]        default Openclipart 128, held out; three minutes on two cores
"""

import sys
import time

import numpy as np
import torch
from features import images, open_part, original

from piebridge.core.costs import network_costs
from piebridge.core.proxies import blocks_to_drop
from piebridge.forge.dropping import drop_order, recover

MOST, FITTED = 3, 48


def features(network, batch):
    with torch.no_grad():
        return torch.cat([network.features(piece) for piece in batch.split(32)]).numpy()


def row(rule, network, blocks, fitted, held_out, wanted, costs):
    recovery = recover(network, blocks, fitted)
    found = recovery.bridge(features(recovery.network, held_out))
    error = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    cosine = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
    saved = sum(costs["blocks"][block] for block in blocks) / costs["macs"]
    print(f"{len(blocks)} dropped, {rule:22s} error {error.mean():.3f}  cosine {cosine.mean():.4f}  saves {100 * saved:4.1f} % of MACs  "
          f"{', '.join(blocks)}", flush=True)


def main(data="Openclipart", count="128"):
    network, samples = original(), open_part(data, "train")
    fitted, held_out = images(network, samples[:FITTED]), images(network, samples[2 * FITTED:2 * FITTED + int(count)])
    wanted, costs = features(network, held_out), network_costs(network)
    droppable = [block["name"] for block in network.description["blocks"] if block["is_residual"]]
    orders = {"changes least": blocks_to_drop(network, MOST, fitted)}
    for rule, savings in (("recovered best", dict.fromkeys(droppable, 1)), ("recovered best per MAC", None)):
        start = time.perf_counter()
        orders[rule] = [drop.block for drop in drop_order(network, fitted, MOST, savings)]
        print(f"{rule}: chosen in {time.perf_counter() - start:.0f} s", flush=True)
    for count in range(1, MOST + 1):
        for rule, order in orders.items():
            row(rule, network, order[:count], fitted, held_out, wanted, costs)


if __name__ == "__main__":
    main(*sys.argv[1:])
