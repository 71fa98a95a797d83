"""Merges nodes with the same op, operands and attributes, if the op is deterministic."""

from __future__ import annotations

from collections.abc import Hashable

from bitwright.ir.edit import map_bodies
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.registry import get
from bitwright.rewrite.replace import replace_nodes
from bitwright.rewrite.trace import Trace


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
    return node.op, tuple(map(id, node.inputs)), node.attrs_text, node.types
