"""What the row store itself costs: filling it with 1,200 rows of 1280 floats and reading 12 epochs in batches of 4, and hashing images.

python doc/experiments/row_store_costs.py [FOLDER OF IMAGES]
"""

import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from piebridge.core.cache import FeatureCache, RowTable
from piebridge.core.contents import SampleContents, row_keys
from piebridge.core.row_codec import FEATURE_DTYPES, RowCodec
from piebridge.core.row_store import RowStore

ROWS, WIDTH, EPOCHS, BATCH, CHUNK, REPEATS = 1200, 1280, 12, 4, 8, 5


def main():
    rows = np.random.RandomState(0).randn(ROWS, WIDTH).astype(np.float32)
    contents = np.array([b"%d" % index for index in range(ROWS)], "S32")
    for dtype in FEATURE_DTYPES:
        times = np.array([measured(dtype, rows, contents) for _ in range(REPEATS)])
        means = "  ".join(f"{name} {1000 * mean:.1f} ± {1000 * spread:.1f} ms" for name, mean, spread in
                          zip(("open and keys", "fill", "table", "12 epochs", "open again"), times.mean(0), times.std(0, ddof=1)))
        print(f"{dtype}: {means}")
    if sys.argv[1:]:
        samples = [SimpleNamespace(path=str(path)) for path in sorted(Path(sys.argv[1]).glob("**/*.*")) if path.is_file()]
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            SampleContents(samples).digests(range(len(samples)))
            seconds.append(time.perf_counter() - start)
        size = sum(Path(sample.path).stat().st_size for sample in samples)
        milliseconds = 1000 * np.array(seconds)
        print(f"hashing {len(samples)} files, {size / 2 ** 20:.1f} MiB: {milliseconds.mean():.1f} ± {milliseconds.std(ddof=1):.1f} ms")


def measured(dtype, rows, contents):
    """Seconds of each step."""
    random, marks = np.random.RandomState(1), [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        cache = opened(folder, dtype, contents)
        marks.append(time.perf_counter())
        cache.reserve()
        for number in cache.missing_chunks():
            indices = cache.missing(number)
            cache.write(indices, rows[indices])
        cache.close()
        marks.append(time.perf_counter())
        table = RowTable(cache.store, cache.codec, ROWS, [(cache, cache.present())])
        marks.append(time.perf_counter())
        for _ in range(EPOCHS):
            order = random.permutation(ROWS).tolist()
            for start in range(0, ROWS, BATCH):
                table.read(order[start:start + BATCH])
        marks.append(time.perf_counter())
        assert not opened(folder, dtype, contents).missing_chunks()
        marks.append(time.perf_counter())
    return np.diff(marks)


def opened(folder, dtype, contents):
    codec = RowCodec(dtype, (WIDTH,))
    return FeatureCache(RowStore(folder, {"dtype": dtype}, codec.row_bytes), codec, row_keys("", contents, range(ROWS)), range(ROWS), CHUNK)


if __name__ == "__main__":
    main()
