"""Quantize and dequantize, with the semantics and rounding of ONNX QuantizeLinear.

    quantize     q = saturate(rne(x / scale) + zero_point)
    dequantize   y = (q - zero_point) * scale

A scale applies to the whole tensor (axis None), one index of an axis (scale[C]), or `block`
indices of an axis (scale of x's rank; the last block may be short). The references follow ONNX's
rounding to the bit instead of computing in f64: the quotient is rounded to the scale's type or
`precision`, products to f32. Values out of range saturate, infinities included. NaN, which ONNX
leaves undefined, becomes the lowest quantized value, as in ONNX Runtime.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dtype import (
    DType,
    dtype,
    f4e2m1,
    f8e4m3fn,
    f8e4m3fnuz,
    f8e5m2,
    f8e5m2fnuz,
    f32,
    f64,
    i8,
    i32,
    u8,
)
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import narrow, wide
from bitwright.ops.core.opdef import ROUNDS, Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.math.cast import cast
from bitwright.ops.quant.parameters import spread_value, sum_to_parameter

FLOAT_DTYPES = (f8e4m3fn, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f4e2m1)
DYNAMIC_FLOATS = (f8e4m3fn, f8e5m2)
"""Float types of `dynamic_quantize`; their zero points are 0."""
GRANULARITY = {"axis": Attr("int", None), "block": Attr("int", 0)}


def is_quantized_dtype(element: DType) -> bool:
    """Whether values can be quantized to this type."""
    return element in FLOAT_DTYPES or (element.is_integer and element.bits <= 16)


def check_granularity(
    x: TensorType, scale: TensorType, zero_point: TensorType | None, axis: int | None, block: int
) -> None:
    """Raise unless scale and zero point have the shape that axis and block require."""
    if axis is None or block < 0:
        if block:
            raise InferenceError(
                "'block' does not fit", expected="0, or a positive size with an axis", found=block
            )
        expected: tuple[Any, ...] = (1,)
    elif block == 0:
        expected = (x.shape[normalize_axis(axis, x.rank)],)
    else:
        at = normalize_axis(axis, x.rank)
        blocks = (x.shape[at] + block - 1) // block
        expected = (*x.shape[:at], blocks, *x.shape[at + 1 :])
    for name, type_ in (("scale", scale), ("zero_point", zero_point)):
        if type_ is not None:
            expect.rank(name, type_, *({0, 1} if axis is None else {len(expected)}))
            for i, size in enumerate(type_.shape):
                expect.size(f"axis {i} of {name}", size, expected[i])


def spread(
    parameter: Array | None, shape: tuple[int, ...], axis: int | None, block: int
) -> Array | None:
    """The scale or zero point in a shape that broadcasts over a tensor of this shape."""
    if parameter is None or axis is None:
        return None if parameter is None else parameter.reshape(())
    at = normalize_axis(axis, len(shape))
    if block:
        return np.repeat(parameter, block, axis=at)[(slice(None),) * at + (slice(shape[at]),)]
    return parameter.reshape([-1 if i == at else 1 for i in range(len(shape))])


def quotient(x: Array, scale: Array, precision: DType | None) -> Array:
    """x / scale, rounded to `precision` (default: the scale's type), as f64."""
    if precision is None:
        element = dtype(scale.dtype)
        precision = f64 if element.is_integer else f32 if element.bits < 16 else element
    return wide(narrow(x, precision) / narrow(scale, precision))


def integer_qvalues(
    x: Array, scale: Array, zero_point: Array | None, low: float, high: float, precision: Any = None
) -> Array:
    """Quantized values low..high, as f64."""
    offset = 0.0 if zero_point is None else zero_point.astype(np.float64)
    qvalues = np.clip(np.rint(quotient(x, scale, precision)) + offset, low, high)
    return np.asarray(np.where(np.isnan(qvalues), low, qvalues))


def real_values(qvalues: Array, scale: Array, zero_point: Array | None, element: DType) -> Array:
    """(qvalues - zero_point) * scale; the product is in f64 if either type is, else in f32."""
    precision = f64 if f64 in (element, dtype(scale.dtype)) else f32
    offset = 0.0 if zero_point is None else zero_point.astype(np.float64)
    distance = narrow(qvalues.astype(np.float64) - offset, precision)
    return narrow(distance * narrow(scale, precision), element)


def _require_scale(scale: TensorType) -> None:
    expect.dtype("scale", scale, lambda d: d.is_float or d == i32, "a floating type or i32")


def _infer_quantize(
    x: TensorType,
    scale: TensorType,
    zero_point: TensorType | None,
    axis: int | None,
    block: int,
    to: DType,
    precision: DType | None,
    **_: Any,
) -> TensorType:
    expect.dtype("x", x, lambda d: d.is_float or d == i32, "a floating type or i32")
    _require_scale(scale)
    if not is_quantized_dtype(to):
        raise InferenceError(
            "no value is quantized to this type",
            expected="an integer of at most 16 bits, float8 or float4",
            found=to,
        )
    if zero_point is not None:
        expect.element("zero_point", zero_point, to)
    if precision is not None and not (precision.is_float and precision.bits >= 16):
        raise InferenceError("'precision' is not a type to divide in", found=precision)
    check_granularity(x, scale, zero_point, axis, block)
    return x.with_dtype(to)


def _quantize(
    x: Array,
    scale: Array,
    zero_point: Array | None,
    axis: int | None,
    block: int,
    to: DType,
    saturate: bool,
    precision: DType | None,
) -> Array:
    factor = spread(scale, x.shape, axis, block)
    offset = spread(zero_point, x.shape, axis, block)
    assert factor is not None
    if to.is_integer:
        return narrow(integer_qvalues(x, factor, offset, to.min, to.max, precision), to)
    exact = quotient(x, factor, precision)
    return cast(exact if offset is None else exact + offset.astype(np.float64), to, saturate)


def _infer_dequantize(
    x: TensorType,
    scale: TensorType,
    zero_point: TensorType | None,
    axis: int | None,
    block: int,
    to: DType | None,
) -> TensorType:
    accepts = lambda d: is_quantized_dtype(d) or d == i32
    expect.dtype("x", x, accepts, "a quantized type of at most 16 bits, or i32")
    expect.floating("scale", scale)
    if zero_point is not None:
        expect.element("zero_point", zero_point, x.dtype)
    if to is not None and not to.is_float:
        raise InferenceError("'to' is not a floating type", found=to)
    check_granularity(x, scale, zero_point, axis, block)
    return x.with_dtype(to or _natural_result(scale.dtype))


def _natural_result(scale: DType) -> DType:
    return scale if scale.bits >= 16 else f32


def _dequantize(
    x: Array, scale: Array, zero_point: Array | None, axis: int | None, block: int, to: DType | None
) -> Array:
    factor = spread(scale, x.shape, axis, block)
    assert factor is not None
    element = to or _natural_result(dtype(scale.dtype))
    return real_values(x, factor, spread(zero_point, x.shape, axis, block), element)


def _grad_dequantize(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    """The gradient of the scale; float8 and float4 values count as numbers, not as variables."""
    qvalues, scale, zero_point = (*node.inputs, None)[:3]
    (dy,) = dys
    assert qvalues is not None and scale is not None and dy is not None
    granularity = node.attrs.get("axis"), node.attrs.get("block", 0)
    wide = f64 if dy.dtype == f64 else f32
    distance = b.cast(qvalues, to=wide)
    if zero_point is not None:
        offset = spread_value(b, zero_point, qvalues, *granularity)
        distance = b.sub(distance, b.cast(offset, to=wide))
    product = b.mul(dy if dy.dtype == wide else b.cast(dy, to=wide), distance)
    ds = sum_to_parameter(b, product, scale, *granularity)
    return [None, ds if scale.dtype == wide else b.cast(ds, to=scale.dtype)]


def _infer_dynamic_quantize(
    x: TensorType, to: DType, per_token: bool, stored: DType | None = None
) -> tuple[TensorType, ...]:
    if stored is not None:
        if (to, stored) != (u8, i8):
            raise InferenceError("only u8 is stored in another type", expected="i8", found=stored)
        return infer_dynamic(x, stored, per_token)
    if to in DYNAMIC_FLOATS:
        expect.floating("x", x)
        return _dynamic_results(x, to, per_token)
    return infer_dynamic(x, to, per_token)


def infer_dynamic(x: TensorType, to: DType, per_token: bool) -> tuple[TensorType, ...]:
    expect.floating("x", x)
    if not (to.is_integer and to.bits <= 16):
        raise InferenceError("'to' is not an integer of at most 16 bits", found=to)
    return _dynamic_results(x, to, per_token)


def _dynamic_results(x: TensorType, to: DType, per_token: bool) -> tuple[TensorType, ...]:
    if per_token and not x.rank:
        raise InferenceError("a scalar has no tokens", expected="rank 1 or more", found=x)
    parameters = (*x.shape[:-1], 1) if per_token else ()
    return x.with_dtype(to), TensorType(f32, parameters), TensorType(to, parameters)


def _dynamic_quantize(
    x: Array, to: DType, per_token: bool, stored: DType | None = None
) -> tuple[Array, ...]:
    """x quantized with a scale that maps its range, extended to include 0, to all of `to`."""
    if stored is not None:
        found = _dynamic_quantize(x, to, per_token)
        q, zero = (
            narrow(v.astype(np.int64) + int(stored.min - to.min), stored) for v in found[::2]
        )
        return q, found[1], zero
    if to in DYNAMIC_FLOATS:
        scale = dynamic_float_scale(x, to, per_token)
        exact = wide(x.astype(np.float32) / scale)
        return cast(exact, to, True), scale, np.zeros(scale.shape, to.numpy)
    scale, zero_point = dynamic_parameters(x, to, per_token)
    qvalues = integer_qvalues(x.astype(np.float32), scale, zero_point, to.min, to.max)
    return narrow(qvalues, to), scale, narrow(zero_point, to)


def dynamic_float_scale(x: Array, to: DType, per_token: bool) -> Array:
    """The scale (as f32) that maps the largest |x| to the largest value of `to`."""
    peak = np.abs(x.astype(np.float32)).max(
        axis=-1 if per_token else None, keepdims=per_token, initial=0
    )
    return np.asarray(np.where(peak == 0, np.float32(1), peak / np.float32(to.max)))


def dynamic_parameters(x: Array, to: DType, per_token: bool) -> tuple[Array, Array]:
    """Scale and zero point (as f32) that map the range of x, extended to include 0, to `to`."""
    x = x.astype(np.float32)
    axis = -1 if per_token else None
    top = x.max(axis=axis, keepdims=per_token, initial=0)
    bottom = x.min(axis=axis, keepdims=per_token, initial=0)
    levels = np.float32(to.max - to.min)
    scale = np.where(top == bottom, np.float32(1), (top - bottom) / levels)
    zero_point = np.rint(np.clip(np.float32(to.min) - bottom / scale, to.min, to.max))
    return scale, zero_point


def _quantize_samples() -> list[Sample]:
    x, scale = draw(3, 4, 5, low=-300, high=300), draw(low=1, high=2)
    per_axis = draw(4, seed=1, low=0.5, high=3)
    blocked = draw(3, 4, 2, seed=1, low=0.5, high=3)
    zero = np.array([0, 3, 128, 255], np.uint8)
    found = [
        sample(x, scale, to="i8"),
        sample(x, scale.reshape(1), np.array([7], np.int16), to="i16"),
        sample(x, per_axis, zero, to="u8", axis=1),
        sample(x, per_axis, to="i4", axis=-2),
        sample(x, blocked, np.ones((3, 4, 2), np.int8), to="i8", axis=2, block=3),
        sample(x.astype(np.float16), scale.astype(np.float16), to="u16"),
        sample(x, scale.astype(np.float16), to="i8", precision="f32"),
        sample(draw(0, 3), scale, to="u8"),
    ]
    qvalues = ["u4", "u2", "i2", *(element.name for element in FLOAT_DTYPES)]
    return found + [sample(x, per_axis, to=to, axis=1, saturate=to != "f8e5m2") for to in qvalues]


def _dequantize_samples() -> list[Sample]:
    qvalues, scale = draw(3, 4, 5, dtype="u8", low=0, high=255), draw(low=0.5, high=2)
    per_axis = draw(4, seed=1, low=0.5, high=3)
    blocked = draw(3, 4, 2, seed=1, low=0.5, high=3)
    zero = np.array([0, 3, 128, 255], np.uint8)
    wide_qvalues = draw(3, 4, 5, dtype="i32", low=-1e9, high=1e9)
    found = [
        sample(qvalues, scale, np.array(128, np.uint8)),
        sample(qvalues, per_axis, zero, axis=1),
        sample(qvalues, blocked, axis=-1, block=3, to="bf16"),
        sample(qvalues, per_axis.astype(np.float16), zero, axis=1),
        sample(wide_qvalues, scale, to="f64"),
        sample(qvalues[:0], scale),
    ]
    narrow_qvalues = ["i16", "i4", "u4", "i2", "u2", *(element.name for element in FLOAT_DTYPES)]
    return found + [sample(draw(6, dtype=d, low=0, high=1), scale) for d in narrow_qvalues]


def _dynamic_samples() -> list[Sample]:
    return [
        sample(draw(3, 4)),
        sample(draw(3, 4, low=0.5)),
        sample(draw(2, 3, 4), to="i8", per_token=True),
        sample(np.zeros((2, 3), np.float32), to="i4"),
        sample(draw(0, 3)),
        sample(draw(3, 7, low=-9, high=5), to="f8e4m3fn", per_token=True),
        sample(draw(2, 3, 4), to="f8e5m2"),
        sample(np.zeros((2, 3), np.float32), to="f8e4m3fn", per_token=True),
        sample(draw(2, 5).astype(np.float16), to="f8e4m3fn", per_token=True),
        sample(draw(0, 3), to="f8e4m3fn", per_token=True),
        sample(draw(3, 7), to="u8", per_token=True, stored="i8"),
    ]


OPDEFS = [
    OpDef(
        "quantize",
        Kind.ELEMENTWISE,
        "x, scale, zero_point?",
        infer=_infer_quantize,
        reference=_quantize,
        grad=ROUNDS,
        keeps=("scale",),
        samples=_quantize_samples,
        attrs={
            **GRANULARITY,
            "to": Attr("dtype"),
            "saturate": Attr("bool", True),
            "precision": Attr("dtype", None),
        },
        doc="saturate(rne(x / scale) + zero_point); saturate=False affects float8 only.",
    ),
    OpDef(
        "dequantize",
        Kind.ELEMENTWISE,
        "x, scale, zero_point?",
        infer=_infer_dequantize,
        reference=_dequantize,
        grad=_grad_dequantize,
        is_foldable=False,
        keeps=("scale",),
        samples=_dequantize_samples,
        attrs={**GRANULARITY, "to": Attr("dtype", None)},
        doc="(x - zero_point) * scale, in the scale's type unless `to` names another.",
    ),
    OpDef(
        "dynamic_quantize",
        Kind.ELEMENTWISE,
        "x",
        infer=_infer_dynamic_quantize,
        reference=_dynamic_quantize,
        fixed_types=True,
        takes_prologue=True,
        grad=ROUNDS,
        samples=_dynamic_samples,
        attrs={
            "to": Attr("dtype", "u8"),
            "per_token": Attr("bool", False),
            "stored": Attr("dtype", None),
        },
        doc="x quantized with a scale and zero point from its range: one for the tensor, or one "
        "for each row of the last axis (shape [..., 1], as one block of that axis). For "
        "float8 types the scale maps the largest |x| to the largest value; the zero point is 0. "
        "stored=i8 moves values and zero points of u8 by -128.",
    ),
]
