"""The reference backend: the interpreter runs the graph. `bw.compile(target="reference")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.backends.base import Backend, Profile
from bitwright.backends.outputs import check_out
from bitwright.errors import RunError
from bitwright.ir.graph import Graph
from bitwright.ops.core.interpret import run

if TYPE_CHECKING:
    from bitwright.passes.manager import Pass

Array = np.ndarray[Any, Any]


class ReferenceEngine:
    """Runs a graph in the interpreter."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.states: dict[str, Array] = {}

    @property
    def description(self) -> str:
        return "in the interpreter"

    def copy(self) -> ReferenceEngine:
        twin = ReferenceEngine(self.graph)
        twin.states = {name: np.array(array) for name, array in self.states.items()}
        return twin

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None) -> dict[str, Any]:
        results = run(self.graph, feeds, states=self.states)
        held = [v.node.attrs.get("value") for v in (*self.graph.constants, *self.graph.parameters)]
        held += [*feeds.values(), *self.states.values()]
        owned: dict[str, Any] = {}
        for name, result in results.items():
            if out and name in out:
                check_out(name, out[name], np.shape(result), getattr(result, "dtype", None))
                out[name][...] = result
                owned[name] = out[name]
            else:
                shared = _shares_memory(result, [*held, *owned.values()])
                owned[name] = result.copy() if shared else result
        return owned

    def profile(self, feeds: Mapping[str, Any], rounds: int) -> Profile:
        raise RunError("only compiled models have steps to time", expected="target 'cpu'")


def _shares_memory(array: Any, others: list[Any]) -> bool:
    return isinstance(array, np.ndarray) and any(
        np.may_share_memory(array, other) for other in others if isinstance(other, np.ndarray)
    )


class ReferenceBackend(Backend[Graph, ReferenceEngine]):
    """The artifact is the graph itself."""

    @property
    def passes(self) -> tuple[Pass, ...]:
        return ()

    def build(self, graph: Graph) -> Graph:
        return graph

    def load(self, graph: Graph, artifact: Graph, threads: int | None = None) -> ReferenceEngine:
        return ReferenceEngine(artifact)


BACKEND = ReferenceBackend()
