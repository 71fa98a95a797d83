"""Grouped matmuls (one weight per expert) of quantized values become integer products.

    grouped_matmul(dequantize(x), dequantize(w), counts)
        ->  integer_grouped_matmul(x, w, counts, scale of w, zero point of x) * scale of x

A constant scale of x joins the scales of w.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.passes.lower_integer import operands
from bitwright.rewrite import Match, Rule, any_operands


def grouped_rule() -> Rule:
    return Rule.from_plan(
        "grouped-matmul-to-integer", any_operands("grouped_matmul"), _plan, _lower
    )


def _plan(m: Match) -> tuple[operands.QuantizedOperand, operands.Weight] | str:
    x, w, _ = m.root.inputs
    assert x is not None and w is not None
    source, weight = operands.match_dequantize(x, rows=True), operands.match_weight(w, -1)
    if isinstance(source, str):
        return source
    if isinstance(weight, str):
        return weight
    signed = weight.symmetric()
    if signed is None:
        return f"{w} has zero points that i8 cannot absorb"
    bound = operands.max_abs_sum(signed, -1, source.max_distance)
    if bound >= operands.INT32_LIMIT:
        return f"its sums may reach {bound}, beyond 32 bits"
    return source, signed


def _lower(op: Any, m: Match, plan: tuple[operands.QuantizedOperand, operands.Weight]) -> Any:
    source, weight = plan
    experts, _, columns = weight.qvalues.shape
    scale = weight.scale if source.scale is None else weight.scale * source.scale
    scale = scale.reshape(()) if scale.size == 1 else scale
    scales = np.broadcast_to(scale.astype(np.float32), (experts, 1, columns))
    y = op.integer_grouped_matmul(
        source.qvalues,
        op.constant(weight.qvalues),
        m.root.inputs[2],
        op.constant(np.ascontiguousarray(scales)),
        source.zero,
    )
    return y if source.dynamic_scale is None else op.mul(y, source.dynamic_scale)
