"""Equal nodes become one: same op, operands and attributes, and no draw of luck in between."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from bitwright.ir.dtype import string
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.payload import blob_key
from bitwright.ops.registry import get
from bitwright.passes.edit import replace_nodes
from bitwright.rewrite.driver import map_bodies
from bitwright.rewrite.trace import Trace

HASHED_BYTES = 1 << 16  # larger constants are one only if they share their memory


def eliminate_common(graph: Graph, trace: Trace) -> Graph:
    graph = map_bodies(graph, lambda body: eliminate_common(body, trace))
    seen: dict[Hashable, Node] = {}

    def change(node: Node) -> Node | tuple[Value, ...]:
        key = _key(node)
        if key is None:
            return node
        first = seen.setdefault(key, node)
        if first is node or first.types != node.types:
            return node
        trace.fired("common-subexpression", node.name, [v.name for v in first.outputs])
        return first.outputs

    return replace_nodes(graph, change, bodies=False)


def _key(node: Node) -> Hashable:
    if node.op in ("input", "parameter", "state") or node.bodies:
        return None
    if not get(node.op).deterministic:
        return None
    attrs = tuple(sorted((name, _freeze(value)) for name, value in node.attrs.items()))
    return node.op, tuple(map(id, node.inputs)), repr(attrs), node.types


def _freeze(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        if value.dtype == string.numpy:
            return tuple(map(str, value.reshape(-1)))
        if value.nbytes <= HASHED_BYTES:
            return blob_key(value)
        return value.__array_interface__["data"], value.shape, value.strides, str(value.dtype)
    return value  # type: ignore[no-any-return]
