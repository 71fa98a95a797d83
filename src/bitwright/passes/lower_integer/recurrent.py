"""Recurrent layers of codes: the input's share as one product, the steps on codes.

    lstm(dequantize(x), dequantize(W), dequantize(R), …)
        ->  integer_lstm(matmul(dequantize(x), dequantize(W)'), R, scale of R, …)

The product is lowered like any other afterwards. States have a range for each row and step, found
when the model runs, so only the weights and the input need to be codes. A layer whose weights alone
are codes (weight-only) stays what it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i8
from bitwright.ir.graph import Value, constant_value
from bitwright.ir.types import normalize_axis
from bitwright.ops.nn.recurrent import GATES
from bitwright.ops.quant.integer_recurrent import PREFIX
from bitwright.passes.lower_integer.operands import match_dequantize
from bitwright.rewrite import Match, Rule

Array = np.ndarray[Any, Any]
LARGEST_TERM = 127 * 127


def recurrence_rules() -> list[Rule]:
    return [
        Rule(f"{name}-of-codes", _any(name), _quantized_recurrence, _no_recurrence)
        for name in GATES
    ]


def _any(name: str) -> Any:
    return lambda op: getattr(op, name)(...)


def weight_rows(value: Value) -> tuple[Array, Array] | str:
    """Codes and scales [directions, units] of a constant [directions, units, terms], or why not."""
    shape, source = value.shape, value
    if source.node.op == "reshape":
        source = next(iter(source.node.operands))
    node = source.node
    if node.op != "dequantize" or value.dtype != f32:
        return f"{value} is not a dequantized constant"
    arrays = [None if v is None else constant_value(v) for v in (*node.inputs, None)[:3]]
    qvalues, scale, zero = arrays
    if qvalues is None or scale is None or qvalues.dtype != i8.numpy:
        return f"{value} is not a constant of i8 codes"
    if (zero is not None and zero.any()) or (zero is None and len(node.inputs) > 2):
        return f"{value} has codes around another number than 0"
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return f"{value} has a scale that is not a positive number"
    rows = qvalues.shape[:-1]
    axis = node.attrs.get("axis")
    if axis is None:
        scales = np.broadcast_to(scale.reshape(()), rows)
    else:
        at = normalize_axis(axis, qvalues.ndim)
        if node.attrs.get("block") or at == qvalues.ndim - 1:
            return f"{value} has several scales for a unit"
        along = [-1 if i == at else 1 for i in range(len(rows))]
        scales = np.broadcast_to(scale.reshape(along), rows)
    if qvalues.shape[-1] != shape[-1]:
        return f"{value} divides its terms"
    return qvalues.reshape(shape), scales.reshape(shape[:-1])


def _no_recurrence(m: Match) -> str:
    x, w, r = m.root.inputs[:3]
    assert x is not None and w is not None and r is not None
    source = match_dequantize(x, rows=True)
    if isinstance(source, str):
        return source
    for value in (w, r):
        found = weight_rows(value)
        if isinstance(found, str):
            return found
    hidden = r.shape[2]
    if not isinstance(hidden, int) or hidden * LARGEST_TERM >= 2**31:
        return "its sums may leave 32 bits"
    return ""


def _quantized_recurrence(op: Any, m: Match) -> Any:
    node = m.root
    x, w, r, *rest = node.inputs
    assert w is not None and r is not None
    found, recurrent = weight_rows(w), weight_rows(r)
    assert not isinstance(found, str) and not isinstance(recurrent, str)
    qvalues, scales = found
    units = qvalues.shape[0] * qvalues.shape[1]
    matrix = op.dequantize(
        op.constant(np.ascontiguousarray(qvalues.reshape(units, -1).T)),
        op.constant(np.ascontiguousarray(scales.reshape(units))),
        axis=1,
    )
    steps = op.constant(np.ascontiguousarray(recurrent[1]))
    share = op.matmul(x, matrix)
    return op.op(PREFIX + node.op, share, op.constant(recurrent[0]), steps, *rest, **node.attrs)
