"""A copy of a model that returns only counters of its quantized tensors.

The counters are nodes of the compiled graph (`range_counts`), so that a run returns a few numbers
per tensor and no tensor. What no counter needs is removed. Tensors in a branch of an `if` are
counted by a second `if`; those of the branch that is not taken have no values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.drift.tensors import BRANCHES, WatchedTensor
from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.edit import prune
from bitwright.ir.graph import Graph, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.math.range_counts import EXTRA
from bitwright.pipeline import compile_graph
from bitwright.quant.model.calibrated_ranges import OCTAVES
from bitwright.quant.model.quantized_inputs import builder_for

OUTPUT = "counters"


def counter_graph(graph: Graph, tensors: Sequence[WatchedTensor]) -> Graph:
    """The graph with the counters of all tensors as its only output, f64[tensors * numbers]."""
    return verify(_with_counters(graph, tensors))


def _with_counters(
    graph: Graph, tensors: Sequence[WatchedTensor], before: int = 0, after: int = 0
) -> Graph:
    """The counters of a graph, between those of tensors that it does not reach."""
    b = builder_for(graph)
    for node in graph.nodes:
        b.append(node)
    parts = [_no_values(b, before), *_parts(b, graph, tensors), _no_values(b, after)]
    rows = [part for part in parts if part is not None]
    result = b.op("concat", *rows, axis=0) if len(rows) > 1 else rows[0]
    return prune(graph.with_(nodes=tuple(b.nodes), outputs=((OUTPUT, result),), updates=()))


def _parts(b: Builder, graph: Graph, tensors: Sequence[WatchedTensor]) -> list[Value]:
    """Counters of the graph's own tensors, then of those in branches, in their order."""
    found = [_counters(b, one) for one in tensors if one.home is graph]
    for node in graph.nodes:
        if node.op != "if":
            continue
        inside = [_inside(node.bodies[branch], tensors) for branch in BRANCHES]
        then, other = map(len, inside)
        if then + other:  # a second `if` that only counts
            bodies = {
                "then": _with_counters(node.bodies["then"], inside[0], 0, other),
                "else": _with_counters(node.bodies["else"], inside[1], then, 0),
            }
            found.append(b.node("if", node.inputs, {**node.attrs, **bodies}, []).outputs[0])
    return found


def _inside(graph: Graph, tensors: Sequence[WatchedTensor]) -> list[WatchedTensor]:
    """The tensors in a graph and its bodies."""
    homes = {id(graph), *(id(home) for home, _ in graph.walk())}
    return [one for one in tensors if id(one.home) in homes]


def _no_values(b: Builder, count: int) -> Value | None:
    """Counters of tensors without values; None for no tensor."""
    row = np.zeros(2 * OCTAVES + 2 + EXTRA)
    row[-2:] = np.inf, -np.inf
    return b.constant(np.tile(row, count)) if count else None


def _counters(b: Builder, one: WatchedTensor) -> Value:
    x = one.value
    if one.scale is not None:
        x = b.round(b.div(x, one.scale))
    return b.range_counts(x, one.edges)  # type: ignore[no-any-return]


class Counting:
    """Runs the counters of a model on inputs."""

    def __init__(
        self, graph: Graph, tensors: Sequence[WatchedTensor], target: str, threads: int | None
    ) -> None:
        # the graph has its precision already: a policy must not apply twice
        self._exe = compile_graph(counter_graph(graph, tensors), target, threads, "f32")
        self._tensors = len(tensors)
        self._states = frozenset(state.name for state in self._exe.interface.states)
        self._inputs = frozenset(self._exe.input_names)

    @property
    def reads_state(self) -> bool:
        return bool(self._states)

    def run(self, feeds: Mapping[str, Any], states: Mapping[str, Array]) -> Array:
        """Counters [tensors, numbers] of one run that starts from these states."""
        exe: Executable = self._exe
        if self._states:
            exe.reset()
            kept = {name: array for name, array in states.items() if name in self._states}
            exe.engine.states.update(kept)
        given = {name: feeds[name] for name in self._inputs}
        found = np.asarray(exe.run(given)[OUTPUT], np.float64)
        return found.reshape(self._tensors, -1)
