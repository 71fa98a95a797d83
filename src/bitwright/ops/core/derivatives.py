"""Pieces of gradient rules for functions: the chain rule, complex conjugates, sizes as numbers.

The gradient of a complex number is that of PyTorch: dL/d(re) + i dL/d(im). For y = f(x) with a
complex derivative this gives dx = dy * conj(f'(x)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from bitwright.errors import GraphError
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import f32, f64
from bitwright.ir.graph import Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import elementwise, full_like
from bitwright.ops.core.reverse import Rule


def conjugate(b: Builder, x: Value) -> Value:
    """The complex conjugate; x itself if it is real."""
    return cast(Value, b.conj(x)) if x.dtype.is_complex else x


def chain(derivative: Callable[..., Any]) -> Rule:
    """The rule of y = f(x) from `derivative(b, x, y, **attrs)`, which returns f'(x)."""

    def partial(b: Builder, dy: Value, x: Value, y: Value, **attrs: Any) -> Value:
        return cast(Value, b.mul(dy, conjugate(b, derivative(b, x, y, **attrs))))

    return elementwise(partial)


def where_or_zero(b: Builder, condition: Value, dy: Value) -> Value:
    """dy where the condition holds, else 0."""
    return cast(Value, b.where(condition, dy, 0.0))


def zeros_like(b: Builder, like: Value) -> Value:
    return full_like(b, 0.0, like)


def reciprocal_of_size(b: Builder, x: Value, axes: Sequence[int]) -> Value:
    """1 / (the number of elements along these axes), a scalar in the type of x."""
    size = product([x.shape[axis] for axis in axes])
    if isinstance(size, int):
        with np.errstate(divide="ignore"):
            return b.constant(np.divide(1.0, size), x.dtype)
    # from the value, because data may decide its size
    sizes = b.gather(b.shape_of(x), np.array(axes))
    count = b.reduce_prod(sizes, axes=(0,), keepdims=False)
    element = f64 if x.dtype.bits >= 64 else f32  # f16 has no sizes above 65504
    inverse = b.reciprocal(b.cast(count, to=element))
    return cast(Value, b.cast(inverse, to=x.dtype) if element != x.dtype else inverse)


def eye(b: Builder, size: Size, like: Value) -> Value:
    """The unit matrix [size, size] in the type of `like`."""
    row = b.iota(length=size)
    column = b.reshape(row, shape=(size, 1))
    return cast(Value, b.cast(b.eq(row, column), to=like.dtype))


def refuse(node: Node, wanted: Sequence[bool], position: int, reason: str) -> None:
    """Raise a `GraphError` if the gradient of an operand is asked for that has none."""
    if position < len(wanted) and wanted[position]:
        raise GraphError(
            f"the gradient of {node.op} by {node.inputs[position]} is asked for, and it has none: "
            f"{reason}",
            where=f"{node}" + (f" (from {node.loc})" if node.loc else ""),
        )
