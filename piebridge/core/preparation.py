"""Before the loop: choose the backend, make the proxies that pay, route the samples, fill the cache.

What is decided here (backend, levels, routing) is recorded as it is decided, see core/decisions.py.
"""

import contextlib
import logging

import numpy as np

from piebridge.core import backends
from piebridge.core.bad_images import NOTHING_READABLE
from piebridge.core.errors import UserError
from piebridge.core.feature_augmentation import feature_augmentation
from piebridge.core.graph import INPUT
from piebridge.core.level_loader import LOADING, Resident
from piebridge.core.levels import Proxies
from piebridge.core.loader import ImageLoader, in_batches
from piebridge.core.router import ClosingRouter, DataAwareRouter, FixedRouter, RandomRouter
from piebridge.core.routing import Routing
from piebridge.core.row_codec import RowCodec
from piebridge.core.run_cache import RunCache
from piebridge.core.sources import CachedSource, Level, LevelSource
from piebridge.core.trained_levels import TrainedLevels
from piebridge.core.transforms import Transform

LOG = logging.getLogger(__name__)
LEAST_CALIBRATION = 16  # images
BY_LOT = ("random", "shuffled")  # routers that draw anew which samples a level gets
AUTO = "auto"  # config.strategy: core/planner.py chooses
NOTHING_TO_SAVE = "what lies before the trained part is computed once and cached"
FILL_BATCH = 8  # images per frozen forward while a cache is filled; larger ones are slower on small caches, measured


def caches_features(config, tuning):
    """Whether a cache of what is at the tap is on; UserError where there is nothing to keep.

    `auto` takes it where it is exact, a stated number of views of each sample, and a row takes no more bytes than a decoded image.
    """
    if config.cache.kind == "features" and tuning.tap == INPUT:
        raise UserError(f"cache.kind=features: pet.kind={config.pet.kind} trains from the image on, there are no frozen features to keep; "
                        "use cache.kind=none, or pet.blocks=last:N")
    if config.stream.samples:  # nothing comes again
        return False
    is_fresh = config.loader.augment != "none" and not config.cache.views
    if config.cache.kind != "auto" or tuning.tap == INPUT or is_fresh:
        return config.cache.kind == "features"
    row_bytes = RowCodec(config.cache.dtype, tuning.tap_shape()).row_bytes
    return row_bytes <= int(np.prod(tuning.network.description["input_size"]))


