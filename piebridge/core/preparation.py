"""Before the loop: choose the backend, make the proxies that pay, route the samples, fill the cache.

What is decided here (backend, levels) is recorded in the checkpoint folder as it is decided: a resumed run repeats the decisions,
not the measurements that led to them, which no two runs share.
"""

import json
import logging
from collections import namedtuple

import numpy as np

from piebridge.core import backends
from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.cache import CacheGroup, FeatureCache
from piebridge.core.files import write_json
from piebridge.core.loader import ImageLoader
from piebridge.core.proxies import expected_milliseconds, macs_share, make_proxy, match_batch_norm, parse_spec
from piebridge.core.router import DataAwareRouter, FixedRouter, ResidualPredictor
from piebridge.core.sources import CachedSource, FrozenSource, Level, fill_cache
from piebridge.core.transforms import Transform

LOG = logging.getLogger(__name__)
FILL_BATCH = 8  # images per frozen forward while a cache is filled; larger ones are slower on small caches, measured
BUILD_SECONDS = 0.3  # building and compiling one more network, measured on two x86 cores
UNMEASURED_MILLISECONDS = 10.0  # one forward of the original where the backend was configured and so never timed


def caches_features(config):
    """Whether a feature cache is on. `auto` takes it where it is exact: one view of each sample and nothing trainable below."""
    is_exact = config.loader.augment == "none" and config.pet.kind == "head"
    return config.cache.kind == "features" or (config.cache.kind == "auto" and is_exact)


class Decisions:
    """Named decisions in a JSON file: `decide(name, make)` returns the recorded value, or makes and records it."""

    def __init__(self, path):
        self._path = path
        try:
            self.values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.values = {}

    def decide(self, name, make):
        if name not in self.values:
            self.values[name] = make()
            write_json(self._path, self.values)
        return self.values[name]


