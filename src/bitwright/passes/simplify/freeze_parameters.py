"""Parameters become constants, for inference."""

from __future__ import annotations

from bitwright.errors import GraphError
from bitwright.ir.graph import Graph, Node
from bitwright.rewrite.replace import replace_nodes
from bitwright.rewrite.trace import Trace


def freeze_parameters(graph: Graph, trace: Trace) -> Graph:
    def change(node: Node) -> Node:
        if node.op != "parameter":
            return node
        if node.attrs.get("value") is None:
            raise GraphError(
                f"parameter {node.name!r} has no value",
                where=f"graph {graph.name!r}",
                hint="Load its weights before compiling for inference.",
            )
        return node.with_(op="constant", attrs={"value": node.attrs["value"]})

    return replace_nodes(graph, change)
