"""The golden fixture itself, on a folder of its own."""

from dataclasses import replace

import pytest


def test_writes_compares_and_shows_the_difference(golden, tmp_path):
    checking, updating = (replace(golden, folder=tmp_path, update=u) for u in (False, True))
    with pytest.raises(pytest.fail.Exception, match="--update-golden writes it"):
        checking("part/one", "a\nb")
    updating("part/one", "a\nb")
    assert (tmp_path / "part" / "one.txt").read_text() == "a\nb\n"
    checking("part/one", "a\nb\n")
    with pytest.raises(pytest.fail.Exception, match=r"-b\n\+c"):
        checking("part/one", "a\nc")
    updating("part/one", "a\nc")
    checking("part/one", "a\nc")
