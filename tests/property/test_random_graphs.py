"""Random graphs, compiled, against the interpreter; `--random-graphs 10000` looks longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_graphs import random_graph
from random_layers import layered_graph

from bitwright.errors import RunError
from bitwright.ops.core.interpret import run
from bitwright.passes.simplify.eliminate_dead import eliminate_dead
from bitwright.pipeline import compile_graph
from bitwright.rewrite.trace import Trace

TOLERANCE = 1e-4
"""Of the largest number of a result: a few roundings to f32 that later steps magnify."""
PIECES = 20


@pytest.mark.parametrize("piece", range(PIECES))
def test_compiled_results_are_those_of_the_interpreter(
    piece: int, request: pytest.FixtureRequest
) -> None:
    for seed in range(piece, request.config.getoption("--random-graphs"), PIECES):
        check(seed)


@pytest.mark.parametrize("seed", [22651, 83951])
def test_bodies_whose_inputs_do_not_fix_a_size_of_the_graph_around(seed: int) -> None:
    check(seed)


def check(seed: int) -> None:
    graph, feeds = layered_graph(seed) if seed % 4 == 3 else random_graph(seed)
    graph = eliminate_dead(graph, Trace())
    executable = compile_graph(graph, threads=1 + seed % 3)
    for inputs in feeds:
        given = {v.name: inputs[v.name] for v in graph.inputs}
        try:
            expected = run(graph, given)
        except RunError:  # sizes that do not fit together are refused by both
            with pytest.raises(RunError):
                executable.run(given)
            continue
        found = executable.run(given)
        for name, want in expected.items():
            assert_close(found[name], want, f"seed {seed}, output {name}")


def assert_close(have: Any, want: Any, what: str) -> None:
    assert have.shape == want.shape, what
    assert have.dtype == want.dtype, what
    have, want = have.astype(np.float64), want.astype(np.float64)
    assert (np.isnan(have) == np.isnan(want)).all(), what
    finite = np.isfinite(want)
    assert (have[~finite & ~np.isnan(want)] == want[~finite & ~np.isnan(want)]).all(), what
    scale = max(1.0, float(np.abs(want[finite]).max(initial=0)))
    assert np.abs(have[finite] - want[finite]).max(initial=0) <= TOLERANCE * scale, what
