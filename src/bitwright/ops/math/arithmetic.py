"""Binary arithmetic with numpy broadcasting; operands share one element type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import RunError
from bitwright.ir.dim import max_size, min_size
from bitwright.ops.core.inference import broadcast, is_number, require_dtype
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, NotYet, OpDef, Sample, draw, sample
from bitwright.ops.core.symbolic import on_elements


def _infer(x: Any, y: Any, **_: Any) -> Any:
    for operand in (x, y):
        require_dtype("an operand", operand, is_number, "a number type")
    return broadcast(x, y)


def divide(x: Array, y: Array) -> Array:
    """Quotient; integers truncate towards zero, and a zero divisor is an error."""
    if np.asarray(x).dtype.kind not in "iu":
        return np.divide(x, y)
    if (y == 0).any():
        raise RunError("an integer is divided by zero")
    quotient = x // y
    return np.where((quotient < 0) & (quotient * y != x), quotient + 1, quotient)


def remainder(x: Array, y: Array, fmod: bool) -> Array:
    """The remainder with the sign of the divisor, or of the dividend for `fmod`."""
    if np.asarray(x).dtype.kind in "iu" and (y == 0).any():
        raise RunError("an integer is taken modulo zero")
    return np.fmod(x, y) if fmod else np.mod(x, y)


def power(x: Array, y: Array) -> Array:
    if np.asarray(x).dtype.kind in "iu" and np.any(y < 0):
        return np.power(x.astype(np.float64), y.astype(np.float64))
    return np.power(x, y)


def _samples(integers: bool = True, low: float = -2) -> Callable[[], list[Sample]]:
    def make() -> list[Sample]:
        found = [
            sample(draw(3, 5, low=low), draw(3, 5, seed=1, low=0.5)),
            sample(draw(4, 1, 5, low=low), draw(3, 1, seed=1, low=0.5)),
            sample(draw(2, 3, low=low), draw(seed=1, low=0.5)),
            sample(draw(0, 3), draw(1, 3)),
            sample(draw(2, 7, dtype="f64", low=low), draw(7, dtype="f64", seed=1, low=0.5)),
            sample(
                draw(2, 7, dtype="bf16", low=low),
                draw(7, dtype="bf16", seed=1, low=0.5),
                tolerance=2e-2,
            ),
        ]
        if integers:
            found += [
                sample(
                    draw(6, dtype="i64", low=-9, high=9),
                    draw(6, dtype="i64", seed=2, low=1, high=9),
                ),
                sample(
                    draw(6, dtype="u8", low=0, high=9), draw(6, dtype="u8", seed=2, low=1, high=9)
                ),
            ]
        return found

    return make


def _op(
    name: str,
    reference: Callable[..., Any],
    scalar: Callable[..., Any],
    sizes: Callable[..., Any] | None = None,
    **rest: Any,
) -> OpDef:
    def compute(x: Array, y: Array, **attrs: Any) -> Any:
        return reference(wide(x), wide(y), **attrs)

    rest.setdefault("samples", _samples())
    return OpDef(
        name,
        Kind.ELEMENTWISE,
        "x, y",
        infer=_infer,
        reference=compute,
        grad=NotYet,
        scalar=scalar,
        sizes=on_elements(sizes) if sizes else None,
        **rest,
    )


def _rem_scalar(e: Any, x: Any, y: Any, fmod: bool) -> Any:
    truncated = e.rem(x, y)
    if fmod:
        return truncated
    wrong_side = e.bit_and(e.ne(truncated, 0), e.ne(e.lt(truncated, 0), e.lt(y, 0)))
    return e.select(wrong_side, e.add(truncated, y), truncated)


OPDEFS = [
    _op(
        "add",
        np.add,
        lambda e, x, y: e.add(x, y),
        np.add,
        onnx="Add",
        commutative=True,
        is_cheap=True,
        keeps_nonnegative=True,
        doc="x + y",
    ),
    _op(
        "sub",
        np.subtract,
        lambda e, x, y: e.sub(x, y),
        np.subtract,
        onnx="Sub",
        is_cheap=True,
        doc="x - y",
    ),
    _op(
        "mul",
        np.multiply,
        lambda e, x, y: e.mul(x, y),
        np.multiply,
        onnx="Mul",
        commutative=True,
        is_cheap=True,
        keeps_nonnegative=True,
        doc="x * y",
    ),
    _op(
        "div",
        divide,
        lambda e, x, y: e.div(x, y),
        np.floor_divide,
        onnx="Div",
        keeps_nonnegative=True,
        doc="x / y; integers truncate towards zero",
    ),
    _op(
        "mod",
        remainder,
        _rem_scalar,
        lambda x, y, fmod: np.mod(x, y),
        attrs={"fmod": Attr("bool", False)},
        doc="Remainder with the sign of y, or of x for fmod.",
    ),
    _op(
        "pow",
        power,
        lambda e, x, y: e.pow(x, y),
        samples=_samples(integers=False, low=0.1),
        doc="x to the power y",
    ),
    _op(
        "maximum",
        np.maximum,
        lambda e, x, y: e.max(x, y),
        np.frompyfunc(max_size, 2, 1),
        commutative=True,
        is_cheap=True,
        keeps_nonnegative=True,
        doc="The larger of x and y; NaN propagates.",
    ),
    _op(
        "minimum",
        np.minimum,
        lambda e, x, y: e.min(x, y),
        np.frompyfunc(min_size, 2, 1),
        commutative=True,
        is_cheap=True,
        doc="The smaller of x and y; NaN propagates.",
    ),
]
