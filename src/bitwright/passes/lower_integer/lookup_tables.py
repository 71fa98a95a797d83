"""Functions of 8-bit values become tables of 256 entries, computed by the reference interpreter.

    quantize(f(dequantize(q)))  ->  lookup_table(q, table),  table[q] = quantize(f(dequantize(q)))

f is any elementwise expression of one value; an empty one only changes the scale. Results of other
tables of q count as functions of q: x · sigmoid(x) with a quantized sigmoid is one table. A cheap f
behind a product stays in the product's epilogue.

Where training changes a scale, the graph computes the table, in f64 and rounded as the interpreter
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, f64, i8, u8
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ir.types import TensorType
from bitwright.ops.core.interpret import run_node
from bitwright.ops.core.registry import get
from bitwright.ops.quant.lookup_table import ENTRIES
from bitwright.passes.lower_integer.operands import (
    comes_from_product,
    match_static_dequantize,
    quantize_operands,
)
from bitwright.passes.lower_integer.scales import is_parameter
from bitwright.rewrite import Match, Rule, any_operands

Array = np.ndarray[Any, Any]
MAX_NODES = 16


def table_rule() -> Rule:
    return Rule.from_plan("quantize-to-lookup-table", any_operands("quantize"), _plan, _lower)


def _plan(m: Match) -> Value | str:
    """The 8-bit value that the quantized result is a function of."""
    x, *parameters = quantize_operands(m.root)
    known = [v is None or v.is_constant or is_parameter(v) for v in parameters]
    if m.root.attrs.get("axis") is not None or m.root.attrs["to"] not in (i8, u8) or not all(known):
        return "it has no single constant scale, or is not 8-bit"
    nodes: dict[Node, None] = {}
    sources: dict[Value, None] = {}
    left = [x]
    while left:
        value = left.pop()
        if value.node.op == "dequantize":
            sources[value] = None
        elif value.node not in nodes:
            if reason := _why_not_elementwise(value, x):
                return reason
            nodes[value.node] = None
            left += [v for v in value.node.operands if not _is_number(v)]
    qvalues = {_origin(quantize_operands(source.node)[0]) for source in sources}
    if len(qvalues) != 1 or len(nodes) > MAX_NODES:
        return "it is not a function of one 8-bit value"
    for source in sources:
        found = match_static_dequantize(source)
        if isinstance(found, str):
            return found
        if source.shape != x.shape:
            return f"{source} has another shape"
    inner = [v for node in nodes for v in node.operands]
    for node in nodes:
        if node.outputs[0] is not x and m.uses(node.outputs[0]) != inner.count(node.outputs[0]):
            return f"{node.outputs[0]} has another reader"
    (origin,) = qvalues
    is_direct = all(quantize_operands(source.node)[0] is origin for source in sources)
    if is_direct and comes_from_product(origin) and all(get(n.op).is_cheap for n in nodes):
        return "the product computes it in its epilogue"
    return origin


def _origin(qvalues: Value) -> Value:
    """The input of a chain of lookup tables."""
    while qvalues.node.op == "lookup_table":
        (qvalues, _) = qvalues.node.operands
    return qvalues


def _why_not_elementwise(value: Value, result: Value) -> str:
    node = value.node
    if not get(node.op).can_be_table:
        return f"{value} is not elementwise"
    if value.dtype != f32 or value.shape != result.shape or len(node.outputs) != 1:
        return f"{value} has another type or shape"
    for operand in node.operands:
        if operand.is_constant and operand.tensor.count != 1:
            return f"{operand} is a constant of several elements"
    return ""


def _is_number(value: Value) -> bool:
    """Whether an operand is a constant, or one number that training changes."""
    return value.is_constant or (value.tensor.count == 1 and is_parameter(value))


def _lower(op: Any, m: Match, qvalues: Value) -> Any:
    bits = np.arange(ENTRIES, dtype=np.uint8).view(qvalues.dtype.numpy)
    if _changes(m.root, qvalues):
        return op.lookup_table(qvalues, _table_at_run_time(op, m.root.outputs[0], qvalues, bits))
    arrays: dict[Value, Array] = {qvalues: bits}

    def result(value: Value) -> Array:
        if value not in arrays:
            given = [None if v is None else _operand(v, result) for v in value.node.inputs]
            node = value.node.with_(types=(TensorType(value.dtype, (ENTRIES,)),))
            (arrays[value],) = run_node(node, given)
        return arrays[value]

    return op.lookup_table(qvalues, op.constant(result(m.root.outputs[0])))


def _changes(node: Node, origin: Value) -> bool:
    """Whether a table depends on values that are known at run time."""
    for value in node.operands:
        if value is origin or value.is_constant:
            continue
        if value.node.is_boundary or is_parameter(value) or _changes(value.node, origin):
            return True
    return False


def _table_at_run_time(op: Any, value: Value, origin: Value, bits: Array) -> Value:
    """The nodes that compute a table from the 256 values of an 8-bit type."""
    made: dict[Value, Value] = {origin: op.constant(bits)}

    def result(value: Value) -> Value:
        if value in made:
            return made[value]
        if _is_number(value):
            return value if value.rank == 0 else op.reshape(value, shape=())
        node = value.node
        if node.op == "lookup_table":
            x, table = node.operands
            made[value] = op.like(node, result(x), table)
        elif node.op in ("quantize", "dequantize"):
            made[value] = op.like(node, *(None if v is None else result(v) for v in node.inputs))
        else:
            given = [None if v is None else op.cast(result(v), to=f64) for v in node.inputs]
            made[value] = op.cast(op.like(node, *given), to=value.dtype)
        return made[value]

    return result(value)


def _operand(value: Value, result: Callable[[Value], Array]) -> Array:
    """The array of an operand; a constant of one element as a scalar."""
    known = constant_value(value)
    if known is None:
        return result(value)
    return known.reshape(()) if known.size == 1 else known
