"""Gradients whose sizes only the data decides: broadcasts that name such a size get an operand
that binds it.

A rule writes `expand(dy, shape=x.shape)`. If a size of x is known only when x was computed, the
node must read a value of that shape, so it becomes `where(x < x, x, dy)`, which is dy everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from bitwright.ir.dim import Symbol
from bitwright.ir.edit import Replacement, replace_nodes
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder


def bind_sizes(graph: Graph, outer: Iterable[Symbol] = ()) -> Graph:
    """The graph in which every broadcast to a size that data decides reads a value of that size."""
    known = graph.input_symbols | frozenset(outer)
    if not any(_missing(node, known) for node in graph.nodes):
        return graph
    shapes: dict[TensorType, Value] = {}
    b = Builder(graph.name)
    for name in graph.values:
        b.fresh_name(name)

    def change(node: Node) -> Node | Replacement:
        answer: Node | Replacement = node
        like = shapes.get(node.types[0]) if isinstance(node.types[0], TensorType) else None
        if _missing(node, known) and like is not None:
            start = len(b.nodes)
            made = b.where(b.lt(like, like), like, node.inputs[0])
            answer = Replacement(b.nodes[start:], (made,))
        for value in answer.results if isinstance(answer, Replacement) else node.outputs:
            if isinstance(value.type, TensorType):
                shapes.setdefault(value.type, value)
        return answer

    return replace_nodes(graph, change, bodies=False)


def _missing(node: Node, known: frozenset[Symbol]) -> bool:
    if node.op != "expand" or not node.attr_symbols:
        return False
    return bool(node.attr_symbols - known.union(*(v.type.symbols for v in node.operands)))
