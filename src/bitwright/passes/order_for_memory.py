"""Moves nodes forward to where they free memory.

Nodes keep their order, but one that frees at least as many bytes as it makes, or makes only a few,
runs as soon as its operands are there. So in a training step the optimizer updates a parameter
right after its gradient, and the gradient's memory serves the next one. A node that replaces a
state in place comes after all other readers of the state, so that the old value needs no copy.
"""

from __future__ import annotations

from collections import Counter

from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.typical import typical_bytes
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.rewrite.trace import Trace

FEW_BYTES = 1024
IN_PLACE = frozenset({"sgd_update", "adam_update", "lion_update", "scatter", "scatter_elements"})
"""Ops that write to the memory of a state that they replace."""


def order_for_memory(graph: Graph, trace: Trace) -> Graph:
    """The graph with its nodes in another order; the results are the same."""
    nodes = _Order(graph).run()
    boundary = [node for node in graph.nodes if node.is_boundary]
    before = [node for node in graph.nodes if not node.is_boundary]
    moved = [new.name for new, old in zip(nodes, before, strict=True) if new is not old]
    if not moved:
        return graph
    trace.fired("order-for-memory", moved[0], ())
    return graph.with_(nodes=(*boundary, *nodes))


class _Order:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[Value, list[Node]] = {}
        self.unread: Counter[Value] = Counter()
        """How many nodes still have to read each value."""
        self.missing: dict[Node, int] = {}
        """How many operands of each node are still to be made."""
        for node in graph.nodes:
            operands = list(dict.fromkeys(node.operands))
            for value in operands:
                self.readers.setdefault(value, []).append(node)
            self.unread.update(operands)
            self.missing[node] = sum(not v.node.is_boundary for v in operands)
        self.kept = set(graph.results)
        self.replaced = {new: state for state, new in graph.updates}
        self.done: set[Node] = set()
        self.nodes: list[Node] = []
        """The computed nodes in their new order."""

    def run(self) -> list[Node]:
        self.done.update([node for node in self.graph.nodes if node.is_boundary])
        self._emit_early(list(reversed(self.graph.nodes)))
        for node in self.graph.nodes:
            if node not in self.done:
                self._emit_early(self._emit(node))
        return self.nodes

    def _emit_early(self, waiting: list[Node]) -> None:
        """Append those of the waiting nodes, the last one first, that should not wait longer."""
        while waiting:
            candidate = waiting.pop()
            if self._is_early(candidate):
                waiting += self._emit(candidate)

    def _emit(self, node: Node) -> list[Node]:
        """Append a node; the nodes that may follow at once, the first one last."""
        self.nodes.append(node)
        self.done.add(node)
        near: dict[Node, None] = {}
        for value in dict.fromkeys(node.operands):
            self.unread[value] -= 1
            near.update(dict.fromkeys(self.readers[value]))
        for value in node.outputs:
            for reader in self.readers.get(value, ()):
                self.missing[reader] -= 1
                near[reader] = None
        return [found for found in reversed(near) if found not in self.done]

    def _is_early(self, node: Node) -> bool:
        opdef = get(node.op)
        if node in self.done or self.missing[node] or (node.bodies and node.op != "fused"):
            return False
        if not opdef.deterministic or not self._are_states_read(node):
            return False
        made = sum(map(typical_bytes, self._new(node)))
        freed = sum(
            typical_bytes(v)
            for v in dict.fromkeys(node.operands)
            if self.unread[v] == 1 and v not in self.kept and not v.node.is_boundary
        )
        return made <= max(freed, FEW_BYTES)

    def _new(self, node: Node) -> list[Value]:
        """The results of a node that need memory of their own."""
        is_in_place = node.op in IN_PLACE
        return [v for v in node.outputs if not (is_in_place and v in self.replaced)]

    def _are_states_read(self, node: Node) -> bool:
        """Whether no other node reads a state that this one replaces."""
        stack = [self.replaced[v] for v in node.outputs if v in self.replaced]
        while stack:
            for reader in self.readers.get(stack.pop(), ()):
                if reader is node:
                    continue
                if reader not in self.done:
                    return False
                if get(reader.op).kind is Kind.MOVEMENT:
                    stack += reader.outputs
        return True
