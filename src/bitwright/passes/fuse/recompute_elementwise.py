"""Gives each reader of a cheap elementwise result a copy of its own, where no result must be kept.

    d = x - mean                     y = relu((x - mean) * a)
    y = relu(d * a)            ->    s = sum(y)
    s = sum(y)                       z = (x - mean) * s
    z = d * s

In a training step such results are read in the forward and again in the backward pass, and stay in
memory in between. The copies fuse into their readers, so neither a store nor a buffer remains.
Full-size operands that nothing else needs until the last reader must not have more bytes than the
result, so at no time more bytes are live than before. A reader has at most one more full-size
operand to read. The same ops run on the same operands, so all bits stay. Half floats are left
alone: inside a region they are not rounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from bitwright.ir.dtype import bf16, f16
from bitwright.ir.edit import rebuild, replace_inputs
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.naming import take_name
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.passes.fuse.fuse_regions import is_elementwise
from bitwright.rewrite.trace import Trace

SELECTIONS = frozenset({"where", "cast", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"})
"""Ops that cost as little as those that are declared cheap."""
MAX_DEPTH = 8
"""Ops in a row that are computed again."""


def recompute_elementwise(graph: Graph, trace: Trace) -> Graph:
    """The graph with copies of cheap elementwise nodes in front of their readers."""
    chosen = _Choice(graph, trace).run()
    if not chosen:
        return graph
    taken = set(graph.values)
    nodes: list[Node] = []
    replaced: dict[Value, Value] = {}

    def copy_of(value: Value) -> Value:
        inputs = [copy_of(v) if v in chosen else replaced.get(v, v) for v in value.node.operands]
        given = iter(inputs)
        operands = tuple(None if v is None else next(given) for v in value.node.inputs)
        name = take_name(f"again.{value.name}", taken)
        nodes.append(value.node.with_(inputs=operands, names=(name,)))
        return nodes[-1].outputs[0]

    for node in graph.nodes:
        if node.outputs and node.outputs[0] in chosen:
            continue
        copies = {v: copy_of(v) for v in dict.fromkeys(node.operands) if v in chosen}
        new = replace_inputs(node, {**replaced, **copies})
        if new is not node:
            replaced.update(zip(node.outputs, new.outputs, strict=True))
        nodes.append(new)
    return rebuild(graph, nodes, replaced)


class _Choice:
    """Chooses the values that are computed again, later ones first."""

    def __init__(self, graph: Graph, trace: Trace) -> None:
        self.graph, self.trace = graph, trace
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.results = set(graph.results)
        self.readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(node.operands):
                self.readers.setdefault(value, []).append(node)
        self.anchors = [place for node, place in self.place.items() if _is_anchor(node)]
        self.chosen: set[Value] = set()

    def run(self) -> set[Value]:
        for node in reversed(self.graph.nodes):
            if not _is_cheap(node) or node.outputs[0] in self.results:
                continue
            value = node.outputs[0]
            readers = self._final_readers(value)
            if not self._is_kept_long(readers):
                continue
            if reason := self._why_not(value, readers):
                self.trace.refused("compute-again", node.name, reason)
            else:
                self.chosen.add(value)
                self.trace.fired("compute-again", node.name, [r.name for r in readers])
        return self.chosen

    def _final_readers(self, value: Value) -> list[Node]:
        """The readers of a value that stay in the graph: copies stand in front of those."""
        found: dict[Node, None] = {}
        for reader in self.readers.get(value, ()):
            if reader.outputs and reader.outputs[0] in self.chosen:
                found.update(dict.fromkeys(self._final_readers(reader.outputs[0])))
            else:
                found[reader] = None
        return list(found)

    def _is_kept_long(self, readers: list[Node]) -> bool:
        """Whether a node that is no part of an elementwise region lies between two readers."""
        if len(readers) < 2:
            return False
        places = [self.place[reader] for reader in readers]
        first = bisect_left(self.anchors, min(places))
        return first < len(self.anchors) and self.anchors[first] < max(places)

    def _why_not(self, value: Value, readers: list[Node]) -> str:
        for reader in readers:
            if not is_elementwise(reader) or reader.outputs[0].shape != value.shape:
                return f"%{reader.name} does not compute it while it reads"
        last = max(self.place[reader] for reader in readers)
        leaves = set(self._leaves(value, value, MAX_DEPTH))
        kept_longer = [v for v in leaves if not self._is_kept(v, last)]
        if sum(v.dtype.bits for v in kept_longer) > value.dtype.bits:
            return f"%{kept_longer[0].name} would stay in memory in its place"
        for reader in readers:
            if len(leaves.difference(reader.operands)) > 1:
                return f"%{reader.name} would read several operands in its place"
        return ""

    def _leaves(self, value: Value, whole: Value, depth: int) -> Iterator[Value]:
        """The full-size operands that copies read."""
        for operand in value.node.operands:
            if operand.shape != whole.shape:
                continue
            if depth and _is_cheap(operand.node) and self.graph.uses[operand] == 1:
                yield from self._leaves(operand, whole, depth - 1)
            else:
                yield operand

    def _is_kept(self, value: Value, last: int) -> bool:
        """Whether a value is in memory at a place anyway."""
        is_owned = value.node.is_boundary or value in self.results
        return is_owned or any(self.place[r] >= last for r in self._final_readers(value))


def _is_cheap(node: Node) -> bool:
    if not is_elementwise(node) or node.outputs[0].dtype in (f16, bf16):
        return False
    opdef = get(node.op)
    return (opdef.is_cheap or node.op in SELECTIONS) and opdef.deterministic


def _is_anchor(node: Node) -> bool:
    is_free = node.is_boundary or is_elementwise(node)
    return not is_free and get(node.op).kind is not Kind.MOVEMENT
