"""Recurrent layers of quantized values become integer recurrent layers.

    lstm(dequantize(x), dequantize(W), dequantize(R), …)
        ->  integer_lstm(matmul(dequantize(x), dequantize(W)'), R, scale of R, …)

One matmul computes the input's part of all time steps, and is lowered like any other. The states
are quantized dynamically per row and step, so only weights and input must be quantized. A
weight-only quantized layer does not change.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i8
from bitwright.ir.graph import Value, constant_value
from bitwright.ir.types import normalize_axis
from bitwright.ops.quant.integer_recurrent import PREFIX
from bitwright.ops.sequence.recurrent import GATES
from bitwright.passes.lower_integer.operands import INT32_LIMIT, match_dequantize
from bitwright.rewrite import Match, Rule, any_operands

Array = np.ndarray[Any, Any]
LARGEST_TERM = 127 * 127


def recurrence_rules() -> list[Rule]:
    return [
        Rule.from_plan(f"{name}-to-integer", any_operands(name), _plan, _lower) for name in GATES
    ]


Rows = tuple[Array, Array]
"""A weight i8[directions, units, terms] and its scales [directions, units]."""


def match_weight_rows(value: Value) -> Rows | str:
    """The constant i8 weight with one scale per unit, or why it is none."""
    shape, source = value.shape, value
    if source.node.op == "reshape":
        source = next(iter(source.node.operands))
    node = source.node
    if node.op != "dequantize" or value.dtype != f32:
        return f"{value} is not a dequantized constant"
    arrays = [None if v is None else constant_value(v) for v in (*node.inputs, None)[:3]]
    qvalues, scale, zero = arrays
    if qvalues is None or scale is None or qvalues.dtype != i8.numpy:
        return f"{value} is not dequantized from an i8 constant"
    if (zero is not None and zero.any()) or (zero is None and len(node.inputs) > 2):
        return f"{value} has a zero point other than 0"
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return f"{value} has a scale that is not a positive number"
    rows = qvalues.shape[:-1]
    axis = node.attrs.get("axis")
    if axis is None:
        scales = np.broadcast_to(scale.reshape(()), rows)
    else:
        at = normalize_axis(axis, qvalues.ndim)
        if node.attrs.get("block") or at == qvalues.ndim - 1:
            return f"{value} has several scales per unit"
        along = [-1 if i == at else 1 for i in range(len(rows))]
        scales = np.broadcast_to(scale.reshape(along), rows)
    if qvalues.shape[-1] != shape[-1]:
        return f"{value} is reshaped along its reduction axis"
    return qvalues.reshape(shape), scales.reshape(shape[:-1])


def _plan(m: Match) -> tuple[Rows, Rows] | str:
    x, w, r = m.root.inputs[:3]
    assert x is not None and w is not None and r is not None
    source = match_dequantize(x, rows=True)
    if isinstance(source, str):
        return source
    input_rows, recurrent_rows = match_weight_rows(w), match_weight_rows(r)
    if isinstance(input_rows, str):
        return input_rows
    if isinstance(recurrent_rows, str):
        return recurrent_rows
    hidden = r.shape[2]
    if not isinstance(hidden, int) or hidden * LARGEST_TERM >= INT32_LIMIT:
        return "its sums may overflow 32 bits"
    return input_rows, recurrent_rows


def _lower(op: Any, m: Match, plan: tuple[Rows, Rows]) -> Any:
    node = m.root
    x, _, _, *rest = node.inputs
    (qvalues, scales), (recurrent, recurrent_scales) = plan
    units = qvalues.shape[0] * qvalues.shape[1]
    matrix = op.dequantize(
        op.constant(np.ascontiguousarray(qvalues.reshape(units, -1).T)),
        op.constant(np.ascontiguousarray(scales.reshape(units))),
        axis=1,
    )
    constants = op.constant(recurrent), op.constant(np.ascontiguousarray(recurrent_scales))
    return op.op(PREFIX + node.op, op.matmul(x, matrix), *constants, *rest, **node.attrs)
