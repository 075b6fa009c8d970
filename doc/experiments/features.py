"""Features of a data set through the original and through proxies: what the experiments beside this file start from."""

from types import SimpleNamespace

import numpy as np
import torch

from piebridge.core import backends
from piebridge.core.dataset import open_dataset
from piebridge.core.loader import ImageLoader
from piebridge.core.networks import load_network
from piebridge.core.transforms import Transform

BATCH = 8


def open_part(data, part):
    """Samples of `train`, `val` or `test` of a set, split as the runs split it; a shuffled copy, the same each time."""
    samples = getattr(open_dataset(data, SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=0)), part)
    return [samples[index] for index in np.random.RandomState(0).permutation(len(samples))]


def images(network, samples, size=224):
    """float32 [N, 3, size, size], normalised."""
    loader = ImageLoader(samples, Transform.for_network(network.description, size=size))
    _, batch = next(iter(loader.batches([list(range(len(samples)))])))
    return batch


def features(network, samples, size=224, backend="openvino"):
    """float32 [N, D] at the head's tap."""
    segment = backends.build_segment(backend, network, size, BATCH)
    with torch.no_grad():
        return np.concatenate([segment(piece).numpy() for piece in images(network, samples, size).split(BATCH)])


def original():
    return load_network("efficientnet_lite0")
