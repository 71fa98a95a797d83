"""Functions of 8-bit codes become tables of 256 entries, which the ops' references fill.

    quantize(f(dequantize(q)))  ->  lookup_table(q, table)       table[q] = quantize(f(dequantize(q)))

f is any chain of elementwise ops on one value; none at all is codes of another scale. Values that
tables made of the same codes count as that value: x · sigmoid(x), with the sigmoid in codes of its
own, is one table. A short f behind a product of codes stays where it is: the product computes it
where it stores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i8, u8
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ir.types import TensorType
from bitwright.ops.core.interpret import run_node
from bitwright.ops.core.registry import get
from bitwright.ops.quant.lookup_table import ENTRIES
from bitwright.passes.lower_integer.operands import (
    QuantizedOperand,
    comes_from_product,
    match_dequantize,
    parts_of,
)
from bitwright.rewrite import Match, Rule

Array = np.ndarray[Any, Any]
MOST_NODES = 16


def table_rule() -> Rule:
    return Rule("table-of-codes", lambda op: op.quantize(...), _tabulate, _no_table)


def _no_table(m: Match) -> str:
    found = _chain(m)
    return found if isinstance(found, str) else ""


def _chain(m: Match) -> tuple[Value, list[Node]] | str:
    """The codes that all of it is a function of, and the nodes from their dequantized values on."""
    x, *parameters = parts_of(m.root)
    known = [v is None or constant_value(v) is not None for v in parameters]
    if m.root.attrs.get("axis") is not None or m.root.attrs["to"] not in (i8, u8) or not all(known):
        return "it is not one known scale for 8-bit codes"
    nodes: dict[Node, None] = {}
    sources: dict[Value, None] = {}
    left = [x]
    while left:
        value = left.pop()
        if value.node.op == "dequantize":
            sources[value] = None
        elif value.node not in nodes:
            if reason := _no_step(value, x):
                return reason
            nodes[value.node] = None
            left += [v for v in value.node.operands if not v.is_constant]
    qvalues = {_origin(parts_of(source.node)[0]) for source in sources}
    if len(qvalues) != 1 or len(nodes) > MOST_NODES:
        return "it is no function of one value in codes"
    for source in sources:
        if reason := _no_source(source, x):
            return reason
    inner = [v for node in nodes for v in node.operands]
    for node in nodes:
        if node.outputs[0] is not x and m.uses(node.outputs[0]) != inner.count(node.outputs[0]):
            return f"{node.outputs[0]} is read elsewhere too"
    (origin,) = qvalues
    is_direct = all(parts_of(source.node)[0] is origin for source in sources)
    if is_direct and comes_from_product(origin) and all(get(n.op).is_cheap for n in nodes):
        return "it is computed where the product stores"
    return origin, list(nodes)


def _origin(qvalues: Value) -> Value:
    """The codes that tables made these of."""
    while qvalues.node.op == "lookup_table":
        (qvalues, _) = qvalues.node.operands
    return qvalues


def _no_step(value: Value, result: Value) -> str:
    node = value.node
    if not get(node.op).can_be_table:
        return f"{value} is not elementwise"
    if value.dtype != f32 or value.shape != result.shape or len(node.outputs) != 1:
        return f"{value} has another type or shape"
    for operand in node.operands:
        if operand.is_constant and operand.tensor.count != 1:
            return f"{operand} differs from element to element"
    return ""


def _no_source(source: Value, result: Value) -> str:
    found = match_dequantize(source)
    if not isinstance(found, QuantizedOperand):
        return found
    if found.step is None or (found.zero is not None and found.known_zero is None):
        return f"{source} has a scale of the run"
    if found.qvalues.is_constant or source.shape != result.shape:
        return f"{source} is a constant, or has another shape"
    return ""


def _tabulate(op: Any, m: Match) -> Any:
    found = _chain(m)
    assert not isinstance(found, str)
    qvalues = found[0]
    bits = np.arange(ENTRIES, dtype=np.uint8).view(qvalues.dtype.numpy)
    arrays: dict[Value, Array] = {qvalues: bits}

    def result(value: Value) -> Array:
        if value not in arrays:
            given = [None if v is None else _plain(v, result) for v in value.node.inputs]
            node = value.node.with_(types=(TensorType(value.dtype, (ENTRIES,)),))
            (arrays[value],) = run_node(node, given)
        return arrays[value]

    return op.lookup_table(qvalues, op.constant(result(m.root.outputs[0])))


def _plain(value: Value, result: Any) -> Array:
    """An operand's numbers; those of a constant as one."""
    known = constant_value(value)
    if known is None:
        return result(value)  # type: ignore[no-any-return]
    return known.reshape(()) if known.size == 1 else known
