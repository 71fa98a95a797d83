"""A quantize behind a product becomes a requantize, and its division joins the scales before it.

    quantize(relu(cast(y) * m) + residual)  ->  requantize(relu(cast(y) * (m / s)) + residual / s)
    quantize(gelu(cast(y) * m))             ->  requantize(gelu(cast(y) * m) * (1 / s))

Clips and relus at or beyond the ends of the integer range are dropped: requantize saturates there.
Scales that training changes are divided in the graph.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bitwright.ir.dtype import DType, f32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ops.core.registry import get
from bitwright.passes.lower_integer import operands
from bitwright.passes.lower_integer.scales import (
    Scale,
    in_f64,
    is_parameter,
    known_scale,
    match_positive_scale,
    match_scaled_product,
    over,
    round_f32,
    rounded,
    scale_constant,
    times,
)
from bitwright.rewrite import Match, Rule, any_operands

Array = np.ndarray[Any, Any]
BOUND = 2.0**29
"""A value below this can be rounded and shifted by a zero point without a range check."""


def requantize_rule(shares: bool = False) -> Rule:
    """`shares`: a value with other readers is computed once, in its own unit, and then divided."""
    plan = partial(_plan, shares=shares)
    return Rule.from_plan("quantize-to-requantize", any_operands("quantize"), plan, _lower)


class _Requantize(NamedTuple):
    scale: Scale
    is_linear: bool
    """Whether the division can join the scales of the operands (`_is_linear`)."""


def _plan(m: Match, shares: bool) -> _Requantize | str:
    node = m.root
    x, scale, _ = operands.quantize_operands(node)
    known = known_scale(scale)
    to: DType = node.attrs["to"]
    if node.attrs.get("axis") is not None or known is None or not to.is_integer:
        return "it has no single constant scale, or no integer type"
    if x.dtype != f32 or scale.dtype != f32 or to.bits > 16:
        return "it is not f32"
    if isinstance(known, np.ndarray):
        if not (np.isfinite(known).all() and (known > 0).all()):
            return "its scale is not a positive number"
        known = np.asarray(known.reshape(-1)[0])
    is_linear = _is_linear(m, x) and not (shares and m.uses(x) != 1)
    if is_linear or operands.comes_from_product(x):
        return _Requantize(known, is_linear)
    return "it does not come from a product"


def _is_linear(m: Match, value: Value, top: bool = True) -> bool:
    """Whether a value consists of scaled integers, their sums and differences, and clips only."""
    node = value.node
    if constant_value(value) is not None or is_parameter(value):
        return not top
    known = operands.match_dequantize(value)
    if isinstance(known, operands.QuantizedOperand):
        return known.is_static and not top
    if m.uses(value) != 1 and not top:
        return False
    if match_scaled_product(value) is not None:
        return True
    if node.op in ("add", "sub"):
        parts = [_is_linear(m, v, False) for v in node.operands]
        return all(parts) and not all(v.is_constant for v in node.operands)
    if node.op in ("relu", "clip"):
        return all(_is_linear(m, v, False) for v in node.operands)
    if found := match_positive_scale(value):
        return _is_linear(m, found[0], False) and not found[0].is_constant
    return False


def _lower(op: Any, m: Match, plan: _Requantize) -> Any:
    x, _, zero = operands.quantize_operands(m.root)
    to = m.root.attrs["to"]
    point = constant_value(zero) if zero is not None else np.zeros(())
    if zero is not None and zero.rank:
        zero = op.reshape(zero, shape=())
    ends = None
    if point is not None:
        first = float(point.reshape(-1)[0])
        ends = float(to.min) - first, float(to.max) - first
    scale = plan.scale
    upper_bound: Value | None = None
    is_positive = False
    if isinstance(scale, Value):
        inner, bounded = x, False
        scale = op.reshape(in_f64(op, scale), shape=())
        if not plan.is_linear:
            # a value that is never negative gets a zero point of 0
            known_ends = ends or (0.0, math.inf)
            found = _drop_run_time_clips(op, x, scale, known_ends)
            inner, scale, upper_bound, is_positive = found
    else:
        inner, scale, upper = _drop_clips(x, scale, ends, plan.is_linear)
        upper_bound = None if upper is None else op.constant(upper)
        bounded = _max_abs(inner, scale) < BOUND
    divided = _divide_scales(op, inner, scale) if plan.is_linear else _divide(op, inner, scale)
    if ends is None and is_positive:
        divided = op.relu(divided)  # saturation does not imply it for every zero point
    return op.requantize(divided, zero, upper_bound, to=to, bounded=bounded)


def _drop_run_time_clips(
    op: Any, value: Value, scale: Scale, ends: tuple[float, float]
) -> tuple[Value, Scale, Value | None, bool]:
    """As `_drop_clips` with a scale known at run time, for relus and clips of positive values.

    Also returns whether it dropped a lower limit of 0.
    """
    upper: Value | None = None
    is_positive = False
    while match_scaled_product(value) is None:
        if found := match_positive_scale(value):
            value, scale = found[0], over(op, scale, found[1])
            continue
        limits = _clip_limits(value.node)
        if limits is None:
            break
        low, high = limits
        if low is not None and (low.any() or ends[0] < 0):
            break
        if high is not None:
            top = rounded(op, over(op, high.astype(np.float64), scale))
            upper = top if upper is None else op.minimum(top, upper)
        is_positive |= low is not None
        value = next(value.node.operands)
    return value, scale, upper, is_positive


def _match_scale(value: Value) -> tuple[Value, Scale] | None:
    """x and s of `x * s` with a positive constant s, or a scale of products that is trained."""
    if found := match_positive_scale(value):
        return found
    product = match_scaled_product(value)
    if product is None or not isinstance(product[1], Value):
        return None
    (real,) = (v for v in value.node.operands if v.node.op == "cast" and v is not product[1])
    return real, product[1]


def _divide(op: Any, value: Value, scale: Scale) -> Value:
    """value / scale, with the division in a trailing scale and constant, if there are any.

    The rounding of a sum of products and its bias stays as the graph has it, as in other runtimes.
    """
    if value.node.op == "add":
        for x, other in (value.node.inputs, value.node.inputs[::-1]):
            known = None if other is None else known_scale(other)
            if known is None or x is None or x.shape != value.shape:
                continue
            if _match_scale(x):
                rest = rounded(op, over(op, known, scale))
                return op.add(_divide(op, x, scale), rest)  # type: ignore[no-any-return]
    if found := _match_scale(value):
        value, scale = found[0], over(op, scale, found[1])
    return op.mul(value, rounded(op, over(op, 1.0, scale)))  # type: ignore[no-any-return]


def _divide_scales(op: Any, value: Value, scale: Scale) -> Value:
    """value / scale, with the division in the scales of the operands; it may be per channel."""
    array = constant_value(value)
    if array is not None:
        return rounded(op, over(op, array.astype(np.float64), scale))
    known = operands.match_dequantize(value)
    if isinstance(known, operands.QuantizedOperand) and known.is_static:
        return _rescale(op, known, scale)
    if is_parameter(value):
        return rounded(op, over(op, value, scale))
    if found := match_scaled_product(value):
        product, factor = found
        real = op.cast(product.outputs[0], to=f32)
        return op.mul(real, scale_constant(op, over(op, factor, scale)))  # type: ignore[no-any-return]
    if scaled := match_positive_scale(value):
        return _divide_scales(op, scaled[0], over(op, scale, scaled[1]))
    parts = [None if v is None else _divide_scales(op, v, scale) for v in value.node.inputs]
    return op.like(value.node, *parts)  # type: ignore[no-any-return]


def _rescale(op: Any, known: operands.QuantizedOperand, scale: Scale) -> Value:
    """(q - zero) f as q f - (zero f), one operation less."""
    assert known.known_scale is not None
    ratio = over(op, _scalar(op, known.known_scale), scale)
    real = op.mul(op.cast(known.qvalues, to=f32), rounded(op, ratio))
    zero = known.constant_zero
    if isinstance(known.zero, Value) and zero is None:
        moved = times(op, op.neg(_scalar(op, known.zero)), ratio)
        return op.add(real, rounded(op, moved))  # type: ignore[no-any-return]
    if zero is not None and zero.any():
        real = op.add(real, rounded(op, times(op, -float(zero.reshape(-1)[0]), ratio)))
    return real  # type: ignore[no-any-return]


def _scalar(op: Any, number: Scale) -> Scale:
    """A number of one element as a scalar; a run-time value in f64."""
    return op.reshape(in_f64(op, number), shape=()) if isinstance(number, Value) else number


def _drop_clips(
    value: Value, scale: Array, ends: tuple[float, float] | None, is_linear: bool
) -> tuple[Value, Array, Array | None]:
    """The value without clips that the saturation at `ends` implies.

    Also returns its scale, and an upper bound (in units of the scale) that remains to be applied.
    Behind a clip with a lower limit other than 0, only scales of linear values are merged: whether
    saturation implies the limit is not known while the scale is trained, and the order of roundings
    must be that of the training.
    """
    upper: Array | None = None
    while ends is not None and match_scaled_product(value) is None:
        if found := match_positive_scale(value):
            value, scale = found[0], scale / found[1]
            continue
        limits = _clip_limits(value.node)
        if limits is None:
            break
        low, high = limits
        if low is not None and low.any() and not is_linear:
            break
        if low is not None and not (round_f32(low / scale) <= ends[0]).all():
            break
        if high is not None:
            top = round_f32(high / scale)
            if upper is not None:
                top = np.minimum(top, upper)
            if not (np.rint(top) >= ends[1]).all():
                upper = top
        value = next(value.node.operands)
    return value, scale, upper


def _clip_limits(node: Node) -> tuple[Array | None, Array | None] | None:
    """The constant lower and upper limit of a relu or clip, or None for any other node."""
    if node.op == "relu":
        return np.zeros(()), None
    if node.op != "clip":
        return None
    low, high = (*node.inputs, None, None)[1:3]
    lows, highs = (None if v is None else constant_value(v) for v in (low, high))
    is_known = (low is None or lows is not None) and (high is None or highs is not None)
    return (lows, highs) if is_known else None


def _max_abs(value: Value, scale: Array) -> float:
    """An upper bound of |value / scale|."""
    node = value.node
    array = constant_value(value)
    if array is not None:
        return float(np.abs(array / scale).max(initial=0))
    known = operands.match_dequantize(value)
    if isinstance(known, operands.QuantizedOperand) and known.scale is not None:
        return float(known.max_distance * np.max(known.scale / scale))
    if product := match_scaled_product(value):
        if isinstance(product[1], Value):
            return float("inf")
        return float(operands.INT32_LIMIT * np.abs(product[1] / scale).max(initial=0))
    if found := match_positive_scale(value):
        return _max_abs(found[0], scale / found[1])
    opdef = get(node.op)
    if np.isfinite(opdef.max_abs):
        return float(np.max(opdef.max_abs / scale))
    if opdef.shrinks:
        return _max_abs(next(node.operands), scale)
    if node.op in ("add", "sub", "clip"):
        return sum(_max_abs(v, scale) for v in node.operands)
    return float("inf")
