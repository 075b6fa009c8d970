"""Which proxies pay on this device, for this network and these images: made, bridged, measured, kept or left."""

import logging
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from piebridge.core import backends
from piebridge.core.backends import device_profile
from piebridge.core.bridge_map import Chain, fit_bridge_map
from piebridge.core.cascade import Cascade
from piebridge.core.device import describe_device
from piebridge.core.difficulty import ResidualRouter, fit_residual_predictor, is_bounded, relative_residuals
from piebridge.core.errors import UserError
from piebridge.core.offers import offers
from piebridge.core.packages import package_version
from piebridge.core.proxies import expected_milliseconds
from piebridge.core.set_routers import policy_of, predictor_of, residual_router_of
from piebridge.core.sources import Level

LOG = logging.getLogger(__name__)
BY_IMAGE = ("policy", "shuffled", "importance")  # routers that take all levels there are, whatever these leave
BUILD_SECONDS = 0.3  # building and compiling one more network, measured on two x86 cores
UNMEASURED_MILLISECONDS = 10.0  # one forward of the original where the backend was configured and so never timed
# router: whether a sample may use the level; cost: ms of one forward; share: of the calibration images that may use it
Candidate = namedtuple("Candidate", "level router cost share")


class Proxies:
    """Bridges and measures the proxies on offer on a few unlabelled training images, and keeps those that pay.

    `levels`: the proxies kept, dearest first. `calibration`: the samples used; their features come from the original. `proxy_set`:
    where they come from, None for proxies made here. `predictor`: the set's own, where that is to route the samples, else None.
    """

    def __init__(self, part):
        self.part, self.work, self.settings = part, part.work, part.config.proxies
        self._kept, self._notes = [], []
        self._fingerprints = {}  # {offer: its network's}
        self._offers, self.proxy_set = offers(part.config, self.work.network, self.work.fingerprint)
        self.predictor = predictor_of(self.proxy_set, part.config) if self._goes_by_set else None
        self.calibration = [] if self._goes_by_set else part.calibration
        self.calibration_cache = None
        self._readable = []  # of the calibration images
        self._milliseconds = self.work.decisions.values["backend"].get("milliseconds") or UNMEASURED_MILLISECONDS
        decided = self.work.decisions.values.get("proxies")
        for offer in self._eligible():
            if (offer.name in decided["levels"]) if decided else self._is_promising(offer):
                self._consider(offer, is_kept=bool(decided) or self._takes_all)
        decided = self.work.decisions.decide("proxies", lambda: {
            "levels": [level.name for level in self.levels], "reason": "; ".join(self._notes),
            "predicted_frozen_seconds": None if self.predictor else round(self._calibration_seconds() + self._seconds(self._kept), 3)})
        LOG.info("proxies: %s", ", ".join(decided["levels"]) or "none pays here")
        LOG.debug("why: %s", decided["reason"])

    @property
    def levels(self):
        return [candidate.level for candidate in self._kept]

    def cascade(self):
        """The Cascade over the levels kept."""
        return Cascade(self._kept, self.part.config.router.kind, self.part.config.seed)

    @property
    def _goes_by_set(self):
        """Whether samples are routed by a predictor that a set brings along, so that nothing is calibrated here."""
        return self.part.config.router.kind == "residual" and self.part.config.router.predictor == "set"

    @property
    def _takes_all(self):
        """Whether levels are kept whether they pay or not: those that the configuration names, and all that a set's router knows."""
        kind = self.part.config.router.kind
        return self.settings.use == "all" or kind in BY_IMAGE or kind.startswith("level:") or self._goes_by_set

    def _needs_original(self, offer):
        """Whether its features are needed: to make the level, for residuals that route samples, or for a map of these images."""
        kind = self.part.config.router.kind
        has_map = self.settings.bridge != "fitted" or (kind.startswith("level:") and offer.bridge is not None)
        return self.predictor is None and (offer.needs_images or kind in ("residual", "random") or not has_map)

    def _eligible(self):
        """The offers that the router could use."""
        kind, delta = self.part.config.router.kind, self.part.config.router.delta
        if self.predictor is not None:
            return self._offers if is_bounded(len(self.predictor.scores), delta) else []
        if kind.startswith("level:"):
            number = int(kind[len("level:"):])
            if number > len(self._offers):
                raise UserError(f"router.kind={kind}: there are {len(self._offers)} proxies on offer "
                                f"({', '.join(offer.name for offer in self._offers)}); name one of them, 1 being the most faithful")
            return self._offers[number - 1:number] if number else []
        return self._offers if kind in BY_IMAGE or is_bounded(len(self.calibration), delta) else []

    def policy(self):
        """See set_routers.policy_of."""
        return policy_of(self.proxy_set, self.part.config, [level.name for level in self.levels])

    def residual_router(self):
        """See set_routers.residual_router_of."""
        return residual_router_of(self.proxy_set, self.predictor, self.part.config, [level.name for level in self.levels])

    def _is_promising(self, offer):
        """Whether a level is worth making: predicted from its cost, and from half of the samples that the best level so far serves."""
        if self._takes_all:
            return True
        cost = offer.share * self._milliseconds
        share = 0.5 * max(candidate.share for candidate in self._kept) if self._kept else 1.0
        saved = self._seconds(self._kept) - self._seconds(self._kept + [Candidate(None, None, cost, share)])
        price = BUILD_SECONDS + len(self.calibration) * cost / 1000
        if saved <= price:
            self._notes.append(f"{offer.name} not made: predicted to save {saved:.2f} s for {price:.2f} s")
        return saved > price

    def _consider(self, offer, is_kept):
        self.work.interrupt.check()
        if not self._needs_original(offer):
            self._take_as_it_is(offer)
            return
        # int8 is built by one thread of OpenVINO's, while the original serves the calibration images; torch must not be disturbed so
        with ThreadPoolExecutor(1) as aside:
            is_ready = offer.precision == "int8" and not offer.needs_images
            building = aside.submit(self._segment, offer, offer.make) if is_ready else None
            original = self._original_features()
        if len(original) < 2:
            self._notes.append(f"{offer.name} left out: fewer than two calibration images can be read")
            return
        try:
            with self.work.clock.phase("proxies"):
                segment = building.result() if building else self._segment(offer, self._maker(offer))
                level, router, residuals, share, cost = self._bridged(offer, segment, original)
        except backends.Unsupported as reason:
            self._notes.append(f"{offer.name} left out: {reason}")
            return
        candidate = Candidate(level, router, cost, share)
        saved = self._seconds(self._kept) - self._seconds(self._kept + [candidate])
        if is_kept or saved > 0:
            self._kept = _dearest_first(self._kept + [candidate])
        self._notes.append(f"{offer.name} {'kept' if is_kept or saved > 0 else 'dropped'}: median residual {np.median(residuals):.3f}, "
                           f"within the tolerance for {100 * share:.0f} %, {cost:.3g} ms per image, predicted to save {saved:.2f} s")

    def _take_as_it_is(self, offer):
        """A level that needs the original for nothing, not even to fit a map."""
        try:
            with self.work.clock.phase("proxies"):
                segment = self._segment(offer, offer.make)
        except backends.Unsupported as reason:
            self._notes.append(f"{offer.name} left out: {reason}")
            return
        served = self._served_map(offer, None)
        level = Level(offer.name, self.part.loader(offer.resolution), segment, served, identity=self._identity(offer, served))
        self._kept.append(Candidate(level, None, offer.share * self._milliseconds, 1.0))  # the dearest come first
        self._notes.append(f"{offer.name} kept: router.kind={self.part.config.router.kind}")

    def _maker(self, offer):
        """() -> the proxy's network; one that is made of images is made here and kept."""
        if not offer.needs_images:
            return offer.make
        loader = self.part.loader([self.part.native, offer.resolution])
        images = next(loader.batches([self._readable], self.work.view_seed(0)))[1]
        network = offer.make(*[tensor.to(self.work.device) for tensor in images])
        return lambda: network

    def _segment(self, offer, make):
        """Of the network that `make()` gives, whose fingerprint is noted when it is made for the first time."""
        def build():
            network = make()
            if offer.name not in self._fingerprints:
                is_original = network is self.work.network
                self._fingerprints[offer.name] = self.work.fingerprint if is_original else network.fingerprint()
            return self.part.segment(network, offer.resolution, offer.precision)

        return self.part.loading.open(build)

    def _served_map(self, offer, fitted):
        """What a level's features go through: the set's map and the one `fitted` on top of it, the set's alone, or nothing (None)."""
        if self.settings.bridge == "none":
            return None
        if self.settings.bridge == "set" or fitted is None:
            return offer.bridge
        return fitted if offer.bridge is None else Chain(offer.bridge, fitted)

    def _identity(self, offer, bridge):
        return {"network": self._fingerprints[offer.name], "precision": offer.precision, "bridge": bridge and bridge.fingerprint()}

    def _bridged(self, offer, segment, original):
        """(Level, ResidualRouter, residuals of the calibration images, share of them that the level may serve, ms per image).

        original: features of the calibration images, [N, D].
        """
        part, view_seed = self.part, self.work.view_seed(0)
        loader = part.loader(offer.resolution)
        pieces, milliseconds = [], []
        chunks = [self._readable[start:start + part.batch_size] for start in range(0, len(self._readable), part.batch_size)]
        for _, images in loader.batches(chunks, view_seed):
            start = time.perf_counter()
            pieces.append(segment(images).cpu().numpy())
            milliseconds.append(1000 * (time.perf_counter() - start) / len(images))
        features = np.concatenate(pieces)
        in_set = features if offer.bridge is None else offer.bridge(features)
        bridge, residuals = fit_bridge_map(in_set, original)  # also where no map is served: samples are then routed as if it were
        if self.settings.bridge == "set":
            residuals = relative_residuals(in_set, original)
        served = self._served_map(offer, bridge)
        cost = self._remembered(offer, min(milliseconds))  # the first call, and whatever else runs, can only make one longer
        predictor, predicted = fit_residual_predictor(features if served is None else served(features), residuals)
        router = ResidualRouter(predictor, part.config.router.tolerance, part.config.router.delta)
        level = Level(offer.name, loader, segment, served, identity=self._identity(offer, served))
        return level, router, residuals, float((router.levels(predicted) > 0).mean()), cost

    def _remembered(self, offer, milliseconds):
        """The level's cost as this device measured it first, so that another run decides alike."""
        key = {"level": offer.name, "network": self.work.fingerprint, "batch_size": self.part.batch_size,
               "backend": self.work.decisions.values["backend"]["backend"], "device": describe_device(self.work.device),
               "versions": [package_version(name) for name in ("torch", "openvino")]}
        recalled = device_profile.recall(key)
        if not isinstance(recalled, float):
            recalled = round(milliseconds, 4)
            device_profile.remember(key, recalled)
        return recalled

    def _original_features(self):
        if self.calibration_cache is None:
            self.calibration_cache = self.part.filled(self.part.original, self.calibration)
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
