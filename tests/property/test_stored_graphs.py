"""Random graphs that are stored and read back: the same schedule, bits and faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from random_graphs import random_graph

import bitwright as bw
from bitwright import knobs
from bitwright.errors import RunError
from bitwright.passes.simplify.eliminate_dead import eliminate_dead
from bitwright.pipeline import compile_graph
from bitwright.rewrite.trace import Trace


@pytest.mark.parametrize("seed", range(8))
def test_a_stored_graph_runs_as_before(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, feeds = random_graph(seed)
    graph = eliminate_dead(graph, Trace())
    path = tmp_path / "graph.bw"
    graph.save(path)
    before = compile_graph(graph, threads=1)
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "cache"))
    executables = [before, bw.compile(path, threads=1), bw.compile(path, threads=2)]
    assert len({str(e.engine.schedule) for e in executables}) == 1  # type: ignore[attr-defined]
    for inputs in feeds:
        given = {value.name: inputs[value.name] for value in graph.inputs}
        first, *others = (outcome(executable, given) for executable in executables)
        assert all(other == first for other in others)


def outcome(executable: bw.Executable, feeds: dict[str, Any]) -> Any:
    try:
        found = executable.run(feeds)
    except RunError as error:
        return str(error)
    return {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in found.items()}
