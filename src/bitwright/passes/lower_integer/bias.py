"""A constant that is added to an integer product joins its sum.

    f32(Σ q w) * scale + bias   ->   f32(Σ q w + rne(bias / scale)) * scale

The sum must stay within 32 bits. One unit of the sum (the scale) must be small against the scale of
the input, unless the bias is an integer multiple of it. Where training changes weight, scale or
bias, these conditions are part of the graph:

    f32(Σ q w + (ok ? rne(bias / scale) : 0)) * scale + (ok ? 0 : bias)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.passes.lower_integer.operands import (
    INT32_LIMIT,
    MAX_DISTANCE,
    Weight,
    max_abs_sum,
)
from bitwright.passes.lower_integer.scales import (
    Scale,
    count_of,
    in_f64,
    is_parameter,
    match_scaled_product,
    reshaped,
    scale_constant,
)
from bitwright.rewrite import Match, Rule, any_operands

Array = np.ndarray[Any, Any]
FINE_WEIGHT = 64
"""From this weight on, one unit of the sum is small against the scale of the input."""
TOLERANCE = 2.0**-20
"""Relative error up to which a bias counts as an integer multiple of the scale."""


def bias_rule() -> Rule:
    return Rule.from_plan("bias-into-integer-product", any_operands("add"), _plan, _lower)


@dataclass(frozen=True)
class _Bias:
    product: Node
    scale: Scale
    bias: Scale
    whole: Array | None
    """The bias in units of the sum, if it is a constant that joins it."""


def _plan(m: Match) -> _Bias | str:
    for value, other in (m.root.inputs, m.root.inputs[::-1]):
        assert value is not None and other is not None
        found, bias = match_scaled_product(value), _known_bias(other)
        if found is None or bias is None:
            continue
        product, scale = found
        if len(product.inputs) > 4 or m.uses(value) != 1:
            return "the product has a bias already, or another reader"
        is_scaled = count_of(scale) == 1 or _is_per_channel(scale, product)
        if not _is_per_channel(bias, product) or not is_scaled:
            return "the other operand, or the scale, is not per channel"
        if isinstance(bias, Value) or isinstance(scale, Value):
            if _room(product) <= 0:
                return "the sum with the bias may overflow 32 bits"
            return _Bias(product, scale, bias, None)
        whole = np.rint(bias.reshape(-1) / scale.reshape(-1))
        if not _has_room(product, np.abs(whole).max(initial=0)):
            return "the sum with the bias may overflow 32 bits"
        error = np.abs(whole * scale.reshape(-1) - bias.reshape(-1))
        is_exact = (error <= TOLERANCE * np.abs(bias.reshape(-1))).all()
        if not is_exact and _is_coarse(product):
            return "rounding the bias to a multiple of the scale would lose precision"
        return _Bias(product, scale, bias, whole)
    return "it is not an integer product plus a constant"


def _known_bias(value: Value) -> Scale | None:
    known = constant_bias(value)
    if known is not None:
        return known
    return value if value.dtype == f32 and is_parameter(value) else None


def _lower(op: Any, m: Match, plan: _Bias) -> Any:
    product, scale = plan.product, plan.scale
    operands = [*product.inputs, *(None,) * (4 - len(product.inputs))]
    if plan.whole is not None:
        y = op.like(product, *operands, op.constant(plan.whole.astype(np.int32)))
        return op.mul(op.cast(y, to=f32), scale_constant(op, scale))
    bias = plan.bias if isinstance(plan.bias, Value) else op.constant(np.float32(plan.bias))
    unit, wanted = (in_f64(op, reshaped(op, v, (-1,))) for v in (scale, bias))
    whole = op.round(op.div(wanted, unit))
    fits = all_of(op, op.lt(op.abs(whole), op.constant(np.float64(_room(product)))))
    error = op.abs(op.sub(op.mul(whole, unit), wanted))
    is_exact = op.le(error, op.mul(op.constant(np.float64(TOLERANCE)), op.abs(wanted)))
    is_fine = _is_fine_at_run_time(op, product)
    ok = op.op("and", fits, op.op("or", all_of(op, is_exact), is_fine))
    total, rest = join_at_run_time(op, whole, ok, bias)
    y = op.like(product, *operands, total)
    return op.add(op.mul(op.cast(y, to=f32), scale_constant(op, scale)), rest)


def join_at_run_time(op: Any, whole: Value, ok: Value, bias: Value) -> tuple[Value, Value]:
    """The part of a bias that joins the sum, in units of it, and the rest: one of them is 0."""
    total = op.cast(op.where(ok, whole, op.constant(np.float64(0))), to=i32)
    return total, op.where(ok, op.constant(np.float32(0)), bias)


def all_of(op: Any, flags: Value) -> Value:
    """Whether all flags of a vector are set."""
    missing = op.where(flags, op.constant(np.float32(0)), op.constant(np.float32(1)))
    return op.lt(op.reduce_max(missing, axes=(0,)), op.constant(np.float32(0.5)))  # type: ignore[no-any-return]


def _is_per_channel(array: Scale, product: Node) -> bool:
    """Whether an array has one element per output channel of an integer product."""
    rank, shape = product.outputs[0].rank, product.outputs[0].shape
    channel = rank - 1 if product.op == "integer_matmul" else 1
    axis = len(array.shape) - rank + channel
    return axis >= 0 and bool(count_of(array) == shape[channel] == array.shape[axis])


def _room(product: Node) -> int:
    """What a bias may add to an integer product of any weights; -1 if the depth is unknown."""
    x, w = product.inputs[:2]
    assert x is not None and w is not None
    terms = (x.shape[-1],) if product.op == "integer_matmul" else w.shape[1:]
    if not all(isinstance(size, int) for size in terms):
        return -1
    return INT32_LIMIT - int(np.prod(terms, dtype=np.int64)) * MAX_DISTANCE**2


def _has_room(product: Node, most: float) -> bool:
    """Whether an integer product plus a bias of at most this magnitude stays within 32 bits.

    The zero points may have any value.
    """
    _, w, _, w_zero = (*product.inputs, None, None)[:4]
    is_matmul = product.op == "integer_matmul"
    room = _room(product)
    if room == -1:
        return False
    if most < room:
        return True
    known, zero = constant_value(w), None if w_zero is None else constant_value(w_zero)
    if known is None or (w_zero is not None and zero is None):
        return False
    weight = Weight(known, zero, np.ones(1))
    return bool(most < INT32_LIMIT - max_abs_sum(weight, -1 if is_matmul else 0, MAX_DISTANCE))


def _is_coarse(product: Node) -> bool:
    """Whether one unit of the sum is large: all weights are small and none is negative (an
    average), or they are unknown."""
    w = product.inputs[1]
    known = None if w is None else constant_value(w)
    return known is None or bool(known.min(initial=0) >= 0 and known.max(initial=0) < FINE_WEIGHT)


def _is_fine_at_run_time(op: Any, product: Node) -> Value:
    """The opposite of `_is_coarse`, for weights that are known at run time."""
    w = product.inputs[1]
    assert w is not None
    if constant_value(w) is not None:
        return op.constant(np.array(not _is_coarse(product)))  # type: ignore[no-any-return]
    wide = op.cast(op.reshape(w, shape=(w.tensor.count,)), to=f32)
    is_negative = op.lt(op.reduce_min(wide, axes=(0,)), op.constant(np.float32(0)))
    is_large = op.ge(op.reduce_max(wide, axes=(0,)), op.constant(np.float32(FINE_WEIGHT)))
    return op.op("or", is_negative, is_large)  # type: ignore[no-any-return]


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
