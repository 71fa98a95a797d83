"""Operation counts of nodes.

    node_flops(node)             symbolic; None if the data decides
    flops(node, bindings)        at given sizes

A multiply-add counts as two operations. Compute ops declare their count (`OpDef.flops`).
Elementwise ops count one per output element, reductions and norms one per input element, and
movement none. The count of a fused region is the sum of its nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.errors import RunError
from bitwright.ir.dim import Size, evaluate
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import TensorType
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get


def node_flops(node: Node) -> Size | None:
    """Operations of one node, symbolic; None if only the data decides."""
    opdef = get(node.op)
    outputs = [t for t in node.types if isinstance(t, TensorType)]
    inputs = [v.type if v is not None else None for v in node.inputs]
    if node.op == "fused":
        return _sum_flops(node.attrs["body"])
    if opdef.flops is not None:
        return opdef.flops(inputs, outputs, node.attrs)  # type: ignore[no-any-return]
    if opdef.kind is Kind.ELEMENTWISE:
        return sum((t.count for t in outputs), 0)
    if opdef.kind is Kind.REDUCTION:
        return sum((t.count for t in inputs[:1] if isinstance(t, TensorType)), 0)
    return None if opdef.kind is Kind.COMPUTE or node.bodies else 0


def _sum_flops(body: Graph) -> Size | None:
    total: Size = 0
    for node in body.nodes:
        count = node_flops(node)
        if count is None:
            return None
        total = total + count
    return total


def flops(node: Node, bindings: Mapping[str, int]) -> int | None:
    """Operations of one node at these sizes."""
    count = node_flops(node)
    return None if count is None else evaluate(count, bindings)


def multiply_adds(node: Node, bindings: Mapping[str, int]) -> int:
    """Multiply-adds of a compute op at these sizes; 0 for other ops, or if the data decides."""
    if get(node.op).kind is not Kind.COMPUTE:
        return 0
    try:
        return (flops(node, bindings) or 0) // 2
    except RunError:  # a size is known only at run time
        return 0
