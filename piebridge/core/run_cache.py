"""What a run keeps of its samples: where it lies, what it is known by, and how much of it was there before."""

import logging

from piebridge.core.byte_sizes import parse_bytes, shown_bytes
from piebridge.core.cache import FeatureCache, RowTable
from piebridge.core.contents import SampleContents, row_keys
from piebridge.core.files import expand_user, user_cache_folder
from piebridge.core.packages import package_version
from piebridge.core.pixel_cache import PixelLoader, PixelTransform
from piebridge.core.row_codec import RowCodec
from piebridge.core.row_store import RowStore
from piebridge.core.sources import Level, fill_cache

LOG = logging.getLogger(__name__)
VERSIONS = ("pillow", "torch", "openvino", "onnxruntime")  # other versions may round otherwise
PIXEL_BATCH = 8  # images decoded together


def shared_folder(settings):
    """Where rows that runs share are kept; settings: the cache section."""
    return expand_user(settings.folder) if settings.folder else user_cache_folder() / "rows"


class RunCache:
    """The caches of one run, in the folder that runs share or in one of the run's own. `work` is an `assembly.Workplace`.

    A row is known by its sample's content, the view, the network up to the tap, the level with its bridge map, the backend, the
    versions of what computes, and the type on disk. dtype: of features.
    """

    def __init__(self, work, dtype):
        self._work, self._dtype, self._settings = work, dtype, work.config.cache
        self._contents = SampleContents(work.dataset.train, work.config.loader.workers)
        self._versions = {name: package_version(name) for name in VERSIONS}
        self._stores = {}  # {(what, shape): (RowStore, RowCodec)}
        self._computed, self._found, self._bytes, self._errors = 0, 0, 0, [0.0]

    def features(self, level, indices, view, batch_size, shape, tap, backend):
        """The FeatureCache of rows [*shape] at `tap` of the samples `indices` through a Level, filled. view: number of the view."""
        settings = {"network": self._work.fingerprint, "tap": tap, "level": level.identity, "backend": backend,
                    "transform": level.loader.transforms[0].as_dict()}
        return self._filled(level, {"what": "features", "network": self._work.fingerprint, "tap": tap}, settings, indices, view,
                            batch_size, RowCodec(self._dtype, shape))

    def table(self, served):
        """RowTable of a list of (FeatureCache, samples to take from it) with rows of one kind."""
        return RowTable(served[0][0].store, served[0][0].codec, len(self._work.dataset.train), served)

    def pixel_loader(self, loader):
        """An ImageLoader's batches from cached pixels, which are there when this returns."""
        work, transform = self._work, loader.transforms[0]
        indices = list(range(len(work.dataset.train)))
        pixels = PixelTransform(transform)
        level = Level("pixels", loader.with_transform(pixels), lambda images: images)
        views = {}
        for view in range(max(1, self._settings.views)):
            cache = self._filled(level, {"what": "pixels"}, {"transform": pixels.as_dict()}, indices, view, PIXEL_BATCH,
                                 RowCodec("uint8", (transform.size, transform.size, 3)))
            views[work.view_seed(view)] = self.table([(cache, indices)])
        return PixelLoader(transform, views)

    def report(self):
        """Record what was found and computed as the decision `cache`, part of run.json's plan."""
        if not self._stores:
            return
        found = {"kind": "pixels" if self._settings.kind == "pixels" else "features", "dtype": self._dtype,
                 "views": max(1, self._settings.views), "is_shared": self._settings.shared, "rows_reused": self._found,
                 "rows_computed": self._computed, "bytes": self._bytes, "largest_relative_error": float(f"{max(self._errors):.3g}")}
        self._work.decisions.update("cache", found)
        LOG.info("cache: %d rows found, %d computed (%s, %s, largest relative error of a row %.2g)", self._found, self._computed,
                 shown_bytes(self._bytes), "uint8 pixels" if found["kind"] == "pixels" else self._dtype, max(self._errors))

    def _filled(self, level, layout, settings, indices, view, batch_size, codec):
        work, seed = self._work, self._work.view_seed(view)
        with work.clock.phase("cache"):
            layout = dict(layout, dtype=codec.dtype, shape=list(codec.shape))
            store = self._store(layout, codec)
            settings = dict(settings, view=seed, versions=self._versions, layout=layout)
            keys = row_keys(settings, self._contents.digests(indices), indices, is_by_position=seed is not None)
            cache = FeatureCache(store, codec, keys, indices, batch_size, self._contents.confirm)
            found = 0
            if self._settings.shared:  # rows of a cache of its own are the run's own work, also when it was resumed
                found = work.decisions.decide(f"rows found, {len(self._errors)}", lambda: cache.found)
        fill_cache(cache, level, seed, work.clock, work.interrupt, work.decisions.save)
        rows = cache.found + cache.lacking
        self._found, self._computed, self._bytes = self._found + found, self._computed + rows - found, self._bytes + rows * codec.row_bytes
        self._errors.append(cache.error())
        return cache

    def _store(self, layout, codec):
        name = str(sorted(layout.items()))
        if name not in self._stores:
            root = shared_folder(self._settings) if self._settings.shared else self._work.folder.cache_folder
            self._stores[name] = RowStore(root, layout, codec.row_bytes, parse_bytes(self._settings.budget))
        return self._stores[name]
