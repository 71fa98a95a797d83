"""Runs passes in order, verifies the graph after each, and records every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright import knobs
from bitwright.errors import BitwrightError, RewriteError
from bitwright.ir.graph import Graph
from bitwright.ops.core.check import verify
from bitwright.rewrite.trace import Trace

Pass = Callable[[Graph, Trace], Graph]


@dataclass(frozen=True)
class Stage:
    """The graph after a pass."""

    name: str
    graph: Graph


@dataclass
class History:
    """All stages of one compilation, and the trace of the rules."""

    stages: list[Stage] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    verified: set[Any] = field(default_factory=set)
    """What the verifier accepted in an earlier stage."""

    def add(self, name: str, graph: Graph) -> None:
        self.stages.append(Stage(name, graph))
        if folder := knobs.DUMP.get():
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            file = path / f"{len(self.stages) - 1:02d}-{graph.name.replace('/', '_')}-{name}.txt"
            file.write_text(f"{graph}\n")


def run_passes(graph: Graph, passes: Iterable[Pass], history: History | None = None) -> Graph:
    """The graph after all passes; an error names the failing pass and those before it."""
    history = History() if history is None else history
    if not history.stages:
        history.add("input", verify(graph, history.verified))
    for function in passes:
        history.trace.stage = function.__name__
        try:
            changed = function(graph, history.trace)
            if not isinstance(changed, Graph):
                kind = type(changed).__name__
                raise RewriteError("it returned no graph", expected="Graph", found=kind)
            graph = verify(changed, history.verified)
        except BitwrightError as error:
            before = ", ".join(stage.name for stage in history.stages)
            raise RewriteError(
                f"pass {function.__name__} failed: {error}", hint=f"It ran after: {before}."
            ) from error
        history.add(function.__name__, graph)
    return graph
