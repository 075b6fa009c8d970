"""Pages of a mapped file leave the process, and nothing of the file is lost."""

import numpy as np
import pytest

from piebridge.core.mapped_memory import release


def resident_mib():
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("RssFile")) / 1024


@pytest.mark.parametrize("offset", [0, 4097])
def test_pages_leave_and_come_back(tmp_path, offset):
    path = tmp_path / "rows"
    path.write_bytes(bytes(offset) + bytes(32 << 20))
    mapped = np.memmap(str(path), np.uint8, "r+", offset=offset, shape=(32 << 20,))
    before = resident_mib()
    mapped[:] = 7
    assert resident_mib() > before + 24
    release(np.asarray(mapped))
    assert resident_mib() < before + 8
    assert mapped.min() == mapped.max() == 7 and path.read_bytes() == bytes(offset) + b"\7" * (32 << 20)


def test_nothing_at_all_is_no_error():
    release(np.zeros((0, 4)))
