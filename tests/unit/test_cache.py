"""The row store and the caches in it: exact, resumable, shared, within a budget, never stale or damaged."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from piebridge.core.byte_sizes import parse_bytes, shown_bytes
from piebridge.core.cache import FeatureCache, RowTable
from piebridge.core.contents import row_keys
from piebridge.core.errors import UserError
from piebridge.core.row_codec import RowCodec
from piebridge.core.row_store import RowStore

ROOT = Path(__file__).resolve().parents[2]
FEATURES = np.random.RandomState(0).randn(10, 6).astype(np.float32)
CONTENTS = np.array([b"content of %d" % index for index in range(10)], "S32")
LAYOUT = {"what": "features"}


def open_store(folder, layout=LAYOUT, budget=None, width=6):
    return RowStore(folder, layout, 4 * width, budget)


def open_cache(folder, settings="settings", indices=range(10), contents=CONTENTS, store=None):
    indices = list(indices)
    keys = row_keys(settings, contents[indices], indices)
    return FeatureCache(store or open_store(folder), RowCodec("float32", (6,)), keys, indices, chunk_size=4)


def fill(cache):
    """Compute what is missing; returns the samples that were."""
    cache.reserve()
    computed = [cache.missing(number) for number in cache.missing_chunks()]
    for indices in computed:
        cache.write(indices, FEATURES[indices])
    cache.close()
    return sum(computed, [])


def only(folder, suffix):
    (path,) = Path(str(folder)).glob("*/*" + suffix)
    return path


def damage(path, place, bit=1):
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(bytes(content))


def test_what_was_written_is_read(tmp_path):
    cache = open_cache(tmp_path)
    assert cache.chunks == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and cache.missing_chunks() == [0, 1, 2]
    assert fill(cache) == list(range(10)) and (cache.found, cache.lacking) == (0, 10)
    assert np.array_equal(cache.read([9, 0, 5]), FEATURES[[9, 0, 5]])
    assert only(tmp_path, ".rows").stat().st_size == 10 * 24


def test_a_second_session_computes_only_what_is_missing(tmp_path):
    cache = open_cache(tmp_path)
    cache.write([4, 5, 6, 7], FEATURES[4:8])
    again = open_cache(tmp_path)
    assert again.missing_chunks() == [0, 2] and (again.found, again.lacking) == (4, 6)
    assert np.array_equal(again.read([6]), FEATURES[[6]])


def test_rows_are_found_by_content_whatever_the_place(tmp_path):
    fill(open_cache(tmp_path))
    order = [7, 2, 9, 0]
    moved = np.concatenate([CONTENTS[order], CONTENTS[:3]])
    cache = open_cache(tmp_path, contents=moved, indices=range(7))
    assert cache.missing_chunks() == []
    assert np.array_equal(cache.read(range(7)), FEATURES[order + [0, 1, 2]])


def test_one_edited_image_costs_one_row(tmp_path):
    fill(open_cache(tmp_path))
    edited = CONTENTS.copy()
    edited[5] = b"edited"
    assert fill(open_cache(tmp_path, contents=edited)) == [5]
    assert fill(open_cache(tmp_path, contents=edited)) == [] and fill(open_cache(tmp_path)) == []


def test_other_settings_find_nothing(tmp_path):
    fill(open_cache(tmp_path))
    assert open_cache(tmp_path, "other settings").missing_chunks() == [0, 1, 2]


def test_samples_of_one_content_share_a_row(tmp_path):
    contents = CONTENTS.copy()
    contents[[6, 9]] = contents[2]
    cache = open_cache(tmp_path, contents=contents)
    assert fill(cache) == [0, 1, 2, 3, 4, 5, 7, 8] and cache.untried() == []
    assert np.array_equal(cache.read([6, 9, 2]), FEATURES[[2, 2, 2]]) and cache.present() == list(range(10))


def test_an_unreadable_sample_stays_absent_and_its_chunk_keeps_its_batches(tmp_path):
    contents = CONTENTS.copy()
    contents[[5, 8]] = contents[1]
    cache = open_cache(tmp_path, contents=contents)
    cache.write([0, 2, 3], FEATURES[[0, 2, 3]])  # 1 could not be read
    again = open_cache(tmp_path, contents=contents)
    assert [again.missing(number) for number in again.missing_chunks()] == [[1], [4, 6, 7], [9]]
    assert again.untried() == [5, 8]  # they are looked at under their own names, so that each is reported
    assert again.present() == [0, 2, 3]


def test_a_damaged_row_takes_its_chunk_with_it(tmp_path):
    fill(open_cache(tmp_path))
    damage(only(tmp_path, ".rows"), 5 * 24 + 3)
    cache = open_cache(tmp_path)
    assert cache.missing_chunks() == [1]
    assert fill(cache) == [4, 5, 6, 7]
    assert np.array_equal(cache.read(list(range(10))), FEATURES)
    assert np.array_equal(open_cache(tmp_path).read(list(range(10))), FEATURES)


@pytest.mark.parametrize("place", range(0, 660, 37))
def test_one_bit_anywhere_in_the_index_gives_no_wrong_row(tmp_path, place):
    fill(open_cache(tmp_path))
    index = only(tmp_path, ".index")
    damage(index, place % index.stat().st_size, bit=1 << place % 8)
    cache = open_cache(tmp_path)
    assert cache.missing_chunks()  # each record is sealed
    assert np.array_equal(cache.read(cache.present()), FEATURES[cache.present()])
    fill(cache)
    assert np.array_equal(open_cache(tmp_path).read(list(range(10))), FEATURES)


@pytest.mark.parametrize("suffix", [".rows", ".index"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_read_as_far_as_it_goes(tmp_path, suffix, share):
    fill(open_cache(tmp_path))
    path = only(tmp_path, suffix)
    path.write_bytes(path.read_bytes()[:int(share * path.stat().st_size)])
    cache = open_cache(tmp_path)
    assert cache.missing_chunks() and np.array_equal(cache.read(cache.present()), FEATURES[cache.present()])
    fill(cache)
    assert np.array_equal(cache.read(list(range(10))), FEATURES)


def test_a_missing_or_foreign_file_is_no_cache(tmp_path):
    fill(open_cache(tmp_path / "a"))
    other = open_store(tmp_path / "b", {"what": "something else"})
    fill(open_cache(None, store=other))
    other.close()
    for suffix in (".rows", ".index"):  # another layout's pack under this one's name
        os.replace(str(only(tmp_path / "b", suffix)), str(only(tmp_path / "a", suffix)))
    (only(tmp_path / "a", ".rows").parent / "notes.index").write_bytes(b"my notes")
    assert open_cache(tmp_path / "a").missing_chunks() == [0, 1, 2]
    fill(open_cache(tmp_path / "c"))
    only(tmp_path / "c", ".rows").unlink()
    assert open_cache(tmp_path / "c").missing_chunks() == [0, 1, 2]


def test_two_writers_at_once_are_both_right(tmp_path):
    caches = [open_cache(tmp_path) for _ in range(4)]
    threads = [threading.Thread(target=fill, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for cache in caches + [open_cache(tmp_path)]:
        assert np.array_equal(cache.read(list(range(10))), FEATURES) and cache.missing_chunks() == []


KILLED = """
import sys, os
sys.path.insert(0, "tests/unit")
from test_cache import *
cache = open_cache(sys.argv[1])
cache.reserve()
cache.write([0, 1, 2, 3], FEATURES[:4])
only(sys.argv[1], ".index").open("ab").write(b"rows and half a record")
os.kill(os.getpid(), 9)
"""


def test_a_killed_writer_blocks_nobody_and_loses_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=str(ROOT), env=dict(os.environ, PYTHONPATH=str(ROOT)))
    assert done.returncode == -9 and only(tmp_path, ".rows").stat().st_size == 10 * 24
    cache = open_cache(tmp_path)
    assert only(tmp_path, ".rows").stat().st_size == 4 * 24  # what it had reserved is given back
    assert fill(cache) == [4, 5, 6, 7, 8, 9]
    assert np.array_equal(open_cache(tmp_path).read(list(range(10))), FEATURES)


def test_a_reservation_of_a_live_writer_stays(tmp_path):
    writer = open_cache(tmp_path)
    writer.reserve()
    open_cache(tmp_path)
    assert only(tmp_path, ".rows").stat().st_size == 10 * 24
    fill(writer)
    assert open_cache(tmp_path).missing_chunks() == []


def test_the_budget_is_checked_before_anything_is_computed(tmp_path):
    cache = open_cache(tmp_path, store=open_store(tmp_path, budget=239))
    with pytest.raises(UserError) as caught:
        cache.reserve()
    assert str(caught.value) == ("cache.budget=239bytes: 10 rows of 24 bytes take 240 bytes; raise it, choose cache.dtype=float16 or int8, "
                                 "or cache.kind=none")
    open_cache(tmp_path, store=open_store(tmp_path, budget=240)).reserve()


def test_a_full_disk_is_said_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 100}))
    with pytest.raises(UserError, match="10 rows of 24 bytes take 240 bytes, and the disk has 100 bytes free; free some space"):
        open_cache(tmp_path).reserve()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cache.folder=.*file: cannot be written"):
        open_cache(tmp_path / "file").reserve()


def test_what_was_not_used_for_longest_makes_room_but_never_what_is_in_use(tmp_path):
    stores = [open_store(tmp_path, {"what": name}) for name in ("old", "in use", "recent")]
    for age, store in zip((300, 400, 100), stores):
        fill(open_cache(None, store=store))
        index = next(store.folder.glob("*.index"))
        os.utime(str(index), (1e9 - age, 1e9 - age))
    stores[0].close()
    stores[2].close()
    newcomer = open_store(tmp_path, {"what": "new"}, budget=3 * 240)
    fill(open_cache(None, store=newcomer))
    assert not stores[0].folder.exists()  # the oldest of those that nobody uses
    assert np.array_equal(open_cache(None, store=stores[1]).read([3]), FEATURES[[3]])
    assert open_cache(None, store=open_store(tmp_path, {"what": "recent"})).missing_chunks() == []
    with pytest.raises(UserError, match="of which others in use take 480 bytes|of which others in use take 720 bytes"):
        open_cache(None, store=open_store(tmp_path, {"what": "too much"}, budget=300)).reserve()


def test_a_table_reads_each_sample_from_its_cache(tmp_path):
    store = open_store(tmp_path)
    first, second = open_cache(None, store=store), open_cache(None, "other", indices=[7, 3], store=store)
    fill(first)
    second.write([7, 3], -FEATURES[[7, 3]])
    table = RowTable(store, first.codec, 10, [(first, [0, 1, 2]), (second, [7, 3])])
    assert table.usable == [0, 1, 2, 3, 7]
    assert np.array_equal(table.read([3, 0, 7]), np.stack([-FEATURES[3], FEATURES[0], -FEATURES[7]]))
    assert np.array_equal(np.concatenate(list(table.pieces())), table.read([0, 1, 2, 3, 7]))
    with pytest.raises(IndexError):
        table.read([4])


def test_a_table_over_two_packs(tmp_path):
    fill(open_cache(tmp_path, indices=[0, 1, 2]))
    cache = open_cache(tmp_path)
    assert fill(cache) == list(range(3, 10))
    table = RowTable(cache.store, cache.codec, 10, [(cache, range(10))])
    assert np.array_equal(table.read([9, 0, 4, 2]), FEATURES[[9, 0, 4, 2]])
    with pytest.raises(IndexError):
        RowTable(cache.store, cache.codec, 11, [(cache, range(10))]).read([10])


@pytest.mark.parametrize("shape", [(7,), (3, 2, 2), ()])
def test_codecs_and_their_stated_errors(shape):
    rows = np.random.RandomState(1).randn(5, *shape).astype(np.float32) * 100
    rows[2] = 0
    flat = rows.reshape(5, -1).astype(np.float64)
    scale = np.abs(flat).max(1, keepdims=True) / 127
    expected = {"float32": flat, "float16": flat.astype(np.float16).astype(np.float64),
                "int8": np.rint(flat / np.where(scale > 0, scale, 1)) * scale}
    for dtype, reference in expected.items():
        codec = RowCodec(dtype, shape)
        packed, error = codec.encode(rows)
        assert packed.dtype == np.uint8 and packed.shape == (5, codec.row_bytes)
        assert codec.row_bytes == {"float32": 4, "float16": 2, "int8": 1}[dtype] * flat.shape[1] + (4 if dtype == "int8" else 0)
        decoded = codec.decode(packed)
        assert decoded.dtype == np.float32 and decoded.shape == rows.shape
        np.testing.assert_allclose(decoded.reshape(5, -1), reference, rtol=1e-6, atol=0)
        norms = np.maximum(np.linalg.norm(flat, axis=1), 1e-30)
        assert error == pytest.approx((np.linalg.norm(reference - flat, axis=1) / norms).max(), rel=1e-3, abs=1e-9)
    pixels = np.random.RandomState(2).randint(0, 256, (5,) + shape).astype(np.uint8)
    assert np.array_equal(RowCodec("uint8", shape).decode(RowCodec("uint8", shape).encode(pixels)[0]), pixels)


def test_features_beyond_float16_are_refused():
    with pytest.raises(UserError, match="cache.dtype=float16: holds numbers up to 65504, and the features reach 7e.04; use"):
        RowCodec("float16", (2,)).encode(np.array([[1, -70000]], np.float32))


def test_the_largest_error_is_kept_with_the_rows(tmp_path):
    codec, keys = RowCodec("int8", (6,)), row_keys("", CONTENTS, range(10))
    errors = []
    for _ in range(2):
        cache = FeatureCache(RowStore(tmp_path, LAYOUT, codec.row_bytes), codec, keys, range(10), 4)
        fill(cache)
        errors.append(cache.error())
    relative = np.linalg.norm(cache.read(range(10)) - FEATURES, axis=1) / np.linalg.norm(FEATURES, axis=1)
    assert errors == pytest.approx([relative.max()] * 2, rel=1e-4) and 0.001 < errors[0] < 0.01


@pytest.mark.parametrize("text, expected", [("2GiB", 2 ** 31), ("1.5 mb", 1500000), ("77", 77), ("512MiB", 2 ** 29), ("1TB", 10 ** 12)])
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 elephants", "1e9", "9" * 400])
def test_wrong_sizes(text):
    with pytest.raises(UserError, match="is not a size; write for example 512MiB or 2GiB"):
        parse_bytes(text)


def test_sizes_are_shown_in_their_unit():
    assert [shown_bytes(count) for count in (3, 1024, 1536 * 2 ** 20, 2000 * 2 ** 30)] == ["3 bytes", "1 KiB", "1.5 GiB", "2000 GiB"]


MEMORY = """
import sys, re
sys.path.insert(0, "tests/unit")
import numpy as np
from piebridge.core.cache import FeatureCache, RowTable
from piebridge.core.contents import row_keys
from piebridge.core.row_codec import RowCodec
from piebridge.core.row_store import RowStore

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024

