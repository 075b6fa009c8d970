"""A run's caches on real images: what is computed, what is found again, and that it equals computing afresh, bit for bit."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from piebridge.config import build_config
from piebridge.core.assembly import Workplace
from piebridge.core.bad_images import BadImages
from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.clock import Clock
from piebridge.core.contents import SampleContents, row_keys
from piebridge.core.decisions import Decisions
from piebridge.core.errors import Cancelled, RunFailed, UserError
from piebridge.core.files import user_cache_folder
from piebridge.core.loader import ImageLoader
from piebridge.core.run_cache import RunCache, shared_folder
from piebridge.core.run_folder import RunFolder
from piebridge.core.sources import CachedSource, Level, LevelSource
from piebridge.core.transforms import Transform

FOLDER = Path(__file__).resolve().parents[2] / "datasets" / "Clipart10"
WEIGHT = torch.from_numpy(np.random.RandomState(0).randn(3 * 32 * 32, 12).astype(np.float32)) / 50
SIZE = 32


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch, one_thread):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "user"))


@pytest.fixture
def images(tmp_path):
    """22 images of two classes."""
    (tmp_path / "images").mkdir()
    for path in sorted(FOLDER.glob("f*/*.jpg"))[:22]:
        shutil.copy(str(path), str(tmp_path / "images"))
    return tmp_path / "images"


class Run:
    """A run's workplace with a small network in place of a real one; counts the images that go through it."""

    def __init__(self, folder, images, stop_after=None, **settings):
        self.forwards, self.stop_after = [], stop_after
        config = build_config({}, {"cache.kind": "features", **settings}, "test")
        samples = [SimpleNamespace(path=str(path), label=number % 2) for number, path in enumerate(sorted(images.iterdir()))]
        clock = Clock()
        work = Workplace(config, None, "network", SimpleNamespace(train=samples), torch.device("cpu"), clock, RunFolder(folder), self,
                         Decisions(folder / "checkpoint" / "decisions.json", clock), BadImages(5))
        self.signal_name, self.work, self.everyone = None, work, list(range(len(samples)))
        transform = Transform(SIZE, (0.5,) * 3, (0.25,) * 3, augment=config.loader.augment)
        self.loader = ImageLoader(samples, transform, 0, on_bad=work.bad_images)
        self.level = Level("original", self.loader, self.segment)
        self.rows = RunCache(work, config.cache.dtype)

    def check(self):
        if self.stop_after is not None and len(self.forwards) >= self.stop_after:
            raise Cancelled("interrupted by SIGTERM")

    def segment(self, images):
        self.forwards.append(len(images))
        return images.flatten(1) @ WEIGHT

    def cache(self, view=0, level=None, indices=None):
        return self.rows.features(level or self.level, self.everyone if indices is None else indices, view, 8, (12,), "pooled", "eager")

    def plan(self):
        self.rows.report()
        return self.work.decisions.values["cache"]


def test_a_run_computes_each_image_once_and_says_so(tmp_path, images):
    run = Run(tmp_path / "run", images)
    cache = run.cache()
    assert run.forwards == [8, 8, 6]
    expected = run.segment(next(run.loader.batches([run.everyone]))[1]).numpy()
    np.testing.assert_allclose(cache.read(run.everyone), expected, atol=1e-4)
    assert run.plan() == {"kind": "features", "dtype": "float32", "views": 1, "is_shared": False, "rows_reused": 0, "rows_computed": 22,
                          "bytes": 22 * 48, "largest_relative_error": 0.0}
    assert run.work.clock.phases["cache"] > 0 and not (tmp_path / "user").exists()


def test_one_edited_image_is_one_forward_in_the_next_run(tmp_path, images):
    first = Run(tmp_path / "first", images, **{"cache.shared": True})
    before = first.cache().read(first.everyone)
    edited = sorted(images.iterdir())[13]
    shutil.copy(str(sorted(FOLDER.glob("mammals/*.jpg"))[0]), str(edited))
    second = Run(tmp_path / "second", images, **{"cache.shared": True})
    after = second.cache().read(second.everyone)
    assert second.forwards == [1] and second.plan()["rows_reused"] == 21 and second.plan()["rows_computed"] == 1
    others = [index for index in second.everyone if index != 13]
    assert np.array_equal(before[others], after[others]) and not np.array_equal(before[13], after[13])


def test_renamed_moved_and_removed_images_keep_their_rows(tmp_path, images):
    first = Run(tmp_path / "first", images, **{"cache.shared": True})
    before = first.cache().read(first.everyone)
    paths = sorted(images.iterdir())
    os.replace(str(paths[4]), str(images / "zzz.jpg"))
    paths[0].unlink()
    second = Run(tmp_path / "second", images, **{"cache.shared": True})
    after = second.cache().read(second.everyone)
    assert second.forwards == [] and np.array_equal(after, before[[1, 2, 3] + list(range(5, 22)) + [4]])


