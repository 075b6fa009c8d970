"""Progress bars: on a terminal that wants them, and nowhere else."""

import io
import logging
import sys

import pytest

from piebridge.core.progress_bar import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def logger():
    logger = logging.getLogger("piebridge")
    before = logger.level
    yield logger
    logger.setLevel(before)


@pytest.mark.parametrize("stream, level, is_shown", [(Terminal, logging.INFO, True), (Terminal, logging.DEBUG, True),
                                                     (Terminal, logging.WARNING, False), (io.StringIO, logging.INFO, False)])
def test_shown_on_a_terminal_unless_the_log_is_quiet(stream, level, is_shown, logger, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    logger.setLevel(level)
    with progress_bar(total=3, desc="work") as bar:
        bar.update(3)
        assert bar.disable is not is_shown
    assert list(progress_bar([1, 2])) == [1, 2]
