"""Rebuilding a graph node by node, for passes that are not a set of rules."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from bitwright.ir.dtype import DType
from bitwright.ir.edit import map_bodies, prune, rebuilt, renewed
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get


class Replacement(NamedTuple):
    """New nodes, and the values that stand for the results of the old one."""

    nodes: list[Node]
    results: tuple[Value, ...]


def replace_nodes(
    graph: Graph,
    change: Callable[[Node], Node | list[Node] | tuple[Value, ...] | Replacement],
    bodies: bool = True,
) -> Graph:
    """The graph with each node (its operands already new) exchanged for what `change` gives.

    `change` answers a node with as many results, a list of nodes with one of the results each, the
    values that stand for the results, or a `Replacement`.
    Nodes that nothing needs any more are left out.
    """
    if bodies:
        graph = map_bodies(graph, lambda body: replace_nodes(body, change))
    replaced: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        answer = change(renewed(node, replaced))
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
    return prune(rebuilt(graph, nodes, replaced))


def stands_behind(value: Value, ops: Container[str], element: DType | None = None) -> bool:
    """Whether one of these ops (with results of this type) made the value, with elementwise work
    behind it."""
    seen, left = {value}, [value]
    while left:
        node = left.pop().node
        if node.op in ops and element in (None, node.outputs[0].dtype):
            return True
        if node.is_boundary or get(node.op).kind is not Kind.ELEMENTWISE:
            continue
        made = [v for v in node.operands if v.shape == node.outputs[0].shape and v not in seen]
        seen.update(made)
        left += made
    return False
