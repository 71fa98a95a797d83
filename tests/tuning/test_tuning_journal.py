"""The journal: append, incomplete lines, other problems."""

import pytest

from bitwright.errors import BitwrightError
from bitwright.tuning.precision.journal import FILE, Journal

PROBLEM = {"model": "abc", "objective": "latency"}


def test_events_survive_and_an_incomplete_line_is_dropped(tmp_path):
    journal = Journal(tmp_path, PROBLEM, resume=False)
    journal.add("trial", recipe={"base": "int8"}, elapsed=3.5)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"event": "trial", "rec')
    again = Journal(tmp_path, PROBLEM, resume=True)
    assert again.last("trial")["recipe"] == {"base": "int8"} and again.elapsed == 3.5
    again.add("best", name="x")
    third = Journal(tmp_path, PROBLEM, resume=True)
    assert [one["event"] for one in third.events] == ["problem", "trial", "best"]


def test_a_new_search_starts_an_empty_journal(tmp_path):
    Journal(tmp_path, PROBLEM, resume=False).add("trial")
    assert len(Journal(tmp_path, PROBLEM, resume=False).events) == 1


def test_a_journal_of_another_search_is_refused(tmp_path):
    Journal(tmp_path, PROBLEM, resume=False)
    with pytest.raises(BitwrightError, match="objective differ"):
        Journal(tmp_path, {**PROBLEM, "objective": "size"}, resume=True)


@pytest.mark.parametrize("text", ["", "\n", "not json\n", "[1]\n"])
def test_a_damaged_journal_is_an_empty_one(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert len(Journal(tmp_path, PROBLEM, resume=True).events) == 1
