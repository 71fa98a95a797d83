"""Elementwise ops that choose or bound (where, clip, prelu), and atan2."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import max_size, min_size
from bitwright.ir.dtype import bool_
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, broadcast_shapes
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import where_or_zero
from bitwright.ops.core.gradients import elementwise, sum_to
from bitwright.ops.core.inference import broadcast
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.core.symbolic import on_elements
from bitwright.ops.math.unary import real_float, real_number


def _infer_where(condition: TensorType, x: TensorType, y: TensorType) -> TensorType:
    expect.element("the condition", condition, bool_)
    element = expect.same_dtype(x, y)
    return TensorType(element, broadcast_shapes(condition.shape, x.shape, y.shape))


def _infer_clip(x: TensorType, low: TensorType | None, high: TensorType | None) -> TensorType:
    real_number(x)
    return broadcast(*(operand for operand in (x, low, high) if operand is not None))


def _infer_prelu(x: TensorType, slope: TensorType) -> TensorType:
    real_number(x)
    both = broadcast(x, slope)
    if both.rank != x.rank or (x.is_static and both.is_static and both.shape != x.shape):
        raise InferenceError("slope does not broadcast to x", expected=x, found=slope)
    return x


def _infer_atan2(y: TensorType, x: TensorType) -> TensorType:
    return broadcast(real_float(y), real_float(x))


def clip(x: Array, low: Array | None, high: Array | None) -> Array:
    """min(max(x, low), high)"""
    bounded = wide(x) if low is None else np.maximum(wide(x), wide(low))
    return bounded if high is None else np.minimum(bounded, wide(high))


def prelu(x: Array, slope: Array) -> Array:
    x, slope = wide(x), wide(slope)
    return np.where(x < 0, slope * x, x)


def _clip_scalar(e: Any, x: Any, low: Any = None, high: Any = None) -> Any:
    bounded = x if low is None else e.max(x, low)
    return bounded if high is None else e.min(bounded, high)


def _clip_sizes(x: Any, low: Any = None, high: Any = None) -> Any:
    bounded = x if low is None else np.frompyfunc(max_size, 2, 1)(x, low)
    return bounded if high is None else np.frompyfunc(min_size, 2, 1)(bounded, high)


def _is_minus(e: Any, x: Any) -> Any:
    """Whether the sign bit is set, that of -0.0 included."""
    return e.bit_or(e.lt(x, 0.0), e.lt(e.div(1.0, x), 0.0))


def _atan2_scalar(e: Any, y: Any, x: Any) -> Any:
    """The angle in the first octant, mapped to its octant by the longer side and the signs."""
    width, height = e.abs(x), e.abs(y)
    longer, shorter = e.max(width, height), e.min(width, height)
    diagonal = e.select(e.eq(longer, 0.0), 0.0, 1.0)  # the quotients 0/0 and inf/inf
    slope = e.select(e.eq(longer, shorter), diagonal, e.div(shorter, longer))
    octant = e.atan(slope)
    quadrant = e.select(e.gt(height, width), e.sub(math.pi / 2, octant), octant)
    half = e.select(_is_minus(e, x), e.sub(math.pi, quadrant), quadrant)
    return e.select(_is_minus(e, y), e.neg(half), half)


def _where_samples() -> list[Sample]:
    def condition(*shape: int) -> Array:
        return draw(*shape, dtype="bool", seed=2)

    return [
        sample(condition(3, 5), draw(3, 5), draw(3, 5, seed=1)),
        sample(condition(4, 1, 1), draw(3, 1), draw(5, seed=1)),
        sample(condition(), draw(2, 3), draw(seed=1)),
        sample(condition(2, 1), draw(0), draw(1, seed=1)),
        sample(condition(9), draw(9, dtype="bf16"), draw(9, dtype="bf16", seed=1)),
        sample(condition(9), draw(9, dtype="i64"), draw(9, dtype="i64", seed=1)),
        sample(condition(9), draw(9, dtype="bool"), draw(9, dtype="bool", seed=1)),
    ]


def _clip_samples() -> list[Sample]:
    def bound(value: float, element: str = "f32") -> Array:
        return draw(dtype=element, low=value, high=value)

    return [
        sample(draw(3, 5), bound(-1), bound(1)),
        sample(draw(3, 5), bound(-1)),
        sample(draw(3, 5), None, bound(1)),
        sample(draw(3, 5)),
        sample(draw(3, 5), bound(1), bound(-1)),
        sample(draw(0, 3), bound(-1), bound(1)),
        sample(draw(), bound(-1), bound(1)),
        sample(draw(2, 5), draw(5, low=-1, high=0), draw(2, 1, low=0, high=1)),
        sample(draw(9, dtype="f16"), bound(-1, "f16"), bound(1, "f16")),
        sample(draw(9, dtype="i8", low=-9, high=9), bound(-3, "i8"), bound(4, "i8")),
        sample(draw(9, dtype="u64", low=0, high=9), bound(3, "u64"), bound(4, "u64")),
    ]


def _prelu_samples() -> list[Sample]:
    return [
        sample(draw(2, 3, 4), draw(3, 1, seed=1)),
        sample(draw(2, 3), draw(2, 3, seed=1)),
        sample(draw(2, 3), draw(seed=1)),
        sample(draw(0, 3), draw(3, seed=1)),
        sample(draw(9, dtype="bf16"), draw(9, dtype="bf16", seed=1), tolerance=2e-2),
        sample(draw(9, dtype="i32", low=-9, high=9), draw(1, dtype="i32", low=3, high=3)),
    ]


def _atan2_samples() -> list[Sample]:
    zeros = np.array([0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 0.0, -0.0], np.float32)
    return [
        sample(draw(3, 5), draw(3, 5, seed=1)),
        sample(draw(4, 1, 5), draw(3, 1, seed=1)),
        sample(draw(), draw(0, 3)),
        sample(zeros, np.array([1, 1, -1, -1, 0, 0, 0, -0.0], np.float32)),
        sample(draw(9, dtype="f64"), draw(9, dtype="f64", seed=1)),
        sample(draw(9, dtype="f16"), draw(9, dtype="f16", seed=1), tolerance=2e-3),
    ]


# gradients


def _clip_by_x(b: Builder, dy: Value, x: Value, *bounds: Value | None, y: Value) -> Any:
    """dy inside the bounds, on them included as in PyTorch's clamp: where the result is x."""
    return where_or_zero(b, b.eq(x, y), dy)


