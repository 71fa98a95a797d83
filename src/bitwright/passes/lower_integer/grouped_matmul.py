"""Products by expert of quantized rows and constant weights become integer products.

    grouped_matmul(dequantize(x), dequantize(w), counts)
        ->  integer_grouped_matmul(x, w, counts, scale of w, zero point of x) * scale of x

One scale for all rows is a factor of the weight's scales, which are rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.passes.lower_integer.operands import (
    LIMIT,
    QuantizedOperand,
    Weight,
    largest_sum,
    match_dequantize,
    weight_of,
)
from bitwright.rewrite import Match, Rule


def grouped_rule() -> Rule:
    return Rule("grouped-product-of-codes", lambda op: op.grouped_matmul(...), _lower, _why_not)


def _operands(m: Match) -> tuple[QuantizedOperand, Weight] | str:
    x, w, _ = m.root.inputs
    assert x is not None and w is not None
    source, weight = match_dequantize(x, rows=True), weight_of(w, -1)
    if isinstance(source, str):
        return source
    if isinstance(weight, str):
        return weight
    signed = weight.around_zero()
    if signed is None:
        return f"{w} has quantized values around another number than 0"
    bound = largest_sum(signed, -1, source.reach)
    if bound >= LIMIT:
        return f"its sums may reach {bound}, beyond 32 bits"
    return source, signed


def _why_not(m: Match) -> str:
    found = _operands(m)
    return found if isinstance(found, str) else ""


def _lower(op: Any, m: Match) -> Any:
    found = _operands(m)
    assert not isinstance(found, str)
    source, weight = found
    experts, _, columns = weight.qvalues.shape
    scale = weight.scale if source.step is None else weight.scale * source.step
    scale = scale.reshape(()) if scale.size == 1 else scale
    each = np.broadcast_to(scale.astype(np.float32), (experts, 1, columns))
    y = op.integer_grouped_matmul(
        source.qvalues,
        op.constant(weight.qvalues),
        m.root.inputs[2],
        op.constant(np.ascontiguousarray(each)),
        source.zero,
    )
    return y if source.scale is None else op.mul(y, source.scale)
