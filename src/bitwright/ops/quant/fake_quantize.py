"""Fake quantization: quantize and dequantize in one op, with gradients to train through.

    fake_quantize           low..high quantized values, with a scale and an optional zero point
    fake_binarize           {-scale, +scale} by sign, 0 counts as positive
    fake_dynamic_quantize   scale and zero point from the range of x, as `dynamic_quantize`

The forward pass gives the bits of the deployed quantize -> dequantize
(`passes.expand_fake_quantize` replaces one by the other). Rounding has the derivative 0, so the
gradient of x is straight-through, dy times a factor (`ste`):

    identity    1
    clipped     1 where low <= x / s + zero_point <= high, else 0
    tanh        1 - tanh²(x / (s Qmax))
    hard_tanh   max(0, 1 - |x| / (s Qmax))

Qmax is the largest |q - zero_point|, for signed types `high`. The gradient of the scale is that of
LSQ (Esser et al., 2020), Σ dy · (q - zero_point - x / s where not clipped), times 1 / √(N Qmax) for
the N elements of a scale.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import product
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import number
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.quant.parameters import spread_value, sum_to_parameter
from bitwright.ops.quant.quantize import (
    GRANULARITY,
    check_granularity,
    dynamic_parameters,
    infer_dynamic,
    integer_qvalues,
    real_values,
    spread,
)

STRAIGHT_THROUGH = ("identity", "clipped", "tanh", "hard_tanh")
_STE = Attr("str", "clipped", STRAIGHT_THROUGH)


# fake_quantize


def _infer_fake(
    x: TensorType,
    scale: TensorType,
    zero_point: TensorType | None,
    axis: int | None,
    block: int,
    low: int,
    high: int,
    **_: Any,
) -> TensorType:
    expect.floating("x", x)
    expect.floating("scale", scale)
    if zero_point is not None:
        accepts = lambda d: d.is_integer or d.is_float
        expect.dtype("zero_point", zero_point, accepts, "a real number type")
    if low >= high:
        raise InferenceError("the range is empty", expected="low < high", found=f"{low}..{high}")
    check_granularity(x, scale, zero_point, axis, block)
    return x


def _fake_quantize(
    x: Array,
    scale: Array,
    zero_point: Array | None,
    axis: int | None,
    block: int,
    low: int,
    high: int,
    ste: str,
) -> Array:
    factor = spread(scale, x.shape, axis, block)
    offset = spread(zero_point, x.shape, axis, block)
    assert factor is not None
    qvalues = integer_qvalues(x, factor, offset, low, high)
    return real_values(qvalues, factor, offset, dtype(x.dtype))


def _grad_fake(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    x, scale, zero_point = (*node.inputs, None)[:3]
    (dy,) = dys
    assert x is not None and scale is not None and dy is not None
    low, high, ste = (node.attrs[name] for name in ("low", "high", "ste"))
    granularity = node.attrs.get("axis"), node.attrs.get("block", 0)
    factor = spread_value(b, scale, x, *granularity)
    ratio = b.div(_as(b, x, scale), factor)
    bottom, top = number(b, low, scale), number(b, high, scale)
    limit = top
    if zero_point is not None:
        offset = _as(b, spread_value(b, zero_point, x, *granularity), scale)
        bottom, top = b.sub(bottom, offset), b.sub(top, offset)
        limit = b.maximum(top, b.neg(bottom))
    inside = b.and_(b.ge(ratio, bottom), b.le(ratio, top))
    dx = _straight_through(b, ste, dy, ratio, limit, inside)
    if scale.node.op == "constant":
        return [dx]
    zero = number(b, 0.0, scale)
    steps = b.minimum(b.maximum(b.round(ratio), bottom), top)
    error = b.sub(steps, b.where(inside, ratio, zero))
    ds = sum_to_parameter(b, b.mul(_as(b, dy, scale), error), scale, *granularity)
    return [dx, b.mul(ds, _lsq_factor(b, x, scale, max(high, -low - 1)))]


def _straight_through(
    b: Builder, ste: str, dy: Value, ratio: Value, limit: Value, inside: Value
) -> Value:
    """dy times the factor of a straight-through estimator; ratio = x / s, limit = Qmax."""
    if ste == "identity":
        return dy
    if ste == "clipped":
        return b.where(inside, dy, number(b, 0.0, dy))  # type: ignore[no-any-return]
    share, one = b.div(ratio, limit), number(b, 1.0, ratio)
    if ste == "tanh":
        curve = b.tanh(share)
        share = b.sub(one, b.mul(curve, curve))
    else:
        share = b.relu(b.sub(one, b.abs(share)))
    return b.mul(dy, _as(b, share, dy))  # type: ignore[no-any-return]


def _lsq_factor(b: Builder, x: Value, scale: Value, qmax: int) -> Value:
    """1 / √(N Qmax) for the N elements of x that share a scale."""
    count, scales = product(x.shape), product(scale.shape)
    if isinstance(count, int) and isinstance(scales, int):
        return number(b, 1 / math.sqrt(max(count // max(scales, 1), 1) * qmax), scale)
    each = b.sizes(values=((count + scales - 1) // scales,), shape=())
    return b.rsqrt(b.mul(b.cast(each, to=scale.dtype), number(b, qmax, scale)))  # type: ignore[no-any-return]


def _as(b: Builder, x: Value, like: Value) -> Value:
    return x if x.dtype == like.dtype else b.cast(x, to=like.dtype)


def _fake_samples() -> list[Sample]:
    x = draw(3, 4, 5, low=-9, high=9)
    return [
        sample(x, draw(low=0.05, high=0.1), low=-128, high=127),
        sample(x, draw(4, low=0.05), draw(4, dtype="i32", high=9), axis=1, low=0, high=255),
        sample(x, draw(3, 4, 2, low=0.5), axis=2, block=3, low=-8, high=7, ste="tanh"),
        sample(x.astype(np.float16), draw(low=0.5, dtype="f16"), low=-8, high=7, tolerance=1e-2),
        sample(x, draw(5, low=0.5), axis=-1, low=-1, high=1, ste="hard_tanh"),
    ]


# fake_binarize


def _infer_binarize(
    x: TensorType, scale: TensorType, axis: int | None, block: int, **_: Any
) -> TensorType:
    expect.floating("x", x)
    expect.floating("scale", scale)
    check_granularity(x, scale, None, axis, block)
    return x


def _binarize(x: Array, scale: Array, axis: int | None, block: int, ste: str) -> Array:
    factor = spread(scale, x.shape, axis, block)
    assert factor is not None
    return real_values(np.where(x >= 0, 1, -1), factor, None, dtype(x.dtype))


def _grad_binarize(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    x, scale = node.inputs
    (dy,) = dys
    assert x is not None and scale is not None and dy is not None
    granularity = node.attrs.get("axis"), node.attrs.get("block", 0)
    ratio = b.div(_as(b, x, scale), spread_value(b, scale, x, *granularity))
    one = number(b, 1.0, scale)
    inside = b.le(b.abs(ratio), one)
    dx = _straight_through(b, node.attrs["ste"], dy, ratio, one, inside)
    if scale.node.op == "constant":
        return [dx]
    sign = b.where(b.ge(x, number(b, 0.0, x)), one, b.neg(one))
    ds = sum_to_parameter(b, b.mul(_as(b, dy, scale), sign), scale, *granularity)
    return [dx, b.mul(ds, _lsq_factor(b, x, scale, 1))]


def _binarize_samples() -> list[Sample]:
    x = draw(3, 4, 5)
    return [
        sample(x, draw(low=0.5)),
        sample(x, draw(4, low=0.5), axis=1, ste="identity"),
        sample(x, draw(3, 2, 5, low=0.5), axis=1, block=3, ste="hard_tanh"),
    ]


# fake_dynamic_quantize


def _infer_fake_dynamic(x: TensorType, **attrs: Any) -> TensorType:
    infer_dynamic(x, **attrs)
    return x


def _fake_dynamic(x: Array, to: Any, per_token: bool) -> Array:
    scale, zero_point = dynamic_parameters(x, to, per_token)
    qvalues = integer_qvalues(x.astype(np.float32), scale, zero_point, to.min, to.max)
    return real_values(qvalues, scale, zero_point, dtype(x.dtype))


def _grad_fake_dynamic(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    """The identity: the range of x clips nothing."""
    return dys


def _fake_dynamic_samples() -> list[Sample]:
    return [sample(draw(3, 4)), sample(draw(2, 3, 4), to="i8", per_token=True), sample(draw(0, 3))]


OPDEFS = [
    OpDef(
        "fake_quantize",
        Kind.ELEMENTWISE,
        "x, scale, zero_point?",
        infer=_infer_fake,
        reference=_fake_quantize,
        grad=_grad_fake,
        is_foldable=False,
        keeps=("scale",),
        samples=_fake_samples,
        attrs={**GRANULARITY, "low": Attr("int"), "high": Attr("int"), "ste": _STE},
        doc="dequantize(quantize(x)) in x's type, with quantized values from low to high.",
    ),
    OpDef(
        "fake_binarize",
        Kind.ELEMENTWISE,
        "x, scale",
        infer=_infer_binarize,
        reference=_binarize,
        grad=_grad_binarize,
        is_foldable=False,
        keeps=("scale",),
        samples=_binarize_samples,
        attrs={**GRANULARITY, "ste": _STE},
        doc="scale where x >= 0, else -scale.",
    ),
    OpDef(
        "fake_dynamic_quantize",
        Kind.ELEMENTWISE,
        "x",
        infer=_infer_fake_dynamic,
        reference=_fake_dynamic,
        grad=_grad_fake_dynamic,
        is_foldable=False,
        fixed_types=True,
        samples=_fake_dynamic_samples,
        attrs={"to": Attr("dtype", "u8"), "per_token": Attr("bool", False)},
        doc="dequantize(dynamic_quantize(x)), with the identity as gradient.",
    ),
]
