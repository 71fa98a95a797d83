"""Running sums and products along an axis.

inclusive  y[i] = x[0] + ... + x[i]
exclusive  y[i] = x[0] + ... + x[i - 1], starting with the identity
reverse    the same from the end
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, f64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import conjugate, where_or_zero
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients


def _infer(x: TensorType, axis: int, exclusive: bool, reverse: bool) -> TensorType:
    expect.number("x", x)
    normalize_axis(axis, x.rank)
    return x


def _accumulate(ufunc: np.ufunc, x: Array, axis: int, exclusive: bool, reverse: bool) -> Array:
    values = np.moveaxis(wide(x), axis, -1)
    if reverse:
        values = values[..., ::-1]
    if exclusive:
        first = np.full((*values.shape[:-1], min(values.shape[-1], 1)), ufunc.identity)
        values = np.concatenate([first.astype(values.dtype), values[..., :-1]], axis=-1)
    result = ufunc.accumulate(values, axis=-1)
    if reverse:
        result = result[..., ::-1]
    return np.moveaxis(result, -1, axis)


def _samples() -> list[Sample]:
    x = draw(3, 4, 5)
    return [
        sample(x, axis=1),
        sample(x, axis=-1, exclusive=True),
        sample(x, axis=0, reverse=True),
        sample(x, axis=2, exclusive=True, reverse=True),
        sample(draw(2, 0), axis=1, exclusive=True),
        sample(draw(4, dtype="i32", low=-9, high=9), axis=0),
        sample(draw(4, dtype="bf16"), axis=0, tolerance=2e-2),
        sample(np.array([[2, 0, 3, 0.5], [0, 1, 0, 2]], np.float32), axis=1),
    ]


def _op(name: str, ufunc: np.ufunc, grad: Any, doc: str) -> OpDef:
    def compute(x: Array, **attrs: Any) -> Array:
        return _accumulate(ufunc, x, **attrs)

    return OpDef(
        name,
        Kind.REDUCTION,
        "x",
        infer=_infer,
        reference=compute,
        grad=grad,
        samples=_samples,
        attrs={
            "axis": Attr("int"),
            "exclusive": Attr("bool", False),
            "reverse": Attr("bool", False),
        },
        doc=doc,
    )


def _later(b: Builder, dy: Value, axis: int, exclusive: bool, reverse: bool) -> Any:
    """The sum of dy over the results that an element takes part in: those from it to the end."""
    return b.cumsum(dy, axis=axis, exclusive=exclusive, reverse=not reverse)


def _grad_cumsum(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [_later(b, dys[0], **node.attrs)]


def _grad_cumprod(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """dx[k] = sum over later i of dy[i] * y[i] / x[k], before the first zero.

    The first zero itself gets the sum of dy[i] times the product without it, and what follows it
    gets 0. Second derivatives are right where x has no zero.
    """
    x, y, attrs = node.inputs[0], node.outputs[0], dict(node.attrs)
    assert x is not None
    is_zero = b.eq(x, 0.0)
    ones = b.cast(is_zero, to=f32 if x.dtype.bits <= 32 else f64)
    zeros = b.cumsum(ones, axis=attrs["axis"], reverse=attrs["reverse"])
    is_first = b.and_(is_zero, b.eq(zeros, 1.0))
    without = b.cumprod(b.where(is_first, 1.0, x), **attrs)
    before = b.div(
        _later(b, b.mul(dys[0], conjugate(b, y)), **attrs), conjugate(b, b.where(is_zero, 1.0, x))
    )
    at_first = _later(b, b.mul(dys[0], conjugate(b, without)), **attrs)
    return [b.where(is_first, at_first, where_or_zero(b, b.eq(zeros, 0.0), before))]


OPDEFS = [
    _op("cumsum", np.add, _grad_cumsum, "The running sum along an axis."),
    _op("cumprod", np.multiply, _grad_cumprod, "The running product along an axis."),
]
