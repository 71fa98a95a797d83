"""Checks of operand types; each raises an `InferenceError` that names the operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, i32, i64
from bitwright.ir.types import TensorType

MAX_LENGTH = 128
"""The longest vector of per-axis numbers: numpy has 64 axes, and pads have two ends each."""


def is_float(element: DType) -> bool:
    return element.is_float


def is_integer(element: DType) -> bool:
    return element.is_integer


def is_real(element: DType) -> bool:
    return element.is_float or element.is_integer


def is_number(element: DType) -> bool:
    return element.is_float or element.is_integer or element.is_complex


def dtype(what: str, type_: TensorType, accepts: Callable[[DType], bool], expected: str) -> None:
    if not accepts(type_.dtype):
        raise InferenceError(f"{what} has the wrong element type", expected=expected, found=type_)


def element(what: str, type_: TensorType, only: DType) -> None:
    dtype(what, type_, lambda found: found == only, str(only))


def floating(what: str, type_: TensorType) -> None:
    dtype(what, type_, is_float, "a floating type")


def integer(what: str, type_: TensorType) -> None:
    dtype(what, type_, is_integer, "an integer type")


def real(what: str, type_: TensorType) -> None:
    dtype(what, type_, is_real, "a real number type")


def number(what: str, type_: TensorType) -> None:
    dtype(what, type_, is_number, "a number type")


def index(what: str, type_: TensorType) -> None:
    dtype(what, type_, lambda found: found in (i32, i64), "i64 or i32")


def rank(what: str, type_: TensorType, *ranks: int) -> None:
    if type_.rank not in ranks:
        expected = " or ".join(map(str, ranks))
        raise InferenceError(f"{what} has the wrong rank", expected=f"rank {expected}", found=type_)


def same_dtype(*types: TensorType | None) -> DType:
    """The common element type of the present operands; an error if they differ."""
    present = [t for t in types if t is not None]
    for other in present[1:]:
        if other.dtype != present[0].dtype:
            raise InferenceError(
                "operands have different element types", expected=present[0], found=other
            )
    return present[0].dtype


def size(what: str, found: Size, expected: Size) -> None:
    """Raise if two constant sizes differ; symbolic sizes may be equal at run time."""
    if isinstance(found, int) and isinstance(expected, int) and found != expected:
        raise InferenceError(f"{what} has the wrong size", expected=expected, found=found)


def shape(what: str, type_: TensorType, expected: tuple[Size, ...]) -> None:
    """The rank, and every constant size."""
    rank(what, type_, len(expected))
    for axis, (found, wanted) in enumerate(zip(type_.shape, expected, strict=True)):
        size(f"axis {axis} of {what}", found, wanted)


def one_form(name: str, attr: Any, operand: TensorType | None) -> None:
    """Raise unless exactly one of an attribute and its operand form is given."""
    if (attr is None) == (operand is None):
        raise InferenceError(
            f"{name} is given {'twice' if operand else 'nowhere'}",
            expected=f"the attribute {name!r}, or the operand where only the data decides",
        )


def static_length(what: str, type_: TensorType) -> int:
    """The constant length of a vector of indices; an error if the data decides it."""
    index(what, type_)
    rank(what, type_, 1)
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
