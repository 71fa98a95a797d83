"""The model in its simplest form: shapes resolved, constants folded, rules applied."""

from __future__ import annotations

from bitwright.ir.graph import Graph
from bitwright.passes.eliminate_common import eliminate_common
from bitwright.passes.fold_constants import fold_constants
from bitwright.passes.resolve_shapes import resolve_shapes
from bitwright.passes.rules import algebra, masks, movement
from bitwright.rewrite import Trace, rewrite

RULES = [*movement.RULES, *algebra.RULES, *masks.RULES]
MAX_ROUNDS = 10


def canonicalize(graph: Graph, trace: Trace) -> Graph:
    for _ in range(MAX_ROUNDS):
        before = _signature(graph)
        graph = resolve_shapes(graph, trace)
        graph = fold_constants(graph, trace)
        graph = rewrite(graph, RULES, trace)
        graph = eliminate_common(graph, trace)
        if _signature(graph) == before:
            break
    return graph


def _signature(graph: Graph) -> list[tuple[str, tuple[str, ...], int]]:
    """Enough to see that a round changed nothing."""
    return [(node.op, node.names, len(node.inputs)) for _, node in graph.walk()]
