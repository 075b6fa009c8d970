"""What proxies leave at the head's tap: relative error raw and after the bridge map, cosine, with statistics kept and redone.

    python doc/experiments/proxy_alignment.py [DATA]        default Openclipart; two minutes on two cores
"""

import sys

import numpy as np
from features import features, images, open_part, original

from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.proxies import make_proxy, match_batch_norm, parse_spec

FITTED, HELD_OUT = 96, 264
PROXIES = ("224px-int8", "192px", "192px-int8", "160px", "160px-int8", "128px", "96px", "224px-drop1", "224px-drop2", "224px-drop3")


def relative(found, wanted):
    return np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)


def row(name, found, wanted):
    bridge, residuals = fit_bridge_map(found[:FITTED], wanted[:FITTED])
    moved, wanted_out = bridge(found[FITTED:]), wanted[FITTED:]
    cosine = (moved * wanted_out).sum(1) / np.linalg.norm(moved, axis=1) / np.linalg.norm(wanted_out, axis=1)
    print(f"{name:28s} raw {relative(found[FITTED:], wanted_out).mean():.3f}  bridged {relative(moved, wanted_out).mean():.3f}  "
          f"(leave-one-out {residuals.mean():.3f})  cosine {cosine.mean():.3f}", flush=True)


def main(data="Openclipart"):
    network = original()
    samples = open_part(data, "train")[:FITTED + HELD_OUT]
    wanted = features(network, samples)
    for text in PROXIES:
        spec = parse_spec(text)
        calibration = images(network, samples[:FITTED])
        proxy = make_proxy(network, spec, calibration)
        backend = "openvino_int8" if spec.precision == "int8" else "openvino"
        row(text, features(proxy, samples, spec.resolution, backend), wanted)
        if spec.precision == "float":
            proxy = network.without_blocks([]) if not spec.dropped else proxy
            match_batch_norm(network, proxy, calibration, images(network, samples[:FITTED], spec.resolution))
            row(text + ", statistics redone", features(proxy.eval(), samples, spec.resolution), wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