def test_a_run_of_its_own_finds_nothing_of_others(tmp_path, images):
    Run(tmp_path / "first", images, **{"cache.shared": True}).cache()
    alone = Run(tmp_path / "second", images)
    alone.cache()
    assert sum(alone.forwards) == 22 and alone.plan()["rows_reused"] == 0


@pytest.mark.parametrize("change", ["network", "tap", "level", "backend", "transform", "dtype"])
def test_whatever_decides_a_row_is_in_its_key(tmp_path, images, change):
    Run(tmp_path / "first", images, **{"cache.shared": True}).cache()
    run = Run(tmp_path / "second", images, **{"cache.shared": True, "cache.dtype": "float16" if change == "dtype" else "float32"})
    tap, backend = "another" if change == "tap" else "pooled", "openvino" if change == "backend" else "eager"
    if change == "network":
        run.work.fingerprint = "another"
    elif change == "level":
        run.level.identity = {"bridge": "another"}
    elif change == "transform":
        run.loader.transforms = [Transform(SIZE, (0.5,) * 3, (0.26,) * 3)]
    run.rows.features(run.level, run.everyone, 0, 8, (12,), tap, backend)
    assert sum(run.forwards) == 22


def test_bridge_maps_have_a_fingerprint_of_their_numbers():
    features = np.random.RandomState(0).randn(20, 5)
    first, same, other = [fit_bridge_map(features, features * factor)[0].fingerprint() for factor in (2.0, 2.0, 2.001)]
    assert first == same != other


def test_a_killed_run_goes_on_in_the_same_batches(tmp_path, images):
    whole = Run(tmp_path / "whole", images)
    expected = whole.cache().read(whole.everyone)
    killed = Run(tmp_path / "run", images, stop_after=2)
    with pytest.raises(Cancelled):
        killed.cache()
    assert killed.forwards == [8, 8]
    resumed = Run(tmp_path / "run", images)
    assert np.array_equal(resumed.cache().read(resumed.everyone), expected) and resumed.forwards == [6]
    assert resumed.plan() == whole.plan()  # the rows of its first session are its own


def test_what_a_shared_cache_gave_is_counted_once_though_a_run_is_resumed(tmp_path, images):
    indices = list(range(8))
    Run(tmp_path / "first", images, **{"cache.shared": True}).cache(indices=indices)
    killed = Run(tmp_path / "run", images, stop_after=1, **{"cache.shared": True})
    with pytest.raises(Cancelled):
        killed.cache()
    resumed = Run(tmp_path / "run", images, **{"cache.shared": True})
    resumed.cache()
    assert resumed.forwards == [6] and (resumed.plan()["rows_reused"], resumed.plan()["rows_computed"]) == (8, 14)


@pytest.mark.parametrize("augment", ["flip", "crop_flip"])
def test_views_in_turn_equal_features_computed_afresh(tmp_path, images, augment):
    """Bit for bit in float32 where the batches are those of the cache's chunks."""
    settings = {"loader.augment": augment, "cache.views": 3}
    run = Run(tmp_path / "run", images, **settings)
    caches = [run.cache(view) for view in range(3)]
    assert sum(run.forwards) == 3 * 22
    tables = [run.rows.table([(cache, run.everyone)]) for cache in caches]
    cached = CachedSource(tables, tables[0].usable, torch.device("cpu"), Clock())
    fresh = LevelSource([run.level], run.everyone, run.work.view_seed, torch.device("cpu"), Clock())
    seen = []
    for epoch in range(5):
        pairs = list(zip(cached.stream(caches[0].chunks, epoch, None), fresh.stream(caches[0].chunks, epoch, np.zeros(22, int))))
        assert len(pairs) == 3 and all(ours[0] == theirs[0] and torch.equal(ours[1], theirs[1]) for ours, theirs in pairs)
        seen.append(torch.cat([ours[1] for ours, _ in pairs]))
    assert torch.equal(seen[0], seen[3]) and torch.equal(seen[1], seen[4]) and not torch.equal(seen[0], seen[1])


def test_augmented_views_belong_to_a_place(tmp_path, images):
    """Views are drawn by seed, epoch and place; one image more at the front gives the others other views, which are computed."""
    settings = {"loader.augment": "crop_flip", "cache.views": 1, "cache.shared": True}
    Run(tmp_path / "first", images, **settings).cache()
    same = Run(tmp_path / "same", images, **settings)
    same.cache()
    assert same.forwards == []
    other_seed = Run(tmp_path / "seed", images, seed=1, **settings)
    other_seed.cache()
    assert sum(other_seed.forwards) == 22
    shutil.copy(str(sorted(FOLDER.glob("mammals/*.jpg"))[0]), str(images / "000.jpg"))
    longer = Run(tmp_path / "longer", images, **settings)
    longer.cache()
    assert sum(longer.forwards) == 23


