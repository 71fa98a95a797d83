"""The graph editor: functions that return a changed graph and share everything unchanged.

    replace_nodes    one function of a node decides what takes its place
    map_bodies       the same for nested graphs
    rebuild, replace_inputs, prune    for passes with a loop of their own

Nodes are immutable, so only a changed node and the nodes that read it are made again. A graph in
which nothing changes stays the same object, and what is cached for it (uses, verification) stays
valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import NamedTuple

from bitwright.ir.graph import Graph, Node, Value

Replaced = Mapping[Value, Value]
"""Old values to new ones; values that are absent stay."""


class Replacement(NamedTuple):
    """New nodes, and the values that replace the results of the old node."""

    nodes: list[Node]
    results: tuple[Value, ...]


def replace_nodes(
    graph: Graph,
    change: Callable[[Node], Node | list[Node] | tuple[Value, ...] | Replacement],
    bodies: bool = True,
) -> Graph:
    """The graph with `change(node)` in place of each node, without nodes that became unused.

    `change` receives the node with new operands. It returns a node with as many results, a list of
    nodes with one of the results each, the values that replace the results, or a `Replacement`.
    """
    if bodies:
        graph = map_bodies(graph, lambda body: replace_nodes(body, change))
    replaced: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        answer = change(replace_inputs(node, replaced))
        if answer is node:
            nodes.append(node)
            continue
        if isinstance(answer, Replacement):
            nodes += answer.nodes
            answer = answer.results
        if isinstance(answer, Node):
            answer = [answer]
        if isinstance(answer, list):
            nodes += answer
            answer = tuple(value for made in answer for value in made.outputs)
        replaced.update(zip(node.outputs, answer, strict=True))
    return prune(rebuild(graph, nodes, replaced))


def map_bodies(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """The graph with `change` applied to every body of its nodes."""
    if not any(node.bodies for node in graph.nodes):
        return graph
    replaced: dict[Value, Value] = {}
    nodes = []
    for node in graph.nodes:
        new = replace_inputs(node, replaced)
        bodies = {name: change(body) for name, body in node.bodies.items()}
        if any(body is not node.bodies[name] for name, body in bodies.items()):
            new = new.with_(attrs={**node.attrs, **bodies})
        if new is not node:
            replaced.update(zip(node.outputs, new.outputs, strict=True))
        nodes.append(new)
    return rebuild(graph, nodes, replaced)


def replace_inputs(node: Node, replaced: Replaced) -> Node:
    """The node with replaced operands; the same object if none is."""
    for value in node.inputs:
        if value in replaced:
            inputs = [None if v is None else replaced.get(v, v) for v in node.inputs]
            return node.with_(inputs=tuple(inputs))
    return node


def rebuild(graph: Graph, nodes: Sequence[Node], replaced: Replaced) -> Graph:
    """The graph with these nodes and with replaced outputs and updates."""
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
