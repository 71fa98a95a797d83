"""The reference interpreter as an engine: what `target="reference"` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.backends.outputs import check_out
from bitwright.ir.graph import Graph
from bitwright.ops.core.interpret import run

Array = np.ndarray[Any, Any]


class Reference:
    """The interpreter as an engine."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.states: dict[str, Array] = {}

    @property
    def place(self) -> str:
        return "in the interpreter"

    def copy(self) -> Reference:
        twin = Reference(self.graph)
        twin.states = {name: np.array(array) for name, array in self.states.items()}
        return twin

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None) -> dict[str, Any]:
        results = run(self.graph, feeds, states=self.states)
        kept = [v.node.attrs.get("value") for v in (*self.graph.constants, *self.graph.parameters)]
        kept += [*feeds.values(), *self.states.values()]
        owned: dict[str, Any] = {}
        for name, result in results.items():
            if out and name in out:
                check_out(name, out[name], np.shape(result), getattr(result, "dtype", None))
                out[name][...] = result
                owned[name] = out[name]
            else:
                owned[name] = result.copy() if _shares(result, [*kept, *owned.values()]) else result
        return owned


def _shares(array: Any, others: list[Any]) -> bool:
    return isinstance(array, np.ndarray) and any(
        np.may_share_memory(array, other) for other in others if isinstance(other, np.ndarray)
    )
