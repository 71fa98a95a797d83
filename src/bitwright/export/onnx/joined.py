"""Nodes that are written together, because the file says them in one node.

A product takes in the nodes that dequantize its operands where those are read by nothing else: as
a function on MatMulInteger (`coded`), or as MatMulNBits where that is asked for (`nbits`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bitwright.export.onnx.coded import coded_operands, write_coded_product
from bitwright.export.onnx.nbits import Parts, weight_only, write_weight_only
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.graph import Graph, Node, Value


@dataclass
class Joined:
    writers: dict[Node, Callable[[Scope], Ref]] = field(default_factory=dict)
    """How the products are written."""
    absorbed: set[Node] = field(default_factory=set)
    """Nodes that nothing but these products reads."""


def joined_nodes(scope: Scope) -> Joined:
    graph = scope.graph
    found = Joined()
    taken: list[Value] = []
    for node in graph.nodes:
        if (operands := coded_operands(node)) is not None:
            found.writers[node] = _coded(*operands)
            taken += [v.outputs[0] for v in operands]
        elif scope.session.options.weights == "nbits" and (parts := weight_only(node)):
            found.writers[node] = _weight_only(node, parts)
            taken += [v for v in (node.inputs[1], *parts[1:]) if v is not None]
    found.absorbed = _only_read_by(graph, set(found.writers), taken)
    return found


def _coded(x: Node, w: Node) -> Callable[[Scope], Ref]:
    return lambda e: write_coded_product(e, x, w)


def _weight_only(node: Node, parts: Parts) -> Callable[[Scope], Ref]:
    return lambda e: write_weight_only(e, node, parts)


def _only_read_by(graph: Graph, readers: set[Node], taken: list[Value]) -> set[Node]:
    """The nodes of these values that only `readers`, or each other, read."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    inside = Counter(v for node in readers for v in node.operands)
    absorbed: set[Node] = set()
    for value in sorted(set(taken), key=lambda v: order[v.node], reverse=True):
        if inside[value] == graph.uses[value]:
            absorbed.add(value.node)
            inside.update(value.node.operands)
    return absorbed