class FrozenPart:
    """The frozen side of a run: gives the loop its source and its router. `work` is a `assembly.Workplace`."""

    def __init__(self, work):
        self.work = work
        self.config = work.config
        self.count = len(work.dataset.train)
        self.is_cached = caches_features(work.config)
        self.native = work.network.description["input_size"][-1]
        is_free = self.is_cached and self.config.backend.name == "auto"  # the batch of a published baseline is the configured one
        self.batch_size = FILL_BATCH if is_free else self.config.loader.batch_size
        self.decisions = Decisions(work.folder.checkpoint_folder / "decisions.json")
        self.original = Level("original", self.loader(self.native), self._choose_backend())

    def source_and_router(self):
        work, everyone = self.work, list(range(self.count))
        proxies = Proxies(self) if self.config.proxies.levels and self.config.router.kind != "none" else None
        levels = [self.original] + (proxies.levels if proxies else [])
        if proxies and proxies.levels:
            routing, caches = self._cascade(levels, proxies)
        elif self.is_cached:
            routing, caches = np.zeros(self.count, dtype=int), [(self.filled(self.original, "original", everyone), everyone)]
        else:
            routing, caches = np.zeros(self.count, dtype=int), []
        self.decisions.values["levels_used"] = {level.name: int((routing == number).sum()) for number, level in enumerate(levels)}
        if self.is_cached:
            return CachedSource(CacheGroup(caches), everyone, work.device, work.clock), FixedRouter(routing)
        source = FrozenSource(levels, everyone, work.view_seed, work.device, work.clock)
        return source, (DataAwareRouter(routing, len(levels) - 1) if len(levels) > 1 else FixedRouter(routing))

    def loader(self, size):
        """Training images at `size`, or at each of a list of sizes."""
        settings, description = self.config.loader, self.work.network.description
        sizes = size if isinstance(size, list) else [size]
        transforms = [Transform.for_network(description, size=each, augment=settings.augment) for each in sizes]
        return ImageLoader(self.work.dataset.train, transforms if isinstance(size, list) else transforms[0], settings.workers,
                           settings.max_megapixels)

    def segment(self, network, size, precision):
        """A frozen segment on the chosen backend; int8 has a backend of its own."""
        name = backends.INT8 if precision == "int8" else self.decisions.values["backend"]["backend"]
        return backends.build_segment(name, network, size, self.batch_size)

    def _choose_backend(self):
        """The original's segment on the configured, the recorded or the fastest backend."""
        work, wanted = self.work, self.config.backend.name
        built = []

        def measure():
            choice = self._probe()
            built.append(choice.segment)
            return choice.as_dict()

        with work.clock.phase("probe"):
            as_configured = {"backend": wanted, "reason": "as configured"}
            choice = self.decisions.decide("backend", measure if wanted == "auto" else lambda: as_configured)
            speed = f", {choice['milliseconds']:.3g} ms per image" if choice.get("milliseconds") else ""
            LOG.info("frozen segments run on %s%s", choice["backend"], speed)
            LOG.debug("why %s: %s", choice["backend"], choice["reason"])
            if built and built[0] is not None:
                return built[0]
            return backends.build_segment(choice["backend"], work.network, self.native, self.batch_size)

    def _probe(self):
        indices = list(range(min(self.batch_size, self.count)))
        _, images = next(iter(self.loader(self.native).batches([indices], self.work.view_seed(0))))
        expected = self.count * (1 if self.is_cached else self.config.epochs)
        return backends.probe(self.work.network, images, self.batch_size, self.config.backend.tolerance, expected,
                              fingerprint=self.work.fingerprint)

    def _cascade(self, levels, proxies):
        """Route every sample to the cheapest level whose predicted residual is within the tolerance: (routing, caches).

        The residual is predicted from the level's own features, which therefore have to be computed first; accepted, they are
        what the cache keeps, rejected, the sample goes on to the next dearer level.
        """
        routing = np.zeros(self.count, dtype=np.int64)
        calibration = set(proxies.calibration)
        caches = [(proxies.calibration_cache, proxies.calibration)]
        pending = [index for index in range(self.count) if index not in calibration]
        for number in range(len(levels) - 1, 0, -1):
            level = levels[number]
            cache = self.filled(level, level.name, pending)
            accepted = proxies.accepted(number, cache, pending)
            routing[accepted] = number
            caches.append((cache, accepted))
            pending = sorted(set(pending) - set(accepted))
        if self.is_cached:
            caches.append((self.filled(self.original, "original", pending), pending))
        return routing, caches

    def filled(self, level, name, indices):
        return fill_cache(self.cache(name, indices), level, self.work.view_seed(0), self.work.clock, self.work.interrupt)

    def cache(self, name, indices):
        work = self.work
        key = {"network": work.fingerprint, "data": work.dataset.fingerprint, "level": name, "seed": self.config.seed,
               "augment": self.config.loader.augment, "backend": self.decisions.values["backend"]["backend"]}
        return FeatureCache(work.folder.cache_folder / name, key, indices, work.network.head.in_features, self.batch_size)


Candidate = namedtuple("Candidate", "level predictor cost share")  # cost: ms of one forward; share: of samples within the tolerance


