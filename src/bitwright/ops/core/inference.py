"""Type inference shared by op families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bitwright.errors import GraphError, InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, bool_, i32, i64
from bitwright.ir.types import TensorType, broadcast_shapes, normalize_axis

Predicate = Callable[[DType], bool]


def is_float(element: DType) -> bool:
    return element.is_float


def is_integer(element: DType) -> bool:
    return element.is_integer


def is_number(element: DType) -> bool:
    return element.is_float or element.is_integer or element.is_complex


def is_index(element: DType) -> bool:
    return element in (i32, i64)


def require_dtype(what: str, type_: TensorType, accepts: Predicate, expected: str) -> None:
    if not accepts(type_.dtype):
        raise InferenceError(f"{what} has the wrong element type", expected=expected, found=type_)


def require_rank(what: str, type_: TensorType, *ranks: int) -> None:
    if type_.rank not in ranks:
        expected = " or ".join(map(str, ranks))
        raise InferenceError(f"{what} has the wrong rank", expected=f"rank {expected}", found=type_)


def require_same_dtype(*types: TensorType | None) -> DType:
    """The common element type of the present operands; an error if they differ."""
    present = [t for t in types if t is not None]
    for other in present[1:]:
        if other.dtype != present[0].dtype:
            raise InferenceError(
                "operands have different element types", expected=present[0], found=other
            )
    return present[0].dtype


def require_size(what: str, found: Size, expected: Size) -> None:
    """Raise if two constant sizes differ; symbolic sizes may be equal at run time."""
    if isinstance(found, int) and isinstance(expected, int) and found != expected:
        raise InferenceError(f"{what} has the wrong size", expected=expected, found=found)


def require_one_form(name: str, attr: Any, operand: TensorType | None) -> None:
    """Raise unless exactly one of an attribute and its operand form is given."""
    if (attr is None) == (operand is None):
        raise InferenceError(
            f"{name} is given {'twice' if operand else 'nowhere'}",
            expected=f"the attribute {name!r}, or the operand where only the data decides",
        )


MAX_LENGTH = 128
"""The longest vector of per-axis numbers: numpy has 64 axes, and pads have two ends each."""


def static_length(what: str, type_: TensorType) -> int:
    """The constant length of a vector of indices; an error if the data decides it."""
    require_dtype(what, type_, is_index, "i64 or i32")
    require_rank(what, type_, 1)
    length = type_.shape[0]
    if not isinstance(length, int):
        raise InferenceError(
            f"{what} has a length that is not known", expected="a constant length", found=type_
        )
    if length > MAX_LENGTH:
        raise InferenceError(
            f"{what} is too long", expected=f"at most {MAX_LENGTH} numbers", found=type_
        )
    return length


def same(x: TensorType, *_: Any, **__: Any) -> TensorType:
    """The type of the first operand."""
    return x


def same_float(x: TensorType, *_: Any, **__: Any) -> TensorType:
    require_dtype("the operand", x, lambda d: d.is_float or d.is_complex, "a floating type")
    return x


def broadcast(*types: TensorType, **_: Any) -> TensorType:
    """The broadcast type of operands of one element type."""
    element = require_same_dtype(*types)
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
