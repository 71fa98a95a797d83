"""Counts the multiply-adds of each product of a model on one batch.

    sizes     from the inputs of the batch; data-dependent sizes from a run on it
    bodies    times the number of elements of a scan, or the trip count of a loop

A loop that ends only by its condition counts as one iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bitwright.ir.dim import Dim, Size, Symbol, evaluate
from bitwright.ir.feeds import input_sizes
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core.flops import multiply_adds, node_flops
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.quant.calibration.intermediate_outputs import IntermediateOutputs
from bitwright.quant.data.batches import Batch


class Work:
    """The multiply-adds of a graph's nodes on one batch, bodies included.

    Without a batch every symbolic size counts as 1.
    """

    def __init__(self, graph: Graph, batch: Batch | None, threads: int | None = None) -> None:
        self.bindings: dict[str, int] = {}
        self._found: dict[str, Any] = {}
        if batch is None:
            self.bindings = {symbol.name: 1 for symbol in _symbols(graph)}
        else:
            self.bindings = input_sizes(graph, batch)
        self.given = dict(self.bindings)
        """The sizes of the inputs, without data-dependent sizes."""
        if batch is not None:
            self._found = self._observe(graph, batch, threads)
        self._times: dict[Node, int] = {}
        self._count_runs(graph, 1)

    def macs(self, node: Node) -> int:
        """Multiply-adds of a node; 0 if it is not a product."""
        return self._times[node] * multiply_adds(node, self.bindings)

    def _observe(self, graph: Graph, batch: Batch, threads: int | None) -> dict[str, Any]:
        """Run the graph for data-dependent sizes and trip counts; binds the sizes."""
        carriers = _carriers(graph, self.bindings)
        counts = [v for node in graph.nodes if (v := _trip_count(node)) and not v.is_constant]
        names = list(dict.fromkeys(v.name for v in (*carriers.values(), *counts)))
        if not names:
            return {}
        taps = IntermediateOutputs(graph, names, threads=threads, simplify=False)
        found = {name: np.array(array) for name, array in taps.run(batch)}
        for symbol, value in carriers.items():
            if value.name in found:
                axis = _axes(value).index(symbol)
                self.bindings[symbol.name] = found[value.name].shape[axis]
        return found

    def _count_runs(self, graph: Graph, times: int) -> None:
        for node in graph.nodes:
            self._times[node] = times
            for body in node.bodies.values():
                self._count_runs(body, times * self._runs(node))

    def _runs(self, node: Node) -> int:
        """The number of times a node runs its body."""
        if node.op == "scan":
            first = node.inputs[node.attrs["carried"]]
            assert first is not None
            axis = (node.attrs.get("input_axes") or (0,))[0]
            size = first.shape[normalize_axis(axis, first.rank)]
            return evaluate(size, self.bindings) if self._is_bound(size) else 1
        count = _trip_count(node)
        if count is None:
            return 1
        known = constant_value(count)
        known = self._found.get(count.name) if known is None else known
        return 1 if known is None else max(0, int(np.reshape(known, -1)[0]))

    def _is_bound(self, size: Size) -> bool:
        return not isinstance(size, Dim) or all(s.name in self.bindings for s in size.symbols)


def _symbols(graph: Graph) -> Iterator[Symbol]:
    for _, node in graph.walk():
        for value in node.outputs:
            if isinstance(value.type, TensorType):
                yield from value.tensor.symbols


def _trip_count(node: Node) -> Value | None:
    return node.inputs[0] if node.op == "loop" else None


def _carriers(graph: Graph, bindings: Mapping[str, int]) -> dict[Symbol, Value]:
    """For each data-dependent size of a product, a value with an axis of that size."""
    wanted: set[Symbol] = set()
    for node in graph.nodes:
        count = node_flops(node) if get(node.op).kind is Kind.COMPUTE else None
        if isinstance(count, Dim):
            wanted.update(symbol for symbol in count.symbols if symbol.name not in bindings)
    found: dict[Symbol, Value] = {}
    for node in graph.nodes if wanted else ():
        for value in node.outputs:
            if isinstance(value.type, TensorType):
                for symbol in wanted.intersection(_axes(value)):
                    found.setdefault(symbol, value)
    return found


def _axes(value: Value) -> list[Symbol | None]:
    """The symbol of each axis, or None where its size is not a plain symbol."""
    symbols = {symbol.name: symbol for symbol in value.tensor.symbols}
    return [symbols.get(str(size)) for size in value.shape]
