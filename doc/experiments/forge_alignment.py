"""What each kind of alignment buys: cosine and relative error at the head's tap of held-out images, and the seconds it takes.

    python doc/experiments/forge_alignment.py [DATA [IMAGES [share[@pixels] ...]]]
                                      default Openclipart 256 0.9 0.76 0.6 0.45 0.3 0.6@192 0.6@160 1@160

EfficientNet-Lite0 with ImageNet weights, training images without labels: IMAGES of them to fit on, half as many held out. A share is of
the MACs, by pruning.
"""

import sys
import time

import torch
from features import images, open_part, original

from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.network import GraphNetwork
from piebridge.forge.alignment import measure_alignment
from piebridge.forge.block_regression import RegressionSettings, regress_blocks
from piebridge.forge.nested_levels import nested_levels
from piebridge.forge.pruning import prune, tensor_cuts
from piebridge.forge.reconstruction import ReconstructionSettings, reconstruct
from piebridge.forge.scores import taylor_scores
from piebridge.forge.structure import structure_of

SCORED = 48  # images
DEFAULT = ("0.9", "0.76", "0.6", "0.45", "0.3", "0.6@192", "0.6@160", "1@160")


class Data:
    """Pairs of batches of the fitted and of the held-out images, at two sizes."""

    def __init__(self, network, samples, pixels):
        native, count = network.description["input_size"][-1], len(samples) * 2 // 3
        self.fitted, self.held_out = (self._pairs(network, part, {native, pixels}) for part in (samples[:count], samples[count:]))

    @staticmethod
    def _pairs(network, samples, sizes):
        at_size = [images(network, samples, size).contiguous(memory_format=torch.channels_last) for size in sorted(sizes, reverse=True)]
        batches = [each.split(32) for each in at_size]
        return list(zip(batches[0], batches[-1]))


def copy_of(network):
    return GraphNetwork(network.description, {key: tensor.clone() for key, tensor in network.state_dict().items()}).eval()


def report(name, network, proxy, data, seconds):
    with torch.no_grad():
        features = [torch.cat([each.features(pair[place]) for pair in data.fitted]).numpy() for place, each in ((1, proxy), (0, network))]
    bridge, _ = fit_bridge_map(*features)
    tap = network.description["tap"]
    raw, bridged = (measure_alignment(network, proxy, data.held_out, each)[tap] for each in (None, bridge))
    print(f"{name:42s} cosine {raw['cosine']:.4f} bridged {bridged['cosine']:.4f}   relative error {raw['relative_error']:.4f} "
          f"bridged {bridged['relative_error']:.4f}   {seconds:.1f} s", flush=True)


def timed(work, *arguments, **options):
    start = time.perf_counter()
    work(*arguments, **options)
    return time.perf_counter() - start


def main(data="Openclipart", count="256", *wanted):
    network, samples = original(), open_part(data, "train")[:int(count) * 3 // 2]
    structure = structure_of(network)
    native = structure.input_size[-1]
    scores = None
    for text in wanted or DEFAULT:
        share, _, pixels = text.partition("@")
        data = Data(network, samples, int(pixels or native))
        if scores is None:
            scores = taylor_scores(network, structure, torch.cat([pair[0] for pair in data.fitted])[:SCORED].split(16))
        kept = nested_levels(structure, scores, 1, float(share))[1].kept if float(share) < 1 else {}
        cuts = tensor_cuts(structure, kept)
        plain = copy_of(prune(network, kept, structure))
        report(f"{text} pruned", network, plain, data, 0.0)
        variants = {"statistics": ReconstructionSettings(penalties=()), "closed form": ReconstructionSettings(redoes_statistics=False),
                    "statistics and closed form": ReconstructionSettings()}
        for name, settings in variants.items():
            proxy = copy_of(plain)
            seconds = timed(reconstruct, network, proxy, data.fitted, settings, cuts)
            report(f"{text} {name}", network, proxy, data, seconds)
        seconds = timed(regress_blocks, network, proxy, data.fitted, RegressionSettings())
        report(f"{text} ... and block-wise regression", network, proxy, data, seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
