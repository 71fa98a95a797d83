"""Quantization as QuantizeLinear / DequantizeLinear.

The schemas determine the opset: 13 for 8 bits per tensor or axis, 19 for float8, 21 for 4 and 16
bits and for blocks, 23 for float4, 25 for 2 bits. Cases that the two ops do not support (f64,
ranges of no type) are plain arithmetic, and dynamic quantization is a model-local function.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bitwright.export.onnx.forms import as_scalar, counting, reduce
from bitwright.export.onnx.functions import call
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.ir.dim import Dim
from bitwright.ir.dtype import DType, f8e4m3fn, f8e5m2, f8e8m0, f32, f64, i8, i64, u8
from bitwright.ir.types import TensorType, normalize_axis

FLOAT8 = (f8e4m3fn, f8e5m2)
MAX_ZEROS = 1 << 16
"""The most zero points that are written only for their type."""


@exports("dequantize", widens=False)
def write_dequantize(
    e: Scope, x: Ref, scale: Ref, zero_point: Ref | None, axis: int | None, block: int, to: Any
) -> Ref:
    natural = scale.element if scale.element.bits >= 16 else f32
    in_f32 = (to or natural) == f32 == scale.element
    is_float8 = x.element in FLOAT8 and not block
    if not in_f32 or not (is_float8 or _is_row_by_row(x, scale, axis, block)):
        return dequantize(e, x, scale, zero_point, axis, block, to or natural)

    def body(e: Scope, x: Ref, scale: Ref, zero_point: Ref | None = None) -> tuple[Ref, ...]:
        """Plain arithmetic: ONNX Runtime fuses a DequantizeLinear before a product as if its zero
        point were a scalar, and then rejects the fused node. Of float8 values it computes the
        fused product wrongly (1.31)."""
        y = e.cast(x, f32)
        factor = scale if block else _spread(e, scale, x, axis, 0)
        if zero_point is not None:
            offset = zero_point if block else _spread(e, zero_point, x, axis, 0)
            y = e.Sub(y, e.cast(offset, f32))
        return (e.Mul(y, factor),)

    given = [x, scale] if zero_point is None else [x, scale, zero_point]
    attrs = {"axis": axis, "block": block} | ({} if to is None else {"to": to})
    return call(e, "dequantize", given, attrs, body)[0]


def _is_row_by_row(x: Ref, scale: Ref, axis: int | None, block: int) -> bool:
    """Whether each row of the last axis has one scale, as in dynamic per-token quantization."""
    if not block or axis is None or not isinstance(scale.type, TensorType):
        return False
    return normalize_axis(axis, x.rank) == x.rank - 1 and scale.shape[-1] == 1


def dequantize(
    e: Scope, x: Ref, scale: Ref, zero_point: Ref | None, axis: int | None, block: int, to: DType
) -> Ref:
    """(x - zero_point) * scale in f32, or in f64 for f64 scales or results, rounded to `to`."""
    precision = f64 if f64 in (to, scale.element) else f32
    same_type = zero_point is None or zero_point.dtype == x.dtype
    if precision == f64 or not same_type:
        y = _distance(e, x, zero_point, axis, block, precision)
        return e.cast(e.Mul(y, e.cast(_spread(e, scale, x, axis, block), precision)), to)
    if block and e.opset < 21 and (rows := _as_rows(e, x, scale, zero_point, axis)):
        scale, zero_point = rows
        axis, block = 0, 0
    if axis is None:
        scale = as_scalar(e, scale)
        zero_point = None if zero_point is None else as_scalar(e, zero_point)
    if scale.element == f8e8m0:
        attrs = {"axis": axis, "block_size": block or None, "output_dtype": to}
        return e.emit("DequantizeLinear", [x, scale, zero_point], attrs, dtypes=[to])[0]
    if scale.element != to:
        scale = e.cast(scale, f32)
    attrs = {"axis": axis, "block_size": block or None}
    (y,) = e.emit("DequantizeLinear", [x, scale, zero_point], attrs, dtypes=[scale.element])
    return e.cast(y, to)


@exports("quantize", widens=False)
def write_quantize(
    e: Scope,
    x: Ref,
    scale: Ref,
    zero_point: Ref | None,
    axis: int | None,
    block: int,
    to: DType,
    saturate: bool,
    precision: DType | None,
) -> Ref:
    given = x, scale, zero_point, axis, block, to, saturate, precision
    source = None if e.node is None else next(e.node.operands).node.op
    is_plain = zero_point is None and not block and precision is None and saturate
    is_clipped = source in ("relu", "clip") and x.element == scale.element == f32
    if to not in FLOAT8 or not (is_plain and is_clipped):
        return quantize(e, *given)

    def body(e: Scope, x: Ref, scale: Ref) -> tuple[Ref, ...]:
        """Plain arithmetic: ONNX Runtime 1.31 drops a Relu before a QuantizeLinear to float8."""
        exact = e.Div(x, _spread(e, scale, x, axis, 0))
        return (e.cast(e.Clip(exact, e.scalar(to.min, x), e.scalar(to.max, x)), to),)

    attrs = {"axis": axis, "block": block, "to": to}
    return call(e, "quantize", [x, scale], attrs, body)[0]


def quantize(
    e: Scope,
    x: Ref,
    scale: Ref,
    zero_point: Ref | None,
    axis: int | None,
    block: int,
    to: DType,
    saturate: bool,
    precision: DType | None,
) -> Ref:
    if precision is None:
        narrow = f32 if scale.element.bits < 16 else scale.element
        precision = f64 if scale.element.is_integer else narrow
    if precision == f64:
        if not to.is_integer:
            raise e.reject(f"QuantizeLinear to {to} does not divide in f64")
        return e.cast(_qvalues(e, x, scale, zero_point, axis, block, to.min, to.max, f64), to)
    x, scale = e.cast(x, precision), e.cast(scale, precision)
    if axis is None:
        scale = as_scalar(e, scale)
        zero_point = None if zero_point is None else as_scalar(e, zero_point)
    attrs: dict[str, object] = {"axis": axis, "block_size": block or None}
    if to.is_float and not saturate:
        attrs["saturate"] = 0
    if zero_point is None and to != u8:
        zero_point = _zeros(e, to, axis, scale)
        if zero_point is None:
            attrs["output_dtype"] = to
    return e.emit("QuantizeLinear", [x, scale, zero_point], attrs, dtypes=[to])[0]


def _zeros(e: Scope, to: DType, axis: int | None, scale: Ref) -> Ref | None:
    """Zero points of the scale's shape, which give the quantized type in every opset."""
    shape: Any = () if axis is None else scale.shape
    if any(isinstance(size, Dim) for size in shape) or math.prod(shape) > MAX_ZEROS:
        return None
    return e.constant(np.zeros(shape), to)