folder, count, random = sys.argv[1], int(sys.argv[2]), np.random.RandomState(0)
contents = np.array([b"%d" % index for index in range(count)], "S32")
before, most = anonymous(), 0
for session in range(2):  # fill it, then read it again
    codec = RowCodec("float32", (1280,))
    cache = FeatureCache(RowStore(folder, {}, codec.row_bytes), codec, row_keys("", contents, range(count)), range(count), 8)
    cache.reserve()
    for number in cache.missing_chunks():
        cache.write(cache.missing(number), random.standard_normal((len(cache.missing(number)), 1280)).astype(np.float32))
    table = RowTable(cache.store, codec, count, [(cache, range(count))])
    for start in range(0, count, 4):
        total = table.read(list(range(start, start + 4))).sum()
        most = max(most, anonymous() - before) if start % 400 == 0 else most
print(most)
"""


def test_memory_does_not_grow_with_the_rows(tmp_path):
    """20,000 rows are 98 MiB. What grows is a sample's key and place, about 200 bytes."""
    used = []
    for count in (1000, 20000):
        done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path / str(count)), str(count)], cwd=str(ROOT), check=True,
                              stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=str(ROOT)), universal_newlines=True)
        used.append(float(done.stdout))
    assert used[1] - used[0] < 15, used
