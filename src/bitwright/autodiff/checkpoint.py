"""Recomputation in the backward pass: less memory for more arithmetic.

Some values of the forward pass are kept; they cut it into segments. When the sweep enters a segment
from its end, the segment is computed again from kept values, and gradient rules read these copies.
So only kept values and the intermediate values of one segment are in memory at a time. The last
segment is not computed again, because its values were made just before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from bitwright.errors import GraphError
from bitwright.ir.graph import Graph, Node, Value, nearest
from bitwright.ir.typical import typical_bytes
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.registry import get
from bitwright.ops.core.reverse import dependent


def chosen_values(
    graph: Graph, checkpoint: str | Sequence[str], target: Value, wrt: Iterable[Value]
) -> set[Value]:
    """The values to keep: those that match names or patterns, or those that "auto" selects."""
    forward = needed_nodes(graph, target)
    if checkpoint == "auto":
        return _automatic(forward, target, dependent(forward, set(wrt))[1])
    if isinstance(checkpoint, str):
        raise GraphError(
            "checkpoint has an unknown value",
            expected='None, "auto", or a list of names and patterns',
            found=repr(checkpoint),
            hint=f"Write [{checkpoint!r}] for a name.",
        )
    found: set[Value] = set()
    values = {v.name: v for node in forward if not node.is_boundary for v in node.outputs}
    for pattern in checkpoint:
        matches = [v for name, v in values.items() if fnmatchcase(name, pattern)]
        if not matches:
            raise GraphError(
                f"checkpoint names {pattern!r}, and no value on the way to the loss matches",
                hint=nearest(pattern, values),
            )
        found.update(matches)
    return found


def needed_nodes(graph: Graph, target: Value) -> list[Node]:
    """The nodes on which a value depends, in order."""
    needed, found = {target.node}, []
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(v.node for v in node.operands)
            found.append(node)
    return found[::-1]


def _automatic(forward: Sequence[Node], target: Value, reached: set[Value]) -> set[Value]:
    """Values at about √n cuts that divide the bytes of the n computed nodes evenly.

    Near each even share, the cut with the fewest bytes to keep is taken. Values that do not depend
    on what is differentiated (masks, position tables) are not counted.
    """
    last = {v: i for i, node in enumerate(forward) for v in node.operands}
    computed = [i for i, node in enumerate(forward) if not node.is_boundary]
    live: dict[Value, None] = {}
    crossing: dict[int, list[Value]] = {}
    made: dict[int, int] = {}
    total = 0
    for i, node in enumerate(forward):
        if node.is_boundary:
            continue
        live.update(dict.fromkeys(v for v in node.outputs if v in last))
        for value in node.operands:
            if last[value] == i:
                live.pop(value, None)
        total += sum(map(typical_bytes, node.outputs))
        crossing[i], made[i] = list(live), total
    segments = round(math.sqrt(len(computed)))
    kept: set[Value] = set()
    for number in range(1, segments):
        goal, reach = number * total / segments, total / segments / 2
        near = [i for i in computed if abs(made[i] - goal) <= reach and forward[i] != target.node]
        if near:
            best = min(near, key=lambda i: (_cost(crossing[i], reached), abs(made[i] - goal)))
            kept.update(crossing[best])
    return kept


def _cost(values: Iterable[Value], reached: set[Value]) -> int:
    return sum(typical_bytes(value) for value in values if value in reached)


class Recomputation:
    """Stands in for forward nodes during the sweep: gives rules recomputed operands and results."""

    def __init__(self, b: Builder, forward: Sequence[Node], kept: set[Value]) -> None:
        self.b = b
        self.kept = kept | {v for node in forward if _must_stay(node) for v in node.outputs}
        cuts = {value.node for value in kept}
        self.segments: dict[Node, int] = {}
        number = 0
        for node in forward:
            self.segments[node] = number
            number += node in cuts
        self.last = number
        self.current = number
        self.copies: dict[Value, Value] = {}
        self.entered: dict[Value, Value] = {}
        self.after: list[Value] = []

    def __call__(self, node: Node, dys: Sequence[Value | None]) -> Node:
        """The node with recomputed operands and results."""
        segment = self.segments.get(node, self.last)
        if segment == self.last:
            return node
        if segment != self.current:
            self.current = segment
            self.copies, self.entered = {}, {}
            self.after = [dy for dy in dys if dy is not None]
        inputs = tuple(None if v is None else self._value(v) for v in node.inputs)
        stand_in = node.with_(inputs=inputs)
        # the stand-in is no node of the graph: its results are values of others
        object.__setattr__(stand_in, "outputs", tuple(map(self._value, node.outputs)))
        return stand_in

    def _value(self, value: Value) -> Value:
        """The kept value, or its copy in this segment."""
        if self._is_kept(value):
            return value
        stack = [value.node]
        while stack:
            node = stack[-1]
            missing = [
                v.node for v in node.operands if not self._is_kept(v) and v not in self.copies
            ]
            if missing:
                stack += missing
                continue
            stack.pop()
            if node.outputs[0] not in self.copies:
                self._copy(node)
        return self.copies[value]

    def _is_kept(self, value: Value) -> bool:
        segment = self.segments.get(value.node, self.last)
        return value.node.is_boundary or value in self.kept or segment == self.last

    def _copy(self, node: Node) -> None:
        inputs = [None if v is None else self.copies.get(v) or self._entry(v) for v in node.inputs]
        if all(new is old for new, old in zip(inputs, node.inputs, strict=True)):
            inputs = [None if v is None else self._barrier(v) for v in node.inputs]
        names = tuple(self.b.fresh_name(f"again.{name}") for name in node.names)
        made = self.b.append(node.with_(inputs=tuple(inputs), names=names))
        self.copies.update(zip(node.outputs, made.outputs, strict=True))

    def _entry(self, value: Value) -> Value:
        """A kept value as an operand of copies; weights are read directly, so that they can be
        packed."""
        return value if value.node.op in ("parameter", "constant") else self._barrier(value)

    def _barrier(self, value: Value) -> Value:
        if value not in self.entered:
            self.entered[value] = self.b.optimization_barrier(value, *self.after)
        return self.entered[value]


def _must_stay(node: Node) -> bool:
    """Whether computing the node again may give something else."""
    return any(not get(inner.op).deterministic for inner in _with_bodies(node))


def _with_bodies(node: Node) -> Iterable[Node]:
    yield node
    for body in node.bodies.values():
        yield from (inner for _, inner in body.walk())
