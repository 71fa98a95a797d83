"""The verifier: structure, then every node against its op's declaration."""

from __future__ import annotations

from bitwright.errors import GraphError
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import compatible
from bitwright.ir.verify import place, verify_structure
from bitwright.ops.builder import infer_types
from bitwright.ops.registry import get


def verify(graph: Graph) -> Graph:
    """Raise a `GraphError` that names node, operand, expected and found; else give the graph."""
    verify_structure(graph)
    for owner, node in graph.walk():
        if not node.is_boundary:
            verify_node(owner, node)
    return graph


def verify_node(graph: Graph, node: Node) -> None:
    where = place(graph, node)
    try:
        normal, types = infer_types(get(node.op), node.inputs, node.attrs)
    except GraphError as error:
        raise GraphError(str(error), where=where) from None
    if missing := set(normal) - set(node.attrs):
        raise GraphError(f"attribute {min(missing)!r} is not written out", where=where)
    if len(types) != len(node.types):
        raise GraphError(
            "gives another number of results",
            where=where,
            expected=len(types),
            found=len(node.types),
        )
    for value, inferred in zip(node.outputs, types, strict=True):
        if not compatible(inferred, value.type):
            raise GraphError(
                f"result {value} has the wrong type",
                where=where,
                expected=inferred,
                found=value.type,
            )
