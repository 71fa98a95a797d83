"""Expands composite ops that have no kernels into ops that have.

    dequantize        (q - zero_point) · scale in f32
    quantize          clip(rne(x / scale) + zero_point), NaN as the lowest value; floats are cast
    dynamic_quantize  the same with scale and zero point from the range of x
    f8_matmul         a matmul in f32
    einsum            products of two operands at a time (`expand_einsum`)
    cast              to 4-bit or 2-bit integers: through i8
    batch_norm_*      sums over channels and elementwise ops (`expand_batch_norm`)
    rnn, gru, lstm    of half floats, also in training: computed in f32

Half floats are computed in f32, so that only the result is rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import DType, bf16, f8e4m3fn, f8e5m2, f16, f32, f64, i8, i32, i64, u8
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.passes.simplify.expand_batch_norm import BATCH_NORM
from bitwright.passes.simplify.expand_einsum import EINSUM
from bitwright.rewrite import Match, Rule, Trace, rewrite

# Types that `requantize` kernels write.
_PLAIN = ("i8", "u8", "i16", "u16")


def expand_composites(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


def expand_composites_but_f8(graph: Graph, trace: Trace) -> Graph:
    """As `expand_composites`, for targets with kernels for float8 products and half rows."""
    return rewrite(graph, F8_RULES, trace)


def _in_f32(op: Any, x: Value) -> Any:
    return op.cast(x, to=f32) if x.dtype.bits < 32 else x


def _as(op: Any, x: Value, element: DType) -> Any:
    return x if x.dtype == element else op.cast(x, to=element)


# quantization


def _broadcast(op: Any, parameter: Value, x: Value, node: Node) -> Any:
    """A scale or zero point in a shape that broadcasts over x."""
    axis = node.attrs.get("axis")
    if axis is None:
        return op.reshape(parameter, shape=())
    at = axis % x.rank
    if not node.attrs.get("block"):
        return op.reshape(parameter, shape=[x.shape[at] if i == at else 1 for i in range(x.rank)])
    block = node.attrs["block"]
    shape = parameter.shape
    wide = op.reshape(parameter, shape=(*shape[: at + 1], 1, *shape[at + 1 :]))
    wide = op.expand(wide, shape=(*shape[: at + 1], block, *shape[at + 1 :]))
    whole = op.reshape(wide, shape=(*shape[:at], shape[at] * block, *shape[at + 1 :]))
    if shape[at] * block == x.shape[at]:
        return whole
    return op.slice(whole, starts=[0], stops=[x.shape[at]], steps=[1], axes=[at])


def _dequantize(op: Any, m: Match) -> Any:
    node = m.root
    qvalues, scale, zero_point = (*node.inputs, None)[:3]
    assert qvalues is not None and scale is not None
    result = node.outputs[0].dtype
    wide = f64 if f64 in (result, scale.dtype) else f32
    element = wide if qvalues.dtype.is_float else i64 if qvalues.dtype == i32 else i32
    distance = _as(op, qvalues, element)
    if zero_point is not None:
        offset = _broadcast(op, zero_point, qvalues, node)
        distance = op.sub(distance, _as(op, offset, distance.dtype))
    factor = _as(op, _broadcast(op, scale, qvalues, node), wide)
    return _as(op, op.mul(_as(op, distance, wide), factor), result)


def _quantize(op: Any, m: Match) -> Any:
    node = m.root
    x, scale, zero_point = (*node.inputs, None)[:3]
    assert x is not None and scale is not None
    to: DType = node.attrs["to"]
    exact = _quotient(op, x, _broadcast(op, scale, x, node), node.attrs.get("precision"))
    offset = None if zero_point is None else _broadcast(op, zero_point, x, node)
    if exact.dtype == f32 and to.name in _PLAIN:
        return op.requantize(exact, offset, to=to)
    if offset is not None:
        offset = _as(op, offset, exact.dtype)
    if to.is_float:
        moved = exact if offset is None else op.add(exact, offset)
        return op.cast(_as(op, moved, f32), to=to, saturate=node.attrs.get("saturate", True))
    return _round_and_clip(op, exact, offset, to)


def _quantize_f8(op: Any, m: Match, x: Value, scale: Value) -> Any:
    """x (1 / scale) as float8; within one rounding of f32 of the quotient."""
    known = constant_value(scale)
    assert known is not None
    inverse = np.float32(1) / known.astype(np.float32).reshape(())
    scaled = op.mul(_as(op, x, f32), op.constant(inverse))
    return op.cast(scaled, to=m.root.attrs["to"], saturate=m.root.attrs.get("saturate", True))


def _why_not_reciprocal(m: Match) -> str | bool:
    known = constant_value(m.scale)
    to, precision = m.root.attrs["to"], m.root.attrs.get("precision")
    if (
        known is None
        or known.dtype != np.float32
        or m.root.attrs.get("axis") is not None
        or to not in (f8e4m3fn, f8e5m2)
        or precision not in (None, f32)
    ):
        return "it has no single constant f32 scale, or is not float8"
    with np.errstate(all="ignore"):
        is_normal = np.isfinite(known) & np.isfinite(np.float32(1) / known) & (known > 0)
    return not bool(is_normal.all()) and "its scale has no reciprocal"


def _round_and_clip(op: Any, exact: Value, offset: Value | None, to: DType) -> Any:
    """clip(rne(x / scale) + zero_point); NaN becomes the lowest value."""
    whole = op.round(exact)
    if offset is not None:
        whole = op.add(whole, offset)
    low = op.constant(to.min, whole.dtype)
    qvalues = op.clip(whole, low, op.constant(to.max, whole.dtype))
    return op.cast(op.where(op.is_nan(qvalues), low, qvalues), to=to)


def _dynamic_quantize(op: Any, m: Match, x: Value) -> Any:
    """Scale and zero point from the range of x, extended to contain 0."""
    to, per_token = m.root.outputs[0].dtype, m.root.attrs.get("per_token", False)
    x = _as(op, x, f32)
    axes = [x.rank - 1] if per_token else list(range(x.rank))
    if to.is_float:
        peak = op.reduce_max(op.abs(x), axes=axes, keepdims=per_token)
        peak = op.maximum(peak, op.constant(0, f32))
        largest = op.div(peak, op.constant(to.max, f32))
        scale = op.where(op.eq(peak, op.constant(0, f32)), op.constant(1, f32), largest)
        zeros = op.expand(op.cast(op.constant(0, f32), to=to), shape=scale.shape)
        return op.cast(op.div(x, scale), to=to), scale, zeros
    zero, low, high = (op.constant(number, f32) for number in (0, to.min, to.max))
    top = op.maximum(op.reduce_max(x, axes=axes, keepdims=per_token), zero)
    bottom = op.minimum(op.reduce_min(x, axes=axes, keepdims=per_token), zero)
    levels = op.constant(to.max - to.min, f32)
    step = op.div(op.sub(top, bottom), levels)
    scale = op.where(op.eq(top, bottom), op.constant(1, f32), step)
    point = op.round(op.clip(op.sub(low, op.div(bottom, scale)), low, high))
    qvalues = op.cast(point, to=to)
    if to.name in _PLAIN:
        return op.requantize(op.div(x, scale), qvalues, to=to), scale, qvalues
    return _round_and_clip(op, op.div(x, scale), point, to), scale, qvalues


def _move_stored(op: Any, m: Match, x: Value) -> Any:
    """Quantizes without `stored`, then moves values and zero points."""
    attrs, to = m.root.attrs, m.root.attrs["stored"]
    q, scale, zero = op.dynamic_quantize(x, to=attrs["to"], per_token=attrs["per_token"])
    shift = op.constant(int(to.min) - int(attrs["to"].min), i32)
    moved = [op.cast(op.add(op.cast(v, to=i32), shift), to=to) for v in (q, zero)]
    return moved[0], scale, moved[1]


def _why_not_stored(m: Match) -> str | bool:
    return m.root.attrs.get("stored") is None and "values are stored as they are"


def _why_not_dynamic_quantize(m: Match) -> str | bool:
    to, per_token = m.root.outputs[0].dtype, m.root.attrs.get("per_token", False)
    has_kernel = per_token and m.x.dtype == f32 and to.name in ("i8", "u8")
    return has_kernel and "a kernel quantizes its rows"


def _f8_matmul(op: Any, m: Match, x: Value, w: Value) -> Any:
    return op.matmul(op.cast(x, to=f32), op.cast(w, to=f32))


def _why_not_rows(m: Match) -> str | bool:
    to, per_token = m.root.outputs[0].dtype, m.root.attrs.get("per_token", False)
    has_kernel = per_token and m.x.dtype in (f32, f16, bf16) and (to.is_float or to in (i8, u8))
    return has_kernel and "a kernel quantizes its rows"


def _quotient(op: Any, x: Value, scale: Value, precision: DType | None) -> Any:
    """x / scale as `ops.quant.quantize.quotient` rounds it, in f32 or f64."""
    if precision is None:
        element = scale.dtype
        precision = f64 if element.is_integer else f32 if element.bits < 16 else element
    x, scale = _as(op, x, precision), _as(op, scale, precision)
    if precision.bits >= 32:
        return op.div(x, scale)
    # rounding a quotient of halves to f32 first does not change the half it rounds to
    return _as(op, _as(op, op.div(_as(op, x, f32), _as(op, scale, f32)), precision), f32)


def _narrow(op: Any, m: Match, x: Value) -> Any:
    return op.cast(op.cast(x, to="i8"), to=m.root.attrs["to"])


def _why_not_narrow(m: Match) -> str | bool:
    to, source = m.root.attrs["to"], m.x.dtype
    is_wide = (source.is_float or source.is_integer) and source.numpy.itemsize > 1
    return not (to.is_integer and to.bits < 8 and is_wide) and "a single cast does it"


def _compute_in_f32(op: Any, m: Match) -> Any:
    """Computes state and gates in f32."""
    operands = [v if v is None or not v.dtype.is_float else _in_f32(op, v) for v in m.root.inputs]
    results = op.like(m.root, *operands)
    return tuple(_as(op, v, t.dtype) for v, t in zip(results, m.root.outputs, strict=True))


def _why_not_f32(m: Match) -> str | bool:
    return next(m.root.operands).dtype.bits >= 32 and "it has a kernel"


RULES = [
    EINSUM,
    *BATCH_NORM,
    Rule("rnn-in-f32", lambda op: op.rnn(...), _compute_in_f32, _why_not_f32),
    Rule("gru-in-f32", lambda op: op.gru(...), _compute_in_f32, _why_not_f32),
    Rule("lstm-in-f32", lambda op: op.lstm(...), _compute_in_f32, _why_not_f32),
    Rule("gru-train-in-f32", lambda op: op.gru_train(...), _compute_in_f32, _why_not_f32),
    Rule("lstm-train-in-f32", lambda op: op.lstm_train(...), _compute_in_f32, _why_not_f32),
    Rule("rnn-backward-in-f32", lambda op: op.rnn_backward(...), _compute_in_f32, _why_not_f32),
    Rule("gru-backward-in-f32", lambda op: op.gru_backward(...), _compute_in_f32, _why_not_f32),
    Rule("lstm-backward-in-f32", lambda op: op.lstm_backward(...), _compute_in_f32, _why_not_f32),
    Rule("narrow-integer-through-i8", lambda op, x: op.cast(x), _narrow, _why_not_narrow),
    Rule("dequantize-as-arithmetic", lambda op: op.dequantize(...), _dequantize),
    Rule("quantize-as-arithmetic", lambda op: op.quantize(...), _quantize),
    Rule(
        "dynamic-quantize-moved",
        lambda op, x: op.dynamic_quantize(x),
        _move_stored,
        _why_not_stored,
    ),
    Rule(
        "dynamic-quantize-as-arithmetic",
        lambda op, x: op.dynamic_quantize(x),
        _dynamic_quantize,
        _why_not_dynamic_quantize,
    ),
    Rule("f8-matmul-in-f32", lambda op, x, w: op.f8_matmul(x, w), _f8_matmul),
]
F8_RULES = [
    Rule(
        "quantize-f8-by-reciprocal",
        lambda op, x, scale: op.quantize(x, scale),
        _quantize_f8,
        _why_not_reciprocal,
    ),
    *(r for r in RULES if r.name not in ("f8-matmul-in-f32", "dynamic-quantize-as-arithmetic")),
    Rule(
        "dynamic-quantize-but-f8-rows",
        lambda op, x: op.dynamic_quantize(x),
        _dynamic_quantize,
        _why_not_rows,
    ),
]