def _as_rows(
    e: Scope, x: Ref, scale: Ref, zero_point: Ref | None, axis: int | None
) -> tuple[Ref, Ref | None] | None:
    """Scales [N, 1] of one block per row as per-row scales [N], for early opsets."""
    if x.rank != 2 or axis is None or normalize_axis(axis, 2) != 1 or scale.shape[1] != 1:
        return None
    flat = e.ints([-1])
    return e.Reshape(scale, flat), None if zero_point is None else e.Reshape(zero_point, flat)


# in plain arithmetic


def _spread(e: Scope, parameter: Ref, x: Ref, axis: int | None, block: int) -> Ref:
    """A scale or zero point, reshaped or gathered to broadcast over x."""
    if axis is None:
        return as_scalar(e, parameter)
    at = normalize_axis(axis, x.rank)
    if block:
        index = counting(e, x.shape[at])
        return e.Gather(parameter, e.Div(index, e.constant(block, i64)), axis=at)
    return e.Reshape(parameter, e.ints([-1 if i == at else 1 for i in range(x.rank)]))


def _distance(
    e: Scope, x: Ref, zero_point: Ref | None, axis: int | None, block: int, precision: DType
) -> Ref:
    y = e.cast(x, precision)
    if zero_point is None:
        return y
    return e.Sub(y, e.cast(_spread(e, zero_point, x, axis, block), precision))


