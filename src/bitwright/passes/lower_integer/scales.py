"""Scales as f32 constants, and the scaled values that rules look through.

Scales are multiplied in f64 and rounded to f32 when they become a constant.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Node, Value, constant_value

Array = np.ndarray[Any, Any]


def round_f32(exact: Array | float) -> Array:
    return np.asarray(exact, np.float64).astype(np.float32)


def scale_constant(op: Any, exact: Array) -> Value:
    """An f32 constant, a scalar where it has one element."""
    rounded = round_f32(exact)
    found: Value = op.constant(rounded.reshape(()) if rounded.size == 1 else rounded)
    return found


def match_scaled_product(value: Value) -> tuple[Node, Array] | None:
    """The integer product and the scale (in f64) of `cast(product) * scale`."""
    if value.node.op != "mul":
        return None
    for first, second in (value.node.inputs, value.node.inputs[::-1]):
        assert first is not None and second is not None
        known = constant_value(second)
        if known is None or first.node.op != "cast":
            continue
        product = next(iter(first.node.operands)).node
        if product.op in ("integer_matmul", "integer_conv"):
            return product, known.astype(np.float64)
    return None


def match_positive_scale(value: Value) -> tuple[Value, Array] | None:
    """x and s (in f64) of `x * s` with a positive constant s, per tensor or per channel."""
    if value.node.op != "mul":
        return None
    for x, other in (value.node.inputs, value.node.inputs[::-1]):
        assert x is not None and other is not None
        known = constant_value(other)
        if known is None or x.is_constant or x.shape != value.shape or known.dtype != np.float32:
            continue
        if np.isfinite(known).all() and (known > 0).all():
            return x, known.astype(np.float64)
    return None
