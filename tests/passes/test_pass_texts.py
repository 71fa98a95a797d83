"""Golden texts of passes: `bitwright opt --passes … file` reproduces each.

The first line of an input names the passes; `pytest --update-golden` writes what they give.
"""

from pathlib import Path

import pytest

from bitwright.ir import parse
from bitwright.passes.manager import run_passes
from bitwright.pipeline import PASSES

INPUTS = sorted((Path(__file__).parent / "inputs").glob("*.txt"))


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.stem)
def test_pass_gives_the_golden_text(path, golden):
    text = path.read_text()
    names = text.splitlines()[0].removeprefix("## passes: ").split(",")
    graph = run_passes(parse(text), [PASSES[name] for name in names])
    golden(f"passes/{path.stem}", str(graph))
