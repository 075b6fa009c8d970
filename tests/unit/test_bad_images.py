"""Unreadable images: named once, counted over sessions, limited."""

import pytest

from piebridge.core.bad_images import BadImages
from piebridge.core.clock import Clock
from piebridge.core.decisions import Decisions
from piebridge.core.errors import UserError
from piebridge.core.images import BadImage


def test_each_is_logged_once_and_one_too_many_ends_the_run(caplog):
    bad = BadImages(2, known=[("a.jpg", "cut short")])
    bad(BadImage("a.jpg", "cut short"))
    bad(BadImage("b.jpg", "damaged"))
    bad(BadImage("b.jpg", "damaged"))
    assert [record.getMessage() for record in caplog.records] == ["b.jpg: cannot be read as an image (damaged); skipped"]
    with pytest.raises(UserError, match="3 images cannot be read, more than loader.max_bad_files=2; the last is c.jpg"):
        bad(BadImage("c.jpg", "damaged"))


def test_a_later_session_knows_them(tmp_path):
    decisions = Decisions(tmp_path / "decisions.json", Clock())
    BadImages(5, keep=lambda found: decisions.update("bad_files", found))(BadImage("a.jpg", "cut short"))
    again = Decisions(tmp_path / "decisions.json", Clock())
    assert BadImages(5, again.values["bad_files"]).found == {"a.jpg": "cut short"}