class FrozenPart:
    """The frozen side of a run: gives the loop its source and its router.

    work: an `assembly.Workplace`. tuning: what is trained, a `Tuning`. is_at_head: whether that is the head alone, so that the frozen
    networks give feature vectors; only these have bridge maps and residuals. Elsewhere levels run through autograd from their taps on.
    built: another FrozenPart of the same run, whose segment of the original serves here too.
    """

    def __init__(self, work, tuning, built=None):
        self.work, self.tuning = work, tuning
        self.config = work.config
        self.count = len(work.dataset.train)
        self.samples = self.config.stream.samples or self.count  # of an epoch
        self.is_cached = caches_features(work.config, tuning)
        self.is_at_head = tuning.tap == work.network.description["tap"]
        self.native = work.network.description["input_size"][-1]
        is_free = self.is_cached and self.config.backend.name == "auto"  # the batch of a published baseline is the configured one
        self.batch_size = FILL_BATCH if is_free else self.config.loader.batch_size
        self.decisions = work.decisions
        has_proxies = bool(self.config.proxies.levels) or self.config.proxies.set is not None
        is_wanted = has_proxies and self.config.router.kind != "none"
        self.uses_proxies = is_wanted and (self.is_at_head or not self.is_cached)
        self._has_idle_proxies = is_wanted and not self.uses_proxies
        self.calibration = self._choose_calibration() if self.uses_proxies else []
        self._shape = None  # of one sample's value at the tap
        self.rows = RunCache(work, self.config.cache.dtype if self.is_cached else "float32")
        self.loading = Resident()
        if built is not None and built.batch_size == self.batch_size:
            self.loading, self.original = built.loading, built.original
        else:
            self.original = Level("original", self.loader(self.native), None if tuning.tap == INPUT else self._original_segment())

    def source_and_router(self):
        """(source, router), with everything computed that they need. UserError for settings that would change nothing."""
        self._refuse_idle_settings()
        if self.uses_proxies and not self.is_at_head:
            levels, routing = TrainedLevels(self).levels_and_routing()
            return self._streamed(levels, routing)
        everyone = list(range(self.count))
        proxies = Proxies(self) if self.uses_proxies else None
        levels = [self.original] + (proxies.levels if proxies else [])
        if self._has_idle_proxies:
            self.decisions.decide("proxies", lambda: {"levels": [], "reason": NOTHING_TO_SAVE})
            LOG.info("proxies: none: %s", NOTHING_TO_SAVE)
        if proxies and not proxies.levels and self._wants_a_proxy:
            raise UserError(f"router.kind={self.config.router.kind}: {self.decisions.values['proxies']['reason']}; choose another level, "
                            "or router.kind=residual")
        if proxies and proxies.levels:
            routing, caches = Routing(self).of(levels, proxies)
        elif self.is_cached:
            routing, caches = np.zeros(self.count, dtype=int), [(self.filled(self.original, everyone), everyone)]
        else:
            routing, caches = np.zeros(self.count, dtype=int), []
        used = {level.name: int((routing == number).sum()) for number, level in enumerate(levels)}
        self.decisions.decide("levels_used", lambda: used)
        if self.is_cached:
            return self._cached_source(levels, routing, caches), FixedRouter(routing)
        return self._streamed(levels, routing)

    @property
    def _wants_a_proxy(self):
        return self.config.router.kind.startswith("level:") and self.config.router.kind != "level:0"

    def _refuse_idle_settings(self):
        """What a configuration alone does not show, as it depends on whether features are cached; strategy=auto chooses that itself."""
        config = self.config
        if config.strategy == AUTO:
            return
        if config.cache.augment != "none" and not self.is_cached:
            raise UserError(f"cache.augment={config.cache.augment}: changes cached features, and none are kept here (cache.kind="
                            f"{config.cache.kind}); use cache.kind=features, or cache.augment=none")
        if self._has_idle_proxies and self._wants_a_proxy:
            raise UserError(f"router.kind={config.router.kind}: {NOTHING_TO_SAVE}, which leaves a proxy nothing to save; use "
                            "router.kind=none, or cache.kind=none")
        if self.is_cached and self.uses_proxies:
            for key, is_set in (("router.closing", config.router.closing > 0), ("router.lowers", config.router.lowers),
                                ("router.audit", config.router.audit > 0), ("router.kind", config.router.kind == "importance")):
                if is_set:
                    raise UserError(f"{key}={getattr(config.router, key.partition('.')[2])}: moves samples to other networks from epoch to "
                                    "epoch, and their features are kept from before the first; use cache.kind=none, or leave it out")

    def _streamed(self, levels, routing):
        work = self.work
        if self.config.cache.kind == "pixels":
            for level in levels:
                level.loader = self.rows.pixel_loader(level.loader)
        self.rows.report()
        source = LevelSource(levels, list(range(self.count)), work.view_seed, work.device, work.clock, self.loading)
        return source, FixedRouter(routing) if len(levels) == 1 else self._router(routing, len(levels) - 1)

    def _router(self, routing, cheapest):
        """Moves the samples' first levels `routing`, up to the level `cheapest`."""
        settings = self.config.router
        if settings.kind in BY_LOT:
            router = RandomRouter(routing, cheapest, settings.lowers, self.config.seed)
        else:
            router = DataAwareRouter(routing, cheapest, settings.lowers)
        is_spent = settings.kind == "random" and not self.is_at_head  # on the original all along, by TrainedLevels
        return ClosingRouter(router, self.config.epochs, settings.closing) if settings.closing and not is_spent else router

    def _cached_source(self, levels, routing, caches):
        """caches: (FeatureCache, samples that it serves) of the first view. Each sample's level serves its other views too."""
        work, settings = self.work, self.config.cache
        views = [caches] + [self._by_level(levels, routing, view) for view in range(1, settings.views)]
        with work.clock.phase("cache"):
            tables = [self.rows.table(served) for served in views]
            usable = sorted(set(tables[0].usable).intersection(*[table.usable for table in tables[1:]]))
            self.rows.report()
        if not usable:
            raise UserError(NOTHING_READABLE)
        labels = [sample.label for sample in work.dataset.train]
        augment = feature_augmentation(settings.augment, settings.augment_strength, self.config.seed, labels)
        # a linear layer on a few rows is over before a second thread has woken up
        return CachedSource(tables, usable, work.device, work.clock, augment, threads=1 if self.is_at_head else None)

    def _by_level(self, levels, routing, view):
        """[(FeatureCache of a view, the samples that it serves)], a level each."""
        served = [(level, np.flatnonzero(routing == number).tolist()) for number, level in enumerate(levels)]
        return [(self.filled(level, indices, view), indices) for level, indices in served if indices]

    def loader(self, size):
        """Training images at `size`, or at each of a list of sizes."""
        settings, description = self.config.loader, self.work.network.description
        sizes = size if isinstance(size, list) else [size]
        transforms = [Transform.for_network(description, size=each, augment=settings.augment) for each in sizes]
        return ImageLoader(self.work.dataset.train, transforms if isinstance(size, list) else transforms[0], settings.workers,
                           settings.max_megapixels, self.work.bad_images)

    def _choose_calibration(self):
        """Samples that show what a proxy leaves: as many as configured, but no more than a twentieth of a small set."""
        count = min(self.config.proxies.calibration_images, self.count, max(LEAST_CALIBRATION, self.count // 20))
        return sorted(np.random.RandomState(self.config.seed).permutation(self.count)[:count].tolist())

    def segment(self, network, size, precision):
        """A frozen segment on the chosen backend; int8 and bf16 have backends of their own. Raises Unsupported where that cannot serve."""
        name = self.decisions.values.get("backend", {"backend": "eager"})["backend"]  # none was chosen where the original has no segment
        if precision == "int8":
            if backends.missing_packages(backends.INT8):
                raise backends.Unsupported("int8 runs on OpenVINO, which is not installed (pip install openvino)")
            if self.work.device.type != "cpu" or not name.startswith("openvino"):
                raise backends.Unsupported(f"int8 runs on OpenVINO, and the frozen segments on {name}")
            name = backends.INT8
        elif precision == "bf16":
            name = backends.bf16_backend(name)
        return backends.build_segment(name, network, size, self.batch_size)

    def _original_segment(self):
        built = self._choose_backend()
        name = self.decisions.values["backend"]["backend"]
        runs_beside_torch = bool(backends.BACKENDS[name].packages)
        self.loading = LOADING[self.config.proxies.loading](runs_beside_torch)
        with self.work.clock.phase("probe"):
            return self.loading.open(lambda: built.pop() if built else backends.build_segment(
                name, self.tuning.frozen(), self.native, self.batch_size))

    def _choose_backend(self):
        """Decide for the configured, the recorded or the fastest backend; a list of the original's segment on it, if that was built."""
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
        return [segment for segment in built if segment is not None]

    def _probe(self):
        batches = self.loader(self.native).batches(in_batches(self.count, self.batch_size), self.work.view_seed(0))
        with contextlib.closing(batches):
            images = next((images for indices, images in batches if indices), None)
        if images is None:
            raise UserError(NOTHING_READABLE)
        expected = self.count if self.is_cached else self.samples * self.config.epochs
        fingerprint = self.work.fingerprint if self.is_at_head else f"{self.work.fingerprint} up to {self.tuning.tap}"
        return backends.probe(self.tuning.frozen(), images, self.batch_size, self.config.backend.tolerance, expected,
                              fingerprint=fingerprint)

    def filled(self, level, indices, view=0):
        """The FeatureCache of samples (list of int) through a Level, with everything computed that it lacked."""
        if self._shape is None:  # found by a forward
            self._shape = self.tuning.tap_shape()
        return self.rows.features(level, indices, view, self.batch_size, self._shape, self.tuning.tap,
                                  self.decisions.values["backend"]["backend"])
