"""Where the trainable part's inputs come from: images, frozen segments, or a cache of what they gave."""

import contextlib
import itertools
import time

import numpy as np
import torch

from piebridge.core.errors import RunFailed
from piebridge.core.level_loader import Resident
from piebridge.core.progress_bar import progress_bar


class Level:
    """One network that can serve a sample: level 0 is the original.

    loader: ImageLoader at the level's resolution; segment: images [N, 3, S, S] -> value [N, ...] at the tap that the trainable part
    starts from, None where that is the images themselves; bridge: features -> features in the original's latent space, or None
    where they are in it; number: the trainable part's level that goes on from there; identity: JSON, what decides the values beside
    the original network and the loader's transform.
    """

    def __init__(self, name, loader, segment, bridge=None, number=0, identity=None):
        self.name, self.loader, self.segment, self.bridge, self.number = name, loader, segment, bridge, number
        self.identity = identity

    def features(self, images):
        """float32 [N, 3, S, S] -> float32 [N, ...], on the CPU where there is a segment."""
        features = images if self.segment is None else self.segment(images)
        return features if self.bridge is None else torch.from_numpy(self.bridge(features.numpy()))


class LevelSource:
    """The levels' images, or what their frozen networks make of them, batch by batch, each epoch anew.

    loading: which of the levels' segments are in memory, see core/level_loader.py; it made them.
    """

    threads = None

    def __init__(self, levels, usable, view_seed, device, clock, loading=None):
        self.levels, self.usable = levels, usable
        self.needs_level_batches = len(levels) > 1
        self._view_seed, self._device, self._clock, self._loading = view_seed, device, clock, loading or Resident()

    def stream(self, batches, epoch, levels):
        """Yield (indices, values float32 [B, ...], the trainable part's level); a batch has the level of its first sample."""
        groups = [(self.levels[number], list(group))
                  for number, group in itertools.groupby(batches, key=lambda batch: int(levels[batch[0]]))]
        with self._loading.visiting([level.segment for level, _ in groups]):
            for current, group in groups:
                with self._clock.phase("proxies"):
                    self._loading.load(current.segment)
                for indices, images in timed(current.loader.batches(group, self._view_seed(epoch)), self._clock):
                    with self._clock.phase("frozen"):
                        values = current.features(images).to(self._device) if indices else None
                    yield indices, values, current.number

    def original_values(self, indices, epoch):
        """float32 [B, ...] at the tap of the same views through the original, or None where an image can no longer be read."""
        level = self.levels[0]
        with contextlib.closing(level.loader.batches([indices], self._view_seed(epoch))) as batches:
            found, images = next(batches)
        return level.features(images).to(self._device) if found == list(indices) else None


class CachedSource:
    """Rows of one or more views of each sample, computed once; a cached row costs nothing, so levels never change the batches.

    views: a RowTable for each view; epoch e reads view e modulo their number. augment: (rows, indices, epoch, view) -> rows, or None.
    """

    needs_level_batches = False

    def __init__(self, views, usable, device, clock, augment=None, threads=1):
        self.usable, self.threads = usable, threads
        self._views, self._device, self._clock, self._augment = views, device, clock, augment

    def stream(self, batches, epoch, levels):
        """Yield (indices, rows float32 [B, ...], 0)."""
        view = self._views[epoch % len(self._views)]
        for indices in batches:
            with self._clock.phase("cache"):
                rows = view.read(indices)
                if self._augment is not None:
                    rows = self._augment(rows, indices, epoch, view)
                rows = torch.from_numpy(rows).to(self._device)
            yield indices, rows, 0


def fill_cache(cache, level, view_seed, clock, interrupt, save=lambda: None):
    """Compute the rows that `cache` lacks through `level`, calling `save` about once a second; returns the cache."""
    with clock.phase("cache"):
        missing = [cache.missing(number) for number in cache.missing_chunks()]
        cache.reserve()
    bar = progress_bar(total=sum(len(indices) for indices in missing), desc=f"rows ({level.name})", unit="image")
    saved = time.monotonic()
    with bar, contextlib.closing(level.loader.batches(missing, view_seed)) as batches:
        for indices, images in timed(batches, clock):
            if indices:
                with clock.phase("frozen"):
                    rows = level.features(images).cpu().numpy()
                if not np.isfinite(rows).all():
                    raise RunFailed(f"{level.name} gives features that are not finite; is the network file whole?")
                with clock.phase("cache"):
                    cache.write(indices, rows)
            with clock.phase("cache"):
                if time.monotonic() - saved > 1 or interrupt.signal_name:
                    save()
                    saved = time.monotonic()
            bar.update(len(indices))
            interrupt.check()
    with clock.phase("cache"):
        cache.close()
    for _ in timed(level.loader.batches([[index] for index in cache.untried()], view_seed), clock):
        pass  # the same content could not be read under another name; each name is reported
    return cache


def timed(batches, clock):
    """Pass batches on, charging the wait for each to the phase `decode`."""
    with contextlib.closing(batches):
        while True:
            with clock.phase("decode"):
                item = next(batches, None)
            if item is None:
                return
            yield item
