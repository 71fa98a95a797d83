"""The verifier: structure, then every node against its op's declaration."""

from __future__ import annotations

from typing import Any

from bitwright.errors import GraphError
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import compatible
from bitwright.ir.verify import depends_on_graph, place, verify_structure
from bitwright.ops.builder import infer_types
from bitwright.ops.registry import get


def verify(graph: Graph, known: set[Any] | None = None) -> Graph:
    """Raise a `GraphError` that names node, operand, expected and found; else give the graph.

    `known` is kept from one stage to the next: a node that was found right is not looked at again,
    and what op, types and attributes demand is looked at once for all nodes that have the same.
    """
    settled = set() if known is None else known
    verify_structure(graph, settled=settled)
    for owner, node in graph.walk():
        if node in settled:
            continue
        question = None if node.is_boundary else _question(node)
        if not node.is_boundary and (question is None or question not in settled):
            verify_node(owner, node)
            settled.add(question)
        if not depends_on_graph(node):
            settled.add(node)
    return graph


def _question(node: Node) -> Any:
    """Equal for nodes on which the verifier decides alike; None where that cannot be told."""
    operands = tuple(None if v is None else v.type for v in node.inputs)
    attrs = tuple((name, type(value), value) for name, value in node.attrs.items())
    question = node.op, operands, attrs, node.types
    try:
        hash(question)
    except TypeError:  # an attribute such as an array
        return None
    return question


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