def _clip_by_low(
    b: Builder, dy: Value, x: Value, low: Value, high: Value | None = None, *, y: Value
) -> Any:
    is_low = b.lt(x, low)
    return where_or_zero(b, is_low if high is None else b.and_(is_low, b.lt(low, high)), dy)


def _clip_by_high(b: Builder, dy: Value, x: Value, low: Value | None, high: Value, y: Value) -> Any:
    is_high = b.gt(x, high)
    return where_or_zero(b, is_high if low is None else b.or_(is_high, b.gt(low, high)), dy)


def _grad_atan2(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """x / (x² + y²) for y and -y / (x² + y²) for x; 0 at the origin."""
    y, x = node.operands
    square = b.add(b.mul(x, x), b.mul(y, y))
    is_origin = b.eq(square, 0.0)
    ratio = b.div(b.where(is_origin, 0.0, dys[0]), b.where(is_origin, 1.0, square))
    return [sum_to(b, b.mul(ratio, x), y), sum_to(b, b.neg(b.mul(ratio, y)), x)]


OPDEFS = [
    OpDef(
        "where",
        Kind.ELEMENTWISE,
        "condition, x, y",
        infer=_infer_where,
        reference=np.where,
        samples=_where_samples,
        scalar=lambda e, condition, x, y: e.select(condition, x, y),
        sizes=on_elements(lambda condition, x, y: np.where(condition.astype(bool), x, y)),
        grad=elementwise(
            None,
            lambda b, dy, condition, x, z, y: b.where(condition, dy, 0.0),
            lambda b, dy, condition, x, z, y: b.where(condition, 0.0, dy),
        ),
        onnx="Where",
        doc="x where the condition holds, else y",
    ),
    OpDef(
        "clip",
        Kind.ELEMENTWISE,
        "x, low?, high?",
        infer=_infer_clip,
        reference=clip,
        samples=_clip_samples,
        is_cheap=True,
        scalar=_clip_scalar,
        sizes=on_elements(_clip_sizes),
        grad=elementwise(_clip_by_x, _clip_by_low, _clip_by_high),
        onnx="Clip",
        doc="min(max(x, low), high), which is high where low > high; NaN propagates",
    ),
    OpDef(
        "prelu",
        Kind.ELEMENTWISE,
        "x, slope",
        infer=_infer_prelu,
        reference=prelu,
        samples=_prelu_samples,
        scalar=lambda e, x, slope: e.select(e.lt(x, 0), e.mul(slope, x), x),
        grad=elementwise(
            lambda b, dy, x, slope, y: b.where(b.gt(x, 0.0), dy, b.mul(slope, dy)),
            lambda b, dy, x, slope, y: b.where(b.gt(x, 0.0), 0.0, b.mul(x, dy)),
        ),
        onnx="PRelu",
        doc="slope * x where x < 0, else x; slope broadcasts to x",
    ),
    OpDef(
        "atan2",
        Kind.ELEMENTWISE,
        "y, x",
        infer=_infer_atan2,
        reference=lambda y, x: np.arctan2(wide(y), wide(x)),
        samples=_atan2_samples,
        scalar=_atan2_scalar,
        grad=_grad_atan2,
        doc="the angle of the point (x, y), from -pi to pi",
    ),
]
