"""Run by Python 3.6: read a proxy set with piebridge.core alone, and write what its networks make of given arrays.

    python read_set.py SET INPUTS.npz OUTPUTS.npz
"""

import sys

import numpy as np
import torch

from piebridge.core.network_file import load_network_file
from piebridge.core.policy import PolicyRouter
from piebridge.core.proxy_set import load_proxy_set


def outputs_of(folder, inputs):
    """{name: array} for inputs {"images", "policy images", one by each proxy's name}, float32 [N, 3, S, S] each."""
    inputs = {name: torch.from_numpy(array) for name, array in inputs.items()}
    proxy_set = load_proxy_set(folder)
    with torch.no_grad():
        found = {"logits": proxy_set.original(inputs["images"]).numpy(), "features": proxy_set.original.features(inputs["images"]).numpy(),
                 "network file": load_network_file(proxy_set.folder / "original.safetensors")(inputs["images"]).numpy()}
        for proxy in proxy_set.proxies:
            features = proxy.network.features(inputs[proxy.name]).numpy()
            found[proxy.name] = features
            found[proxy.name + " bridged"] = proxy.bridge(features)
        router = PolicyRouter(proxy_set.policy, len(proxy_set.proxies) + 1)
        found["policy"] = proxy_set.policy(inputs["policy images"]).numpy()
        found["policy levels"] = router(inputs["policy images"])
    predicted = proxy_set.predictor(found[proxy_set.proxies[-1].name + " bridged"])
    found["bounds"] = proxy_set.predictor.bound(predicted, 0.1)
    return found


def main(folder, inputs, outputs):
    np.savez(outputs, **outputs_of(folder, dict(np.load(inputs))))
    assert not [name for name in sys.modules if name.startswith("piebridge.forge")]


if __name__ == "__main__":
    main(*sys.argv[1:])
