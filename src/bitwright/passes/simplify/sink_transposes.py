"""Elementwise ops on a transposed product move in front of the transpose, into its epilogue.

    relu(transpose(matmul(x, w)) * c)  ->  transpose(relu(matmul(x, w) * c'))

with c' the constant transposed back. The transpose then moves the smaller values if the epilogue
quantizes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops, get
from bitwright.rewrite import Match, Rule, Trace, any_operands, rewrite
from bitwright.rewrite.producers import comes_from


def sink_transposes(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, _rules(), trace)


def _transposed(node: Node) -> Value | None:
    """The only operand that is not a constant, if it is a transpose."""
    found = {value for value in node.operands if not value.is_constant}
    if len(found) != 1:
        return None
    (value,) = found
    return value if value.node.op == "transpose" else None


def _why_not_sink(m: Match) -> str:
    value = _transposed(m.root)
    if m.root.attrs.get("axis") is not None:
        return "it has parameters per channel"
    if value is None:
        return "its operands are not one transposed value and constants"
    if m.uses(value) != sum(operand is value for operand in m.root.operands):
        return f"{value} has another reader"
    if any(operand.rank > value.rank for operand in m.root.operands):
        return "a constant has more axes"
    source = next(iter(value.node.operands))
    if comes_from(source, lambda node: get(node.op).takes_epilogue):
        return ""
    return f"{source} does not come from a product"


def _sink(op: Any, m: Match) -> Any:
    node = m.root
    value = _transposed(node)
    assert value is not None
    perm = value.node.attrs["perm"]
    (source,) = value.node.operands
    operands = [
        None if v is None else source if v is value else _transposed_back(op, v, perm)
        for v in node.inputs
    ]
    return op.transpose(op.like(node, *operands), perm=perm)


def _transposed_back(op: Any, constant: Value, perm: list[int]) -> Value:
    """A constant in the axis order before the transpose."""
    array = constant_value(constant)
    assert array is not None
    if array.size == 1:
        return constant
    spread = array.reshape((1,) * (len(perm) - array.ndim) + array.shape)
    return op.constant(np.ascontiguousarray(spread.transpose(np.argsort(perm))))  # type: ignore[no-any-return]


@functools.cache
def _rules() -> list[Rule]:
    return [
        Rule(f"{name.replace('_', '-')}-before-transpose", any_operands(name), _sink, _why_not_sink)
        for name, opdef in all_ops().items()
        if opdef.kind is Kind.ELEMENTWISE or name == "quantize"
    ]
