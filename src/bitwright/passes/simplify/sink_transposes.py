"""Elementwise work on a turned product is done before the turn, where the product can do it itself.

    relu(transpose(matmul(x, w)) * c)  ->  transpose(relu(matmul(x, w) * c'))

with c' the constant turned back. The work then is part of the product's epilogue, and what is
turned is the smaller thing, codes for instance.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops, get
from bitwright.rewrite import Match, Rule, Trace, rewrite
from bitwright.rewrite.producers import comes_from


def sink_transposes(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, _rules(), trace)


def _transposed(node: Node) -> Value | None:
    """The one operand that is no constant, if it is a transpose."""
    found = {value for value in node.operands if not value.is_constant}
    if len(found) != 1:
        return None
    (value,) = found
    return value if value.node.op == "transpose" else None


def _stays(m: Match) -> str:
    value = _transposed(m.root)
    if m.root.attrs.get("axis") is not None:
        return "its parameters lie along an axis"
    if value is None:
        return "it does not work on a transposed value and constants alone"
    if m.uses(value) != sum(operand is value for operand in m.root.operands):
        return f"{value} is read elsewhere"
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
        None if v is None else source if v is value else _back(op, v, perm) for v in node.inputs
    ]
    return op.transpose(op.like(node, *operands), perm=perm)


def _back(op: Any, constant: Value, perm: list[int]) -> Value:
    """A constant as it lies over the value before the turn."""
    array = constant_value(constant)
    assert array is not None
    if array.size == 1:
        return constant
    spread = array.reshape((1,) * (len(perm) - array.ndim) + array.shape)
    return op.constant(np.ascontiguousarray(spread.transpose(np.argsort(perm))))  # type: ignore[no-any-return]


@functools.cache
def _rules() -> list[Rule]:
    return [
        Rule(
            f"{name.replace('_', '-')}-before-transpose",
            lambda op, name=name: getattr(op, name)(...),
            _sink,
            _stays,
        )
        for name, opdef in all_ops().items()
        if opdef.kind is Kind.ELEMENTWISE or name == "quantize"
    ]
