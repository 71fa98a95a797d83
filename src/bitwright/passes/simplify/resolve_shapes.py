"""Shape arithmetic becomes `sizes` nodes or constants.

If every element of a small integer tensor is a number or a size that the inputs determine, one node
replaces the nodes that compute it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bitwright.ir.dim import UNKNOWN, Dim, Size, Symbol
from bitwright.ir.edit import map_bodies
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.symbolic import SizeEvaluator, may_hold_sizes
from bitwright.rewrite.replace import replace_nodes
from bitwright.rewrite.trace import Trace


def resolve_shapes(graph: Graph, trace: Trace, outer: frozenset[Symbol] = frozenset()) -> Graph:
    known = outer | graph.input_symbols
    graph = map_bodies(graph, lambda body: resolve_shapes(body, trace, known))
    evaluator = SizeEvaluator()

    def change(node: Node) -> Node | tuple[Value, ...]:
        if node.op in ("constant", "sizes") or len(node.outputs) != 1 or node.bodies:
            return node
        if not may_hold_sizes(node.outputs[0]):
            return node
        elements = evaluator.elements(node.outputs[0])
        if elements is None or not _bound(elements.reshape(-1), known):
            return node
        flat = [e if isinstance(e, Dim) else int(e) for e in elements.reshape(-1)]
        trace.fired("resolve-sizes", node.name, node.names)
        if any(isinstance(e, Dim) for e in flat):
            if node.outputs[0].dtype.name != "i64":
                return node
            attrs = {"values": tuple(flat), "shape": elements.shape}
            return node.with_(op="sizes", inputs=(), attrs=attrs)
        array = np.array(flat).reshape(elements.shape).astype(node.outputs[0].dtype.numpy)
        return node.with_(op="constant", inputs=(), attrs={"value": array})

    return replace_nodes(graph, change, bodies=False)


def _bound(sizes: Iterable[Size], known: frozenset[Symbol]) -> bool:
    return all(
        size is not UNKNOWN and (not isinstance(size, Dim) or size.symbols <= known)
        for size in sizes
    )
