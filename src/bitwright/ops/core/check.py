"""The verifier: checks the structure, then every node against its op's declaration."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import GraphError
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import compatible
from bitwright.ir.verify import depends_on_graph, place, verify_structure
from bitwright.ops.core.builder import infer_types
from bitwright.ops.core.registry import get


def verify(graph: Graph, known: set[Any] | None = None) -> Graph:
    """The graph, verified; a `GraphError` names node, operand, expected and found.

    `known` caches results between stages. A verified graph or node is not checked again, and nodes
    with equal ops, types and attributes are checked once.
    """
    settled = set() if known is None else known
    if graph in settled:
        return graph
    verify_structure(graph, settled=settled)
    for owner, node in graph.walk():
        if node in settled:
            continue
        key = None if node.is_boundary else _cache_key(node)
        if not node.is_boundary and (key is None or key not in settled):
            verify_node(owner, node)
            settled.add(key)
        if not depends_on_graph(node):
            settled.add(node)
    settled.add(graph)
    return graph


def _cache_key(node: Node) -> Any:
    """Equal for nodes with the same result of verification; None if it must not be cached."""
    if any(isinstance(value, np.ndarray) for value in node.attrs.values()):
        return None  # the array may change later
    operands = tuple([None if v is None else v.type for v in node.inputs])
    bodies = tuple(node.bodies.values())
    return node.op, operands, node.attrs_text, node.attr_symbols, bodies, node.types


def verify_node(graph: Graph, node: Node) -> None:
    try:
        normal, types = infer_types(get(node.op), node.inputs, node.attrs)
    except GraphError as error:
        raise GraphError(str(error), where=place(graph, node)) from None
    if missing := set(normal) - set(node.attrs):
        raise GraphError(f"attribute {min(missing)!r} is not written out", where=place(graph, node))
    if len(types) != len(node.types):
        raise GraphError(
            "gives another number of results",
            where=place(graph, node),
            expected=len(types),
            found=len(node.types),
        )
    for value, inferred in zip(node.outputs, types, strict=True):
        if not compatible(inferred, value.type):
            raise GraphError(
                f"result {value} has the wrong type",
                where=place(graph, node),
                expected=inferred,
                found=value.type,
            )
