"""Where the trainable part's inputs come from: images, frozen segments, or a cache of what they gave."""

import contextlib
import itertools
import time

import numpy as np
import torch

from piebridge.core.errors import RunFailed
from piebridge.core.progress_bar import progress_bar


class Level:
    """One network that can serve a sample: level 0 is the original.

    loader: ImageLoader at the level's resolution; segment: images [N, 3, S, S] -> features [N, D]; bridge: features -> features in
    the original's latent space, or None where they are in it.
    """

    def __init__(self, name, loader, segment, bridge=None):
        self.name, self.loader, self.segment, self.bridge = name, loader, segment, bridge

    def features(self, images):
        features = self.segment(images)
        return features if self.bridge is None else torch.from_numpy(self.bridge(features.numpy()))


class ImageSource:
    """The images themselves, for a trainable part that starts at the input (FTAll)."""

    needs_level_batches = False
    threads = None

    def __init__(self, loader, usable, view_seed, device, clock):
        self.usable = usable
        self._loader, self._view_seed, self._device, self._clock = loader, view_seed, device, clock

    def stream(self, batches, epoch, levels):
        """Yield (indices, images float32 [B, 3, S, S]) for each list of sample indices."""
        for indices, images in timed(self._loader.batches(batches, self._view_seed(epoch)), self._clock):
            yield indices, images.to(self._device)


class FrozenSource:
    """Features of frozen networks, computed batch by batch, each epoch anew."""

    threads = None

    def __init__(self, levels, usable, view_seed, device, clock):
        self.levels, self.usable = levels, usable
        self.needs_level_batches = len(levels) > 1
        self._view_seed, self._device, self._clock = view_seed, device, clock

    def stream(self, batches, epoch, levels):
        """Yield (indices, features float32 [B, D]); all samples of a batch must have one level."""
        for level, group in itertools.groupby(batches, key=lambda batch: int(levels[batch[0]])):
            current = self.levels[level]
            for indices, images in timed(current.loader.batches(list(group), self._view_seed(epoch)), self._clock):
                with self._clock.phase("frozen"):
                    features = current.features(images).to(self._device) if indices else None
                yield indices, features


class CachedSource:
    """Features of one view of each sample, computed once; a cached feature costs nothing, so levels never change the batches."""

    needs_level_batches = False
    threads = 1  # a linear layer on a few rows is over before a second thread has woken up

    def __init__(self, features, usable, device, clock):
        self.usable = usable
        self._features, self._device, self._clock = features, device, clock

    def stream(self, batches, epoch, levels):
        """Yield (indices, features float32 [B, D])."""
        for indices in batches:
            with self._clock.phase("cache"):
                features = torch.from_numpy(self._features.read(indices)).to(self._device)
            yield indices, features


def fill_cache(cache, level, view_seed, clock, interrupt, save=lambda: None):
    """Compute the chunks that `cache` lacks through `level`, calling `save` about once a second; returns the cache."""
    with clock.phase("cache"):
        missing = cache.missing_chunks()
    total = sum(len(cache.chunks[number]) for number in missing)
    bar = progress_bar(total=total, desc=f"features ({level.name})", unit="image")
    saved = time.monotonic()
    with bar, contextlib.closing(level.loader.batches([cache.chunks[number] for number in missing], view_seed)) as batches:
        for number, (indices, images) in zip(missing, timed(batches, clock)):
            with clock.phase("frozen"):
                features = level.features(images).cpu().numpy() if indices else np.zeros((0, cache.width), np.float32)
            if not np.isfinite(features).all():
                raise RunFailed(f"{level.name} gives features that are not finite; is the network file whole?")
            with clock.phase("cache"):
                cache.write(number, indices, features)
                if time.monotonic() - saved > 1 or interrupt.signal_name:
                    save()
                    saved = time.monotonic()
            bar.update(len(indices))
            interrupt.check()
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
