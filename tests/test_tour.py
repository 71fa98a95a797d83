"""docs/tour.md runs, and prints what it says it prints."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

TOUR = Path(__file__).parent.parent / "docs" / "tour.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tour_prints_what_it_shows():
    text = TOUR.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 260, "the tour is the compiler in about 200 lines"
    namespace: dict[str, object] = {}
    printed = ""
    for kind, body in BLOCK.findall(text):
        if kind == "text":
            assert printed == body
            printed = ""
            continue
        assert printed == "", "what a block prints is shown"
        output = StringIO()
        with redirect_stdout(output):
            exec(compile(body, str(TOUR), "exec"), namespace)
        printed = output.getvalue()
    assert printed == ""
