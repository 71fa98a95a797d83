"""Matmuls of float8 values become `f8_matmul`, for targets that multiply float8.

    matmul(dequantize(x, s), dequantize(w, t))   ->  f8_matmul(x, w) * (s * t)

s is per tensor or per row, t per tensor or per column of a constant weight. Other targets keep the
Q/DQ form: a product of f32 rows with a float8 weight (`lower_weights`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import normalize_axis
from bitwright.ops.quant.f8_matmul import DTYPES
from bitwright.passes.lower_integer.operands import constant_qvalues, quantize_operands
from bitwright.rewrite import Match, Rule, Trace, any_operands, rewrite

Array = np.ndarray[Any, Any]


def lower_f8(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


@dataclass(frozen=True)
class _Product:
    x: Value
    x_scale: Value
    weight: Array
    w_scale: Array


def _dequantized(value: Value) -> Node | str:
    node = value.node
    if node.op != "dequantize" or value.dtype != f32:
        return f"{value} is not a dequantized value"
    q, _, zero = quantize_operands(node)
    if q.dtype not in DTYPES:
        return f"{value} is dequantized from {q.dtype}"
    known = constant_value(zero)
    is_dynamic = zero is not None and zero.node.op == "dynamic_quantize"
    if zero is not None and not is_dynamic and (known is None or known.astype(np.float32).any()):
        return f"{value} has a zero point"
    return node


def _row_scale(node: Node) -> Value | str:
    """The scale of x, one or one per row."""
    q, scale, _ = quantize_operands(node)
    axis = node.attrs.get("axis")
    if axis is None:
        return scale
    is_last = normalize_axis(axis, q.rank) == q.rank - 1
    if is_last and node.attrs.get("block") and scale.shape[-1] == 1:
        return scale
    return f"{node.outputs[0]} has more than one scale in a row"


def _weight(value: Value) -> tuple[Array, Array] | str:
    """A constant weight [K, N], and its scale: one or one per column."""
    perm = (0, 1)
    if value.rank != 2:
        return f"{value} is not a matrix"
    if value.node.op == "transpose":
        perm = value.node.attrs["perm"]
        (value,) = value.node.operands
    node = _dequantized(value)
    if isinstance(node, str):
        return node
    source, scale, _ = quantize_operands(node)
    q, known = constant_qvalues(source), constant_value(scale)
    if q is None or known is None:
        return f"{value} is not made of constants"
    axis = node.attrs.get("axis")
    if axis is not None:
        at = perm.index(normalize_axis(axis, 2))
        block = node.attrs.get("block")
        if block and not (at == 0 and known.shape[perm[0]] == 1):
            return f"{value} has blocks of scales"
        if not block and at != 1:
            return f"{value} has scales along another axis than the output channels"
    return q.transpose(perm), known.reshape(-1)


def _plan(m: Match) -> _Product | str:
    x, w = m.root.inputs
    assert x is not None and w is not None
    if x.rank < 2:
        return f"{x} is not a matrix"
    rows = _dequantized(x)
    if isinstance(rows, str):
        return rows
    scale, weight = _row_scale(rows), _weight(w)
    if isinstance(scale, str):
        return scale
    if isinstance(weight, str):
        return weight
    return _Product(quantize_operands(rows)[0], scale, *weight)


def _lower(op: Any, m: Match, found: _Product) -> Any:
    w_scale = found.w_scale.astype(np.float32)
    known = constant_value(found.x_scale)
    y = op.f8_matmul(found.x, op.constant(np.ascontiguousarray(found.weight)))
    if known is not None:
        return op.mul(y, op.constant(known.astype(np.float32).reshape(-1) * w_scale))
    x_scale = found.x_scale
    if x_scale.tensor.count == 1:
        x_scale = op.reshape(x_scale, shape=())
    return op.mul(y, op.mul(x_scale, op.constant(w_scale)))


RULES = [Rule.from_plan("matmul-to-f8-matmul", any_operands("matmul"), _plan, _lower)]
