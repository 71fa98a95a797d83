"""A constant that is added to an integer product joins its sum.

    f32(Σ q w) * scale + bias   ->   f32(Σ q w + rne(bias / scale)) * scale

The sum must stay within 32 bits. One unit of the sum (the scale) must be small against the scale of
the input, unless the bias is an integer multiple of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.passes.lower_integer.operands import INT32_LIMIT, Weight, max_abs_sum
from bitwright.passes.lower_integer.scales import match_scaled_product, scale_constant
from bitwright.rewrite import Match, Rule, any_operands

Array = np.ndarray[Any, Any]
MAX_DISTANCE = 255
"""The largest |q - zero| of 8-bit values."""
FINE_WEIGHT = 64
"""From this |w| on, one unit of the sum is small against the scale of the input."""
TOLERANCE = 2.0**-20
"""Relative error up to which a bias counts as an integer multiple of the scale."""


def bias_rule() -> Rule:
    return Rule.from_plan("bias-into-integer-product", any_operands("add"), _plan, _lower)


def _plan(m: Match) -> tuple[Node, Array, Array] | str:
    """The integer product, the bias in units of its sum, and the scale."""
    for value, other in (m.root.inputs, m.root.inputs[::-1]):
        assert value is not None and other is not None
        found, bias = match_scaled_product(value), constant_bias(other)
        if found is None or bias is None:
            continue
        product, scale = found
        if len(product.inputs) > 4 or m.uses(value) != 1:
            return "the product has a bias already, or another reader"
        is_scaled = scale.size == 1 or _is_per_channel(scale, product)
        if not _is_per_channel(bias, product) or not is_scaled:
            return "the other operand, or the scale, is not per channel"
        whole = np.rint(bias.reshape(-1) / scale.reshape(-1))
        if not _has_room(product, np.abs(whole).max(initial=0)):
            return "the sum with the bias may overflow 32 bits"
        error = np.abs(whole * scale.reshape(-1) - bias.reshape(-1))
        is_exact = (error <= TOLERANCE * np.abs(bias.reshape(-1))).all()
        if not is_exact and _is_coarse(product):
            return "rounding the bias to a multiple of the scale would lose precision"
        return product, whole, scale
    return "it is not an integer product plus a constant"


def _lower(op: Any, m: Match, plan: tuple[Node, Array, Array]) -> Any:
    product, whole, scale = plan
    operands = [*product.inputs, *(None,) * (4 - len(product.inputs))]
    y = op.like(product, *operands, op.constant(whole.astype(np.int32)))
    return op.mul(op.cast(y, to=f32), scale_constant(op, scale))


def _is_per_channel(array: Array, product: Node) -> bool:
    """Whether an array has one element per output channel of an integer product."""
    rank, shape = product.outputs[0].rank, product.outputs[0].shape
    channel = rank - 1 if product.op == "integer_matmul" else 1
    axis = array.ndim - rank + channel
    return axis >= 0 and bool(array.size == shape[channel] == array.shape[axis])


def _has_room(product: Node, most: float) -> bool:
    """Whether an integer product plus a bias of at most this magnitude stays within 32 bits.

    The zero points may have any value.
    """
    x, w, _, w_zero = (*product.inputs, None, None)[:4]
    assert x is not None and w is not None
    is_matmul = product.op == "integer_matmul"
    terms = (x.shape[-1],) if is_matmul else w.shape[1:]
    if not all(isinstance(size, int) for size in terms):
        return False
    if most < INT32_LIMIT - int(np.prod(terms, dtype=np.int64)) * MAX_DISTANCE**2:
        return True
    known, zero = constant_value(w), None if w_zero is None else constant_value(w_zero)
    if known is None or (w_zero is not None and zero is None):
        return False
    weight = Weight(known, zero, np.ones(1))
    return bool(most < INT32_LIMIT - max_abs_sum(weight, -1 if is_matmul else 0, MAX_DISTANCE))


def _is_coarse(product: Node) -> bool:
    """Whether one unit of the sum is large: all weights are small (an average), or unknown."""
    w = product.inputs[1]
    known = None if w is None else constant_value(w)
    return known is None or bool(np.abs(known.astype(np.int16)).max(initial=0) < FINE_WEIGHT)


def constant_bias(value: Value | None) -> Array | None:
    """A constant bias in f64, dequantized if it is quantized."""
    if value is None:
        return None
    known = constant_value(value)
    if known is not None:
        return known.astype(np.float64)
    node = value.node
    if node.op == "reshape":
        inner = constant_bias(next(iter(node.operands)))
        return None if inner is None else inner.reshape(value.shape)
    if node.op != "dequantize" or node.attrs.get("block"):
        return None
    arrays = [None if v is None else constant_value(v) for v in (*node.inputs, None)[:3]]
    qvalues, scale, zero = arrays
    if qvalues is None or scale is None or qvalues.ndim != 1:
        return None
    distance = qvalues.astype(np.float64) - (0 if zero is None else zero.astype(np.float64))
    return np.asarray(distance * scale.astype(np.float64))
