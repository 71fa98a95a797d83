"""Nodes of constants become constants, unless that would inflate the model.

Dequantize stays: folding it would turn 8-bit weights back into floats. A cast to a narrower type
always folds. Any other result may have up to the limit's elements, and more than a few only if it
is not much larger than what it was made from.
"""

from __future__ import annotations

from bitwright import knobs
from bitwright.errors import BitwrightError
from bitwright.ir.dim import Dim
from bitwright.ir.graph import Graph, Node, constant_value
from bitwright.ir.printer import attr_symbols
from bitwright.ir.types import TensorType
from bitwright.ops.interpret import run_node
from bitwright.ops.registry import get
from bitwright.passes.edit import replace_nodes
from bitwright.rewrite.trace import Trace

KEPT = frozenset({"dequantize", "fake_quantize", "host", "custom"})
ALWAYS = 4096
GROWTH = 2


def fold_constants(graph: Graph, trace: Trace) -> Graph:
    limit = int(knobs.FOLD_LIMIT.get())

    def change(node: Node) -> Node:
        if node.is_boundary or not _is_known(node) or len(node.outputs) != 1:
            return node
        if reason := _refusal(node, limit):
            trace.refused("fold-constants", node.name, reason)
            return node
        try:
            (array,) = run_node(node, [constant_value(v) for v in node.inputs])
        except BitwrightError as error:
            trace.refused("fold-constants", node.name, str(error))
            return node
        trace.fired("fold-constants", node.name, node.names)
        type_ = TensorType(node.outputs[0].dtype, array.shape)
        if type_ != node.types[0]:
            return node  # the data decided a size that others know by name
        return node.with_(op="constant", inputs=(), attrs={"value": array})

    return replace_nodes(graph, change)


def _is_known(node: Node) -> bool:
    return (
        all(v.is_constant for v in node.operands)
        and not any(attr_symbols(value) for value in node.attrs.values())
        and not node.bodies
    )


def _refusal(node: Node, limit: int) -> str:
    if node.op in KEPT or not get(node.op).deterministic:
        return f"{node.op} is kept as it is"
    type_ = node.types[0]
    if not isinstance(type_, TensorType) or isinstance(type_.count, Dim):
        return "the data decides its size"
    if node.op == "cast" and type_.dtype.bits <= next(node.operands).dtype.bits:
        return ""  # it takes no more room than what it was made from
    largest = max((constant_value(v).size for v in node.operands), default=0)  # type: ignore[union-attr]
    if type_.count > limit:
        return f"its {type_.count:,} elements are above the limit of {limit:,}"
    if type_.count > ALWAYS and type_.count > GROWTH * largest:
        return f"it would grow from {largest:,} to {type_.count:,} elements"
    return ""