def _qvalues(
    e: Scope,
    x: Ref,
    scale: Ref,
    zero_point: Ref | None,
    axis: int | None,
    block: int,
    low: float,
    high: float,
    precision: DType,
) -> Ref:
    """clip(round(x / scale) + zero_point, low, high) as floats."""
    factor = e.cast(_spread(e, scale, x, axis, block), precision)
    qvalues = e.Round(e.Div(e.cast(x, precision), factor))
    if zero_point is not None:
        qvalues = e.Add(qvalues, e.cast(_spread(e, zero_point, x, axis, block), precision))
    return e.Clip(qvalues, e.scalar(low, qvalues), e.scalar(high, qvalues))


@exports("fake_quantize", widens=False)
def fake_quantize(
    e: Scope,
    x: Ref,
    scale: Ref,
    zero_point: Ref | None,
    axis: int | None,
    block: int,
    low: int,
    high: int,
    ste: str,
) -> Ref:
    """QuantizeLinear and DequantizeLinear for the range of an 8-bit type, else arithmetic."""
    element = next((t for t in (i8, u8) if (t.min, t.max) == (low, high)), None)
    offsets_fit = zero_point is None or zero_point.element == element
    if element and offsets_fit and x.element == scale.element == f32 and not block:
        qvalues = quantize(e, x, scale, zero_point, axis, block, element, True, None)
        return dequantize(e, qvalues, scale, zero_point, axis, block, f32)
    precision = f64 if f64 in (x.element, scale.element) else f32
    qvalues = _qvalues(e, x, scale, zero_point, axis, block, low, high, scale.element)
    real = e.cast(qvalues, precision)
    if zero_point is not None:
        real = e.Sub(real, e.cast(_spread(e, zero_point, x, axis, block), precision))
    factor = e.cast(_spread(e, scale, x, axis, block), precision)
    return e.cast(e.Mul(real, factor), x.element)


@exports("dynamic_quantize", widens=False)
def dynamic_quantize(
    e: Scope, x: Ref, to: DType, per_token: bool, stored: DType | None
) -> tuple[Ref, ...]:
    if to == u8 and not per_token and stored is None:
        return e.emit("DynamicQuantizeLinear", [e.cast(x, f32)], results=3)
    attrs = {"to": to, "per_token": per_token}
    attrs |= {} if stored is None else {"stored": stored}

    def body(e: Scope, x: Ref) -> tuple[Ref, ...]:
        x = e.cast(x, f32)
        assert e.node is not None
        axes = [-1] if per_token else list(range(next(e.node.operands).rank))
        if to.is_float:
            return _dynamic_float(e, x, reduce(e, "ReduceMax", e.Abs(x), axes, per_token), to)
        zero, low, high = e.scalar(0, x), e.scalar(to.min, x), e.scalar(to.max, x)
        top = e.Max(reduce(e, "ReduceMax", x, axes, per_token), zero)
        bottom = e.Min(reduce(e, "ReduceMin", x, axes, per_token), zero)
        levels = e.scalar(to.max - to.min, x)
        spread = e.Div(e.Sub(top, bottom), levels)
        scale = e.Where(e.Equal(top, bottom), e.scalar(1, x), spread)
        offset = e.Round(e.Clip(e.Sub(low, e.Div(bottom, scale)), low, high))
        qvalues = e.Clip(e.Add(e.Round(e.Div(x, scale)), offset), low, high)
        if stored is not None:
            moved = e.scalar(stored.min - to.min, x)
            qvalues, offset = e.Add(qvalues, moved), e.Add(offset, moved)
        element = to if stored is None else stored
        return e.cast(qvalues, element), scale, e.cast(offset, element)

    return call(e, "dynamic_quantize", [x], attrs, body)


def _dynamic_float(e: Scope, x: Ref, peak: Ref, to: DType) -> tuple[Ref, ...]:
    """x in float8, the scale that maps the largest |x| to the largest value, and zeros."""
    zero = e.scalar(0, x)
    peak = e.Max(peak, zero)
    scale = e.Where(e.Equal(peak, zero), e.scalar(1, x), e.Div(peak, e.scalar(to.max, x)))
    return e.cast(e.Div(x, scale), to), scale, e.cast(e.Sub(scale, scale), to)
