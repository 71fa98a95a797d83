"""Graphs made from graphs: what did not change is shared.

Nodes are immutable, so a node is made anew only if it changes or an operand of it did. A graph of
which nothing changed stays the same object: what was worked out about it (who reads which value,
that the verifier found it right) then need not be worked out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_

from bitwright.ir.graph import Graph, Node, Value

Replaced = Mapping[Value, Value]
"""What took the place of values; those that are not named stay."""


def renewed(node: Node, replaced: Replaced) -> Node:
    """The node on operands that took the place of its own."""
    for value in node.inputs:
        if value in replaced:
            inputs = [None if v is None else replaced.get(v, v) for v in node.inputs]
            return node.with_(inputs=tuple(inputs))
    return node


def rebuilt(graph: Graph, nodes: Sequence[Node], replaced: Replaced) -> Graph:
    """The graph with these nodes, and results that took the place of its own."""
    is_same = len(nodes) == len(graph.nodes) and all(map(is_, nodes, graph.nodes))
    if is_same and replaced.keys().isdisjoint(graph.results):
        return graph
    return graph.with_(
        nodes=tuple(nodes),
        outputs=tuple([(name, replaced.get(v, v)) for name, v in graph.outputs]),
        updates=tuple([(replaced.get(s, s), replaced.get(v, v)) for s, v in graph.updates]),
    )


def prune(graph: Graph) -> Graph:
    """The graph without nodes that no result needs; inputs, parameters and states stay."""
    needed = {v.node for v in graph.results}
    needed.update([s.node for s, _ in graph.updates])
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node in needed or node.op in ("input", "parameter", "state"):
            needed.update([v.node for v in node.inputs if v is not None])
            kept.append(node)
    if len(kept) == len(graph.nodes):
        return graph
    return graph.with_(nodes=tuple(reversed(kept)))


def map_bodies(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """The graph with `change` applied to every body of its nodes."""
    if not any(node.bodies for node in graph.nodes):
        return graph
    replaced: dict[Value, Value] = {}
    nodes = []
    for node in graph.nodes:
        new = renewed(node, replaced)
        bodies = {name: change(body) for name, body in node.bodies.items()}
        if any(body is not node.bodies[name] for name, body in bodies.items()):
            new = new.with_(attrs={**node.attrs, **bodies})
        if new is not node:
            replaced.update(zip(node.outputs, new.outputs, strict=True))
        nodes.append(new)
    return rebuilt(graph, nodes, replaced)
