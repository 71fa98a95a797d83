"""Folds nodes of constants, unless that would inflate the model.

Dequantize stays: folding it would turn 8-bit weights into floats. A cast to a narrower type always
folds. Any other result may have `FOLD_LIMIT` elements; above `ALWAYS` elements it must not be more
than `GROWTH` times as large as its operands.
"""

from __future__ import annotations

from bitwright import knobs
from bitwright.errors import BitwrightError
from bitwright.ir.dim import Dim
from bitwright.ir.graph import Graph, Node, constant_value
from bitwright.ir.naming import made_from
from bitwright.ir.types import TensorType
from bitwright.ops.core.interpret import run_node
from bitwright.ops.core.registry import get
from bitwright.rewrite.replace import replace_nodes
from bitwright.rewrite.trace import Trace

KEPT = frozenset({"dequantize", "fake_quantize", "host", "custom"})
ALWAYS = 4096
GROWTH = 2


def fold_constants(graph: Graph, trace: Trace) -> Graph:
    limit = knobs.FOLD_LIMIT.number()

    def change(node: Node) -> Node | list[Node]:
        if node.is_boundary or not _is_known(node):
            return node
        if reason := _why_not_fold(node, limit):
            trace.refused("fold-constants", node.name, reason)
            return node
        try:
            arrays = run_node(node, [constant_value(v) for v in node.inputs])
        except BitwrightError as error:
            trace.refused("fold-constants", node.name, str(error))
            return node
        trace.fired("fold-constants", node.name, node.names)
        for value, array in zip(node.outputs, arrays, strict=True):
            if TensorType(value.dtype, array.shape) != value.type:
                return node  # a data-dependent size, which the graph has by name
        folded = node.with_(op="constant", inputs=(), loc=made_from(node.loc, node.operands))
        return [
            folded.with_(attrs={"value": array}, names=(name,), types=(type_,))
            for name, type_, array in zip(node.names, node.types, arrays, strict=True)
        ]

    return replace_nodes(graph, change)


def _is_known(node: Node) -> bool:
    return all(v.is_constant for v in node.operands) and not node.attr_symbols and not node.bodies


def _why_not_fold(node: Node, limit: int) -> str:
    if node.op in KEPT or not get(node.op).deterministic:
        return f"{node.op} is never folded"
    count = 0
    for type_ in node.types:
        if not isinstance(type_, TensorType) or isinstance(type_.count, Dim):
            return "its size depends on data"
        count += type_.count
    if node.op == "cast" and node.outputs[0].dtype.bits <= next(node.operands).dtype.bits:
        return ""  # it is not larger than its operand
    arrays = [constant_value(value) for value in set(node.operands)]
    given = sum(array.size for array in arrays if array is not None)
    if count > limit:
        return f"its {count:,} elements are above the limit of {limit:,}"
    if count > ALWAYS and count > GROWTH * given:
        return f"it would grow from {given:,} to {count:,} elements"
    return ""
