"""Type inference shared by op families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.errors import GraphError
from bitwright.ir.dim import Size
from bitwright.ir.dtype import bool_
from bitwright.ir.types import TensorType, broadcast_shapes, normalize_axis
from bitwright.ops.core import expect


def same(x: TensorType, *_: Any, **__: Any) -> TensorType:
    """The type of the first operand."""
    return x


def same_float(x: TensorType, *_: Any, **__: Any) -> TensorType:
    expect.dtype("the operand", x, lambda d: d.is_float or d.is_complex, "a floating type")
    return x


def broadcast(*types: TensorType, **_: Any) -> TensorType:
    """The broadcast type of operands of one element type."""
    element = expect.same_dtype(*types)
    return TensorType(element, broadcast_shapes(*(t.shape for t in types)))


def broadcast_to_bool(*types: TensorType, **_: Any) -> TensorType:
    return broadcast(*types).with_dtype(bool_)


def reduced_shape(shape: Sequence[Size], axes: Sequence[int], keepdims: bool) -> tuple[Size, ...]:
    """The shape after a reduction over `axes`."""
    gone = {normalize_axis(axis, len(shape)) for axis in axes}
    if len(gone) != len(axes):
        raise GraphError(f"an axis occurs twice in {list(axes)}")
    kept = [(1 if i in gone else size) for i, size in enumerate(shape)]
    return tuple(kept if keepdims else [s for i, s in enumerate(kept) if i not in gone])
