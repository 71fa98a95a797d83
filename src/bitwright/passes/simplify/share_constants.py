"""Merges constants with equal elements.

    const a, const b = a            ->  a, a
    const a, const b = a'           ->  a, transpose(a)

Exporters write a weight that two layers share twice, and folding may transpose one of them. The
table of a gather keeps its layout; the weight of a product becomes the transpose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np

from bitwright.ir.edit import map_bodies
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.naming import made_from
from bitwright.rewrite.replace import replace_nodes
from bitwright.rewrite.trace import Trace

Array = np.ndarray[Any, Any]
MIN_ELEMENTS = 1024
"""Smaller constants are not compared."""


def share_constants(graph: Graph, trace: Trace) -> Graph:
    graph = map_bodies(graph, lambda body: share_constants(body, trace))
    shared = _shared(graph)
    if not shared:
        return graph
    bases = dict.fromkeys(base for base, _ in shared.values())
    rest = (node for node in graph.nodes if node not in bases)
    graph = graph.with_(nodes=(*bases, *rest))  # constants need nothing before them

    def change(node: Node) -> Node | tuple[Value, ...]:
        if node not in shared:
            return node
        base, is_transposed = shared[node]
        trace.fired("share-constants", node.name, [base.name])
        if not is_transposed:
            return base.outputs
        loc = made_from(node.loc, node.outputs)
        return node.with_(op="transpose", inputs=base.outputs, attrs={"perm": (1, 0)}, loc=loc)

    return replace_nodes(graph, change, bodies=False)


def _shared(graph: Graph) -> dict[Node, tuple[Node, bool]]:
    """Redundant constants: the constant that replaces each, and whether it is the transpose."""
    looked_up = {node.inputs[0] for node in graph.nodes if node.op == "gather"}
    outputs = set(graph.results)
    alike: dict[Hashable, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        array = constant_value(node.outputs[0]) if node.op == "constant" else None
        if array is not None and array.size >= MIN_ELEMENTS and array.dtype != object:
            alike[_fingerprint(array)].append(node)
    found: dict[Node, tuple[Node, bool]] = {}
    for nodes in alike.values():
        nodes.sort(key=lambda node: node.outputs[0] not in looked_up)
        bases: list[Node] = []
        for node in nodes:
            base = None if node.outputs[0] in outputs else _replacement(bases, node)
            if base is None:
                bases.append(node)
            else:
                found[node] = base
    return found


def _fingerprint(array: Array) -> Hashable:
    """Equal for arrays with the same elements, in any order."""
    unit = array.dtype.itemsize
    flat = np.ascontiguousarray(array).reshape(-1).view(f"u{unit}" if unit <= 8 else "u8")
    return array.dtype, tuple(sorted(array.shape)), int(flat.sum(dtype=np.uint64))


def _replacement(bases: list[Node], node: Node) -> tuple[Node, bool] | None:
    array = constant_value(node.outputs[0])
    assert array is not None
    for base in bases:
        other = constant_value(base.outputs[0])
        assert other is not None
        if array.shape == other.shape and _same_bytes(array, other):
            return base, False
        if array.ndim == 2 and array.shape == other.shape[::-1] and _same_bytes(array, other.T):
            return base, True
    return None


def _same_bytes(a: Array, b: Array) -> bool:
    """Whether two arrays are equal to the bit, NaN included."""
    x, y = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return a is b or bool(np.array_equal(x, y))
