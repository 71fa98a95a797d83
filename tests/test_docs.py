"""The Python blocks of the documents run, in order, in one namespace per document.

docs/tour.md has a test of its own.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", [d for d in DOCUMENTS if d.name != "tour.md"], ids=name)
def test_blocks_run(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that they write
    text = file.read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    for block in BLOCK.finditer(text):
        # Empty lines in front, so that a traceback shows the line of the document.
        padding = "\n" * text.count("\n", 0, block.start(1))
        exec(compile(padding + block[1], str(file), "exec"), namespace)


@pytest.mark.parametrize("file", DOCUMENTS, ids=name)
def test_links_lead_somewhere(file):
    targets = LINK.findall(file.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (file.parent / target).exists()] == []