class Proxies:
    """Makes, bridges and measures proxies on a few unlabelled training images, and keeps those that pay.

    `levels`: the proxies kept, dearest first. `calibration`: the samples used; their features come from the original.
    """

    def __init__(self, part):
        self.part, self.work, self.settings = part, part.work, part.config.proxies
        self._kept, self._notes = [], []
        random = np.random.RandomState(part.config.seed)
        self.calibration = sorted(random.permutation(part.count)[:min(self.settings.calibration_images, part.count)].tolist())
        self.calibration_cache = None
        self._milliseconds = part.decisions.values["backend"].get("milliseconds") or UNMEASURED_MILLISECONDS
        decided = part.decisions.values.get("proxies")
        for spec in sorted({parse_spec(text) for text in self.settings.levels}, key=self._faithful_first):
            if (str(spec) in decided["levels"]) if decided else self._is_promising(spec):
                self._consider(spec, is_kept=bool(decided) or self.settings.use == "all")
        decided = part.decisions.decide("proxies", lambda: {"levels": [level.name for level in self.levels],
                                                            "reason": "; ".join(self._notes)})
        LOG.info("proxies: %s", ", ".join(decided["levels"]) or "none pays here")
        LOG.debug("why: %s", decided["reason"])

    @property
    def levels(self):
        return [candidate.level for candidate in self._kept]

    def accepted(self, number, cache, indices):
        """The samples of `indices` that level `number` may serve; `cache` has their features at that level."""
        kind, settings = self.part.config.router.kind, self.part.config.router
        candidate = self._kept[number - 1]
        if not indices:
            return []
        if kind.startswith("level:"):
            return list(indices) if number == min(int(kind[len("level:"):]), len(self._kept)) else []
        if kind == "random":  # as many as the residual router would take, by lot
            random = np.random.RandomState(self.part.config.seed * 1000 + number)
            count = int(round(candidate.share * len(indices)))
            return sorted(np.asarray(indices)[random.permutation(len(indices))[:count]].tolist())
        pieces = [indices[start:start + 512] for start in range(0, len(indices), 512)]
        predicted = np.concatenate([candidate.predictor(cache.read(piece)) for piece in pieces])
        return [index for index, residual in zip(indices, predicted) if residual <= settings.tolerance]

    def _faithful_first(self, spec):
        return -spec.resolution, spec.dropped, self._cost(spec)

    def _cost(self, spec):
        return macs_share(self.work.network, spec) * self._milliseconds

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
        original = self._original_features()
        try:
            with self.work.clock.phase("proxies"):
                level, predictor, residuals = self._make(spec, original)
        except backends.Unsupported as reason:
            self._notes.append(f"{spec} left out: {reason}")
            return
        share = float((residuals <= self.part.config.router.tolerance).mean())
        candidate = Candidate(level, predictor, self._cost(spec), share)
        saved = self._seconds(self._kept) - self._seconds(self._kept + [candidate])
        if is_kept or saved > 0:
            self._kept = _dearest_first(self._kept + [candidate])
        self._notes.append(f"{spec} {'kept' if is_kept or saved > 0 else 'dropped'}: median residual {np.median(residuals):.3f}, "
                           f"within the tolerance for {100 * share:.0f} %, predicted to save {saved:.2f} s")

    def _make(self, spec, original):
        part, network = self.part, self.work.network
        view_seed = self.work.view_seed(0)
        proxy = network
        if spec.dropped:
            _, (images, proxy_images) = next(part.loader([part.native, spec.resolution]).batches([self.calibration], view_seed))
            proxy = make_proxy(network, spec, images)
            match_batch_norm(network, proxy, images, proxy_images)
        segment = part.segment(proxy, spec.resolution, spec.precision)
        loader = part.loader(spec.resolution)
        batches = loader.batches(self.calibration_cache.chunks, view_seed)
        features = np.concatenate([segment(images).cpu().numpy() for _, images in batches])
        bridge, residuals = fit_bridge_map(features, original)
        return Level(str(spec), loader, segment, bridge), ResidualPredictor(bridge(features), residuals), residuals

    def _original_features(self):
        if self.calibration_cache is None:
            self.calibration_cache = self.part.filled(self.part.original, "calibration", self.calibration)
        return self.calibration_cache.read(self.calibration)

    def _seconds(self, candidates):
        """Expected seconds in frozen networks, for all samples but the calibration's."""
        ordered = _dearest_first(candidates)
        passes = 1 if self.part.is_cached else self.part.config.epochs
        milliseconds = expected_milliseconds([each.cost for each in ordered], [each.share for each in ordered],
                                             self._milliseconds, passes)
        return (self.part.count - len(self.calibration)) * milliseconds / 1000


def _dearest_first(candidates):
    return sorted(candidates, key=lambda candidate: -candidate.cost)
