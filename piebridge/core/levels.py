"""Which proxies pay on this device, for this network and these images: made, bridged, measured, kept or left."""

import logging
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from piebridge.core import backends
from piebridge.core.backends import device_profile
from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.device import describe_device
from piebridge.core.packages import package_version
from piebridge.core.proxies import CostModel, expected_milliseconds, make_proxy, match_batch_norm
from piebridge.core.proxy_specs import parse_spec
from piebridge.core.router import ResidualRouter, fit_residual_predictor, is_bounded
from piebridge.core.sources import Level

LOG = logging.getLogger(__name__)
BUILD_SECONDS = 0.3  # building and compiling one more network, measured on two x86 cores
UNMEASURED_MILLISECONDS = 10.0  # one forward of the original where the backend was configured and so never timed
# router: whether a sample may use the level; cost: ms of one forward; share: of the calibration images that may use it
Candidate = namedtuple("Candidate", "level router cost share")


class Proxies:
    """Makes, bridges and measures proxies on a few unlabelled training images, and keeps those that pay.

    `levels`: the proxies kept, dearest first. `calibration`: the samples used; their features come from the original.
    """

    def __init__(self, part):
        self.part, self.work, self.settings = part, part.work, part.config.proxies
        self._kept, self._notes = [], []
        self._costs = CostModel(self.work.network)
        self.calibration = part.calibration
        self.calibration_cache = None
        self._readable = []  # of the calibration images
        self._milliseconds = self.work.decisions.values["backend"].get("milliseconds") or UNMEASURED_MILLISECONDS
        decided = self.work.decisions.values.get("proxies")
        router = part.config.router
        can_serve = router.kind.startswith("level:") or is_bounded(len(self.calibration), router.delta)
        for spec in sorted({parse_spec(text) for text in self.settings.levels if can_serve}, key=self._faithful_first):
            if (str(spec) in decided["levels"]) if decided else self._is_promising(spec):
                self._consider(spec, is_kept=bool(decided) or self.settings.use == "all")
        decided = self.work.decisions.decide("proxies", lambda: {
            "levels": [level.name for level in self.levels], "reason": "; ".join(self._notes),
            "predicted_frozen_seconds": round(self._calibration_seconds() + self._seconds(self._kept), 3)})
        LOG.info("proxies: %s", ", ".join(decided["levels"]) or "none pays here")
        LOG.debug("why: %s", decided["reason"])

    @property
    def levels(self):
        return [candidate.level for candidate in self._kept]

    def accepted(self, number, caches, indices):
        """The samples of `indices` that level `number` may serve; `caches` has their features: {level: cache}, this and cheaper ones."""
        kind = self.part.config.router.kind
        if not indices:
            return []
        if kind.startswith("level:"):
            return list(indices) if number == min(int(kind[len("level:"):]), len(self._kept)) else []
        if kind == "random":
            return self._by_lot(number, caches, indices)
        return self._within_tolerance(number, caches, indices)

    def _within_tolerance(self, number, caches, indices):
        router, cache = self._kept[number - 1].router, caches[number]
        pieces = [indices[start:start + 512] for start in range(0, len(indices), 512)]
        return [index for piece in pieces for index, level in zip(piece, router(cache.read(piece))) if level]

    def _by_lot(self, number, caches, indices):
        """As many as the residual router would take here, so that both cost the same: its share is seen on those of the samples
        that it, too, would not have given a cheaper level."""
        left = indices
        for cheaper in range(len(self._kept), number, -1):
            taken = set(self._within_tolerance(cheaper, caches, left))
            left = [index for index in left if index not in taken]
        share = len(self._within_tolerance(number, caches, left)) / len(left) if left else self._kept[number - 1].share
        random = np.random.RandomState((self.part.config.seed * 1000 + number) % 2 ** 32)
        chosen = random.permutation(len(indices))[:int(round(share * len(indices)))]
        return sorted(np.asarray(indices)[chosen].tolist())

    def _faithful_first(self, spec):
        return -spec.resolution, spec.dropped, spec.precision != "int8"

    def _cost(self, spec):
        """Expected ms of one forward, before it is measured."""
        return self._costs.share(spec) * self._milliseconds

    def _is_promising(self, spec):
        """Whether a level is worth making: predicted from its cost, and from half of the samples that the best level so far serves."""
        if self.settings.use == "all":
            return True
        share = 0.5 * max(candidate.share for candidate in self._kept) if self._kept else 1.0
        saved = self._seconds(self._kept) - self._seconds(self._kept + [Candidate(None, None, self._cost(spec), share)])
        price = BUILD_SECONDS + len(self.calibration) * self._cost(spec) / 1000
        if saved <= price:
            self._notes.append(f"{spec} not made: predicted to save {saved:.2f} s for {price:.2f} s")
        return saved > price

    def _consider(self, spec, is_kept):
        self.work.interrupt.check()
        # int8 is built by one thread of OpenVINO's, while the original serves the calibration images; torch must not be disturbed so
        with ThreadPoolExecutor(1) as aside:
            building = aside.submit(self._segment, spec, self.work.network) if spec.precision == "int8" and not spec.dropped else None
            original = self._original_features()
        if len(original) < 2:
            self._notes.append(f"{spec} left out: fewer than two calibration images can be read")
            return
        try:
            with self.work.clock.phase("proxies"):
                segment = building.result() if building else self._segment(spec, self._proxy(spec))
                level, router, residuals, share, cost = self._bridged(spec, segment, original)
        except backends.Unsupported as reason:
            self._notes.append(f"{spec} left out: {reason}")
            return
        candidate = Candidate(level, router, cost, share)
        saved = self._seconds(self._kept) - self._seconds(self._kept + [candidate])
        if is_kept or saved > 0:
            self._kept = _dearest_first(self._kept + [candidate])
        self._notes.append(f"{spec} {'kept' if is_kept or saved > 0 else 'dropped'}: median residual {np.median(residuals):.3f}, "
                           f"within the tolerance for {100 * share:.0f} %, {cost:.3g} ms per image, predicted to save {saved:.2f} s")

    def _proxy(self, spec):
        """The network of a level; lower resolution and int8 leave it as it is."""
        network, sizes = self.work.network, [self.part.native, spec.resolution]
        if not spec.dropped:
            return network
        images, proxy_images = [tensor.to(self.work.device) for tensor in
                                next(self.part.loader(sizes).batches([self._readable], self.work.view_seed(0)))[1]]
        proxy = make_proxy(network, spec, images)
        match_batch_norm(network, proxy, images, proxy_images)
        return proxy

    def _segment(self, spec, network):
        return self.part.segment(network, spec.resolution, spec.precision)

    def _bridged(self, spec, segment, original):
        """(Level, ResidualRouter, residuals of the calibration images, share of them that the level may serve, ms per image).

        original: features of the calibration images, [N, D].
        """
        part, view_seed = self.part, self.work.view_seed(0)
        loader = part.loader(spec.resolution)
        pieces, milliseconds = [], []
        chunks = [self._readable[start:start + part.batch_size] for start in range(0, len(self._readable), part.batch_size)]
        for _, images in loader.batches(chunks, view_seed):
            start = time.perf_counter()
            pieces.append(segment(images).cpu().numpy())
            milliseconds.append(1000 * (time.perf_counter() - start) / len(images))
        features = np.concatenate(pieces)
        bridge, residuals = fit_bridge_map(features, original)
        cost = self._remembered(spec, min(milliseconds))  # the first call, and whatever else runs, can only make one longer
        predictor, predicted = fit_residual_predictor(bridge(features), residuals)
        router = ResidualRouter(predictor, part.config.router.tolerance, part.config.router.delta)
        return Level(str(spec), loader, segment, bridge), router, residuals, float((router.levels(predicted) > 0).mean()), cost

    def _remembered(self, spec, milliseconds):
        """The level's cost as this device measured it first, so that another run decides alike."""
        key = {"level": str(spec), "network": self.work.fingerprint, "batch_size": self.part.batch_size,
               "backend": self.work.decisions.values["backend"]["backend"], "device": describe_device(self.work.device),
               "versions": [package_version(name) for name in ("torch", "openvino")]}
        recalled = device_profile.recall(key)
        if not isinstance(recalled, float):
            recalled = round(milliseconds, 4)
            device_profile.remember(key, recalled)
        return recalled

    def _original_features(self):
        if self.calibration_cache is None:
            self.calibration_cache = self.part.filled(self.part.original, "calibration", self.calibration)
            self._readable = self.calibration_cache.present()
        return self.calibration_cache.read(self._readable)

    def _seconds(self, candidates):
        """Expected seconds in frozen networks, for all samples but the calibration's."""
        ordered = _dearest_first(candidates)
        passes = 1 if self.part.is_cached else self.part.config.epochs
        milliseconds = expected_milliseconds([each.cost for each in ordered], [each.share for each in ordered],
                                             self._milliseconds, passes)
        return (self.part.count - len(self.calibration)) * milliseconds / 1000

    def _calibration_seconds(self):
        """Of the frozen forwards that the calibration took."""
        forwards = self._milliseconds + sum(candidate.cost for candidate in self._kept) if self._kept else 0.0
        return len(self.calibration) * forwards / 1000


def _dearest_first(candidates):
    return sorted(candidates, key=lambda candidate: -candidate.cost)
