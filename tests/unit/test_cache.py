"""The feature cache: exact, resumable, never stale or damaged."""

import numpy as np

from piebridge.core.cache import FeatureCache, GatheredFeatures

FEATURES = np.random.RandomState(0).randn(10, 6).astype(np.float32)


def open_cache(folder, key="key", indices=range(10)):
    return FeatureCache(folder, key, list(indices), width=6, chunk_size=4)


def fill(cache):
    for number in cache.missing_chunks():
        cache.write(number, cache.chunks[number], FEATURES[cache.chunks[number]])


def test_what_was_written_is_read(tmp_path):
    cache = open_cache(tmp_path)
    assert cache.chunks == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and cache.missing_chunks() == [0, 1, 2]
    fill(cache)
    assert np.array_equal(cache.read([9, 0, 5]), FEATURES[[9, 0, 5]])


def test_a_second_session_computes_only_what_is_missing(tmp_path):
    cache = open_cache(tmp_path)
    cache.write(1, [4, 5, 6, 7], FEATURES[4:8])
    del cache
    again = open_cache(tmp_path)
    assert again.missing_chunks() == [0, 2]
    assert np.array_equal(again.read([6]), FEATURES[[6]])


def test_another_key_or_other_samples_start_anew(tmp_path):
    fill(open_cache(tmp_path))
    assert open_cache(tmp_path, "other").missing_chunks() == [0, 1, 2]
    fill(open_cache(tmp_path))
    assert open_cache(tmp_path, indices=range(9, -1, -1)).missing_chunks() == [0, 1, 2]


def test_damage_is_found_and_repaired(tmp_path):
    fill(open_cache(tmp_path))
    path = tmp_path / "features.f32"
    damaged = bytearray(path.read_bytes())
    damaged[5 * 24 + 3] ^= 1  # one bit in sample 5
    path.write_bytes(bytes(damaged))
    cache = open_cache(tmp_path)
    assert cache.missing_chunks() == [1]
    fill(cache)
    assert np.array_equal(cache.read(list(range(10))), FEATURES)


def test_a_truncated_file_is_not_read(tmp_path):
    fill(open_cache(tmp_path))
    path = tmp_path / "features.f32"
    path.write_bytes(path.read_bytes()[:-1])
    assert open_cache(tmp_path).missing_chunks() == [0, 1, 2]


def test_gathered_features_come_each_from_its_cache(tmp_path):
    first, second = open_cache(tmp_path / "a"), open_cache(tmp_path / "b", indices=[7, 3])
    fill(first)
    second.write(0, [7, 3], -FEATURES[[7, 3]])
    gathered = GatheredFeatures(tmp_path / "all.f32", 10, 6, [(first, [0, 1, 2]), (second, [7, 3])])
    assert np.array_equal(gathered.read([3, 0, 7]), np.stack([-FEATURES[3], FEATURES[0], -FEATURES[7]]))
    assert np.array_equal(gathered.read([2, 1]), FEATURES[[2, 1]])


def test_an_unreadable_sample_stays_absent(tmp_path):
    cache = open_cache(tmp_path)
    cache.write(0, [0, 2, 3], FEATURES[[0, 2, 3]])
    for number in (1, 2):
        cache.write(number, cache.chunks[number], FEATURES[cache.chunks[number]])
    del cache
    again = open_cache(tmp_path)
    assert again.missing_chunks() == [] and again.present() == [0, 2, 3, 4, 5, 6, 7, 8, 9]
