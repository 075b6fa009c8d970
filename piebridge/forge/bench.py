"""Candidates tried out: features on the fastest backend, the bridge map, milliseconds, and what is left at the head's tap."""

import logging
import time
from dataclasses import dataclass

import numpy as np

from piebridge.core import backends
from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.errors import UserError

LOG = logging.getLogger(__name__)
LEAST_CALLS = 20  # timed, of each network
BRIDGE_RANK = 64  # of a stored map; a full one of 512 images would be as large as a third of EfficientNet-Lite0


@dataclass(frozen=True)
class Trial:
    """A network tried out. milliseconds: median of one image's forward; iqr: its interquartile range; repeats: calls that were timed.

    before, after the bridge map, on held-out images: (mean relative error, mean cosine). fitted: features of the images that the map
    was fitted on [N,D]; held_out: of the others [M,D]; bridged: the latter after the map.
    """

    milliseconds: float
    iqr: float
    repeats: int
    before: tuple
    after: tuple
    bridge: object
    fitted: np.ndarray
    held_out: np.ndarray
    bridged: np.ndarray


class Bench:
    """Runs networks on the forge's images, and compares them with the original. `original`: its own Trial."""

    def __init__(self, images, original, batch_size):
        self.images, self.batch_size = images, batch_size
        self.native = original.description["input_size"][-1]
        batch = next(images.batches(images.fitted[:batch_size], self.native))
        choice = backends.probe(original, batch, batch_size)
        self.backend = choice.backend
        segment = choice.segment or backends.build_segment(choice.backend, original, self.native, batch_size)
        fitted, held_out, times = self._features(segment, self.native)
        name = original.description["name"]
        if not (np.isfinite(fitted).all() and np.isfinite(held_out).all()):
            raise UserError(f"network {name}: its features are not finite; is the file whole?")
        if float(fitted.std(0).max()) <= 1e-6 * float(np.abs(fitted).max()):
            raise UserError(f"network {name}: gives the same features for all images; is it trained, are they alike?")
        self.original = Trial(*times, (0.0, 1.0), (0.0, 1.0), None, fitted, held_out, held_out)
        LOG.info("the original runs on %s, %.3g ms per image", self.backend, times[0])

    def try_out(self, network, resolution, precision):
        """The Trial of a network, or a text that says why there is none."""
        try:
            segment = backends.build_segment(self.backend_of(precision), network, resolution, self.batch_size)
            fitted, held_out, times = self._features(segment, resolution)
        except (UserError, RuntimeError) as reason:  # a resolution at which the network does not run, a backend without an operation
            return str(reason).splitlines()[0]
        if not (np.isfinite(fitted).all() and np.isfinite(held_out).all()):
            return "its features are not finite"
        return self.judge(times, fitted, held_out)

    def judge(self, times, fitted, held_out):
        """The Trial of a network's features of the fitted [N,D] and the held-out [M,D] images; times: (milliseconds, iqr, repeats)."""
        bridge = fit_bridge_map(fitted, self.original.fitted)[0].of_rank(BRIDGE_RANK)
        bridged, wanted = bridge(held_out), self.original.held_out
        return Trial(*times, alignment(held_out, wanted), alignment(bridged, wanted), bridge, fitted, held_out, bridged)

    def alignment_of(self, network, resolution, precision):
        """(mean relative error, mean cosine) of a network's features as they are, without a map, on the held-out images."""
        segment = backends.build_segment(self.backend_of(precision), network, resolution, self.batch_size)
        batches = self.images.batches(self.images.held_out, resolution, self.batch_size)
        return alignment(np.concatenate([segment(batch).numpy() for batch in batches]), self.original.held_out)

    def backend_of(self, precision):
        """Name of the backend that runs networks at a precision; Unsupported where there is none."""
        if precision == "int8":
            if backends.missing_packages(backends.INT8):
                raise backends.Unsupported("int8 runs on OpenVINO, which is not installed (pip install openvino)")
            return backends.INT8
        if precision == "bf16":
            return backends.bf16_backend(self.backend)
        return self.backend

    def _features(self, segment, size):
        """Features of the fitted [N,D] and the held-out [M,D] images, and (median ms per image, interquartile range, calls)."""
        order = self.images.held_out + self.images.fitted
        pieces, times, first = [], [], None
        for batch in self.images.batches(order, size, self.batch_size):
            first = batch if first is None else first
            pieces.append(_timed(segment, batch, times))
        times = times[1:-1]  # the first call warms up, the last batch may be smaller
        while len(times) < LEAST_CALLS:
            _timed(segment, first, times)
        features, count = np.concatenate(pieces), len(self.images.held_out)
        low, middle, high = np.percentile(times, (25, 50, 75))
        return features[count:], features[:count], (float(middle), float(high - low), len(times))


def cross_fitted(features, reference):
    """Features [N,D] as they are bridged where no map has seen them: each half by the map of the other."""
    moved = np.empty_like(features)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        other = slice(1 - half.start, None, 2)
        moved[half] = fit_bridge_map(features[other], reference[other])[0](features[half])
    return moved


def _timed(segment, batch, times):
    """Features of a batch as an array; the milliseconds per image are added to `times`."""
    start = time.perf_counter()
    features = segment(batch).numpy()
    times.append(1000 * (time.perf_counter() - start) / len(batch))
    return features


def alignment(features, reference):
    """(mean relative error, mean cosine) of features [N,D] against the original's."""
    norms = np.linalg.norm(reference, axis=1) + 1e-12
    error = np.linalg.norm(features - reference, axis=1) / norms
    cosine = (features * reference).sum(1) / norms / (np.linalg.norm(features, axis=1) + 1e-12)
    return float(error.mean()), float(cosine.mean())