@pytest.mark.parametrize("settings", [{}, {"loader.augment": "crop_flip", "cache.views": 2}])
def test_cached_pixels_give_the_same_images(tmp_path, images, settings):
    run = Run(tmp_path / "run", images, **dict(settings, **{"cache.kind": "pixels"}))
    cached = run.rows.pixel_loader(run.loader)
    plan = run.plan()
    assert (plan["kind"], plan["rows_computed"], plan["bytes"]) == ("pixels",) + (22 * plan["views"], 22 * plan["views"] * SIZE * SIZE * 3)
    lists = [[3, 1], [20, 0, 5, 5], []]
    for epoch in range(3):
        seed = run.work.view_seed(epoch)
        for (indices, found), (others, expected) in zip(cached.batches(lists, seed), run.loader.batches(lists, seed)):
            assert indices == others and torch.equal(found, expected)


def test_unreadable_images_are_each_reported_and_left_out(tmp_path, images):
    for name in ("bad.jpg", "worse.jpg"):  # one content
        (images / name).write_bytes(b"not an image")
    run = Run(tmp_path / "run", images)
    cache = run.cache()
    assert sorted(Path(path).name for path in run.work.bad_images.found) == ["bad.jpg", "worse.jpg"]
    assert len(cache.present()) == 22 and run.rows.table([(cache, cache.present())]).usable == cache.present()
    pixels = Run(tmp_path / "pixels", images, **{"cache.kind": "pixels"})
    ((indices, batch),) = pixels.rows.pixel_loader(pixels.loader).batches([pixels.everyone])
    assert indices == cache.present() and len(batch) == 22


def test_an_image_that_changes_under_the_run_is_not_stored_as_what_it_was(tmp_path, images):
    run = Run(tmp_path / "run", images)
    contents, path = run.rows._contents, Path(run.work.dataset.train[9].path)
    contents.digests(run.everyone)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(RunFailed, match="changed while it was read; start again"):
        run.cache()
    assert run.forwards == [8, 8]  # the first chunk is kept, the second is not
    again = Run(tmp_path / "run", images)
    again.cache()
    assert again.forwards == [8, 6]


def test_a_touched_image_is_the_same_image(tmp_path, images):
    samples = [SimpleNamespace(path=str(path)) for path in sorted(images.iterdir())]
    contents = SampleContents(samples, workers=2)
    before = contents.digests([0, 1])
    os.utime(samples[0].path, (1, 1))
    contents.confirm([0, 1])
    assert (contents.digests([0, 1]) == before).all() and before[0] != before[1]


def test_contents_are_sha256_and_pipes_are_not_opened(tmp_path):
    import hashlib

    (tmp_path / "a").write_bytes(b"x" * 3000000)
    os.mkfifo(str(tmp_path / "b"))
    contents = SampleContents([SimpleNamespace(path=str(tmp_path / name)) for name in "abc"], workers=0)
    assert contents.digests([0, 1, 2]).tolist() == [hashlib.sha256(b"x" * 3000000).digest().rstrip(b"\0"), b"", b""]
    keys = row_keys({}, contents.digests([1, 2]), [1, 2])
    assert keys[0] != keys[1]


def test_where_shared_rows_are_kept(tmp_path, monkeypatch):
    settings = build_config({}, {}, "test").cache
    assert shared_folder(settings) == tmp_path / "user" / "rows"
    monkeypatch.delenv("PIEBRIDGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert shared_folder(settings) == tmp_path / "xdg" / "piebridge" / "rows"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_folder() == Path.home() / ".cache" / "piebridge"
    assert shared_folder(build_config({}, {"cache.folder": str(tmp_path)}, "test").cache) == tmp_path


def test_the_budget_of_a_run(tmp_path, images):
    with pytest.raises(UserError, match="cache.budget=1KiB: 22 rows of 48 bytes take 1.03 KiB; raise it"):
        Run(tmp_path / "run", images, **{"cache.budget": "1KiB"}).cache()


def test_compressed_rows_state_their_error(tmp_path, images):
    exact = Run(tmp_path / "exact", images)
    reference = exact.cache().read(exact.everyone)
    for dtype, most in (("float16", 1e-3), ("int8", 0.02)):
        run = Run(tmp_path / dtype, images, **{"cache.dtype": dtype})
        rows = run.cache().read(run.everyone)
        error = (np.linalg.norm(rows - reference, axis=1) / np.linalg.norm(reference, axis=1)).max()
        assert run.plan()["largest_relative_error"] == pytest.approx(error, rel=0.01) and 0 < error < most
