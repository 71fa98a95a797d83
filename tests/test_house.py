"""House rules that no formatter checks: short files, small folders, no markers for later work."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
WRITTEN = [
    file
    for folder in ("src", "tests", "examples", "docs")
    for pattern in ("*.py", "*.md")
    for file in sorted((ROOT / folder).rglob(pattern))
    if file != Path(__file__)
]
MARKERS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", SOURCES, ids=name)
def test_file_is_at_most_500_lines(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 500


def test_folder_has_at_most_25_files():
    counts = Counter(name(file.parent) for file in SOURCES)
    assert {folder: count for folder, count in counts.items() if count > 25} == {}


@pytest.mark.parametrize("file", WRITTEN, ids=name)
def test_nothing_is_left_for_later(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if MARKERS.search(line)] == []


def test_test_files_have_names_of_their_own():
    """Without packages, two of one name in different folders cannot be collected together."""
    names = [file.name for file in sorted((ROOT / "tests").rglob("test_*.py"))]
    assert [n for n in set(names) if names.count(n) > 1] == []
