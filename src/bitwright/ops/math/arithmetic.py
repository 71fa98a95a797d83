"""Binary arithmetic with numpy broadcasting; operands share one element type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import RunError
from bitwright.ir.dim import max_size, min_size
from bitwright.ir.graph import Value
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import conjugate
from bitwright.ops.core.gradients import elementwise
from bitwright.ops.core.inference import broadcast
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.scalar import scalar_form
from bitwright.ops.core.symbolic import on_elements


def _infer(x: Any, y: Any, **_: Any) -> Any:
    for operand in (x, y):
        expect.number("an operand", operand)
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
    def pair(x: tuple[int, ...], y: tuple[int, ...], element: str = "f32") -> list[Array]:
        return [draw(*x, dtype=element, low=low), draw(*y, dtype=element, seed=1, low=0.5)]

    def make() -> list[Sample]:
        shapes = [((3, 5), (3, 5)), ((4, 1, 5), (3, 1)), ((2, 3), ())]
        found = [
            *(sample(*pair(x, y)) for x, y in shapes),
            sample(draw(0, 3), draw(1, 3)),
            sample(*pair((2, 7), (7,), "f64")),
            sample(*pair((2, 7), (7,), "bf16"), tolerance=2e-2),
        ]
        for element, lowest in [("i64", -9), ("u8", 0)] if integers else []:
            divisor = draw(6, dtype=element, seed=2, low=1, high=9)
            found.append(sample(draw(6, dtype=element, low=lowest, high=9), divisor))
        return found

    return make


def _op(
    name: str,
    reference: Callable[..., Any],
    doc: str,
    scalar: str | Callable[..., Any],
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
        scalar=scalar_form(scalar) if isinstance(scalar, str) else scalar,
        sizes=on_elements(sizes) if sizes else None,
        doc=doc,
        **rest,
    )


def _rem_scalar(e: Any, x: Any, y: Any, fmod: bool) -> Any:
    truncated = e.rem(x, y)
    if fmod:
        return truncated
    wrong_side = e.bit_and(e.ne(truncated, 0), e.ne(e.lt(truncated, 0), e.lt(y, 0)))
    return e.select(wrong_side, e.add(truncated, y), truncated)


def _mod_by_divisor(b: Builder, dy: Value, x: Value, z: Value, y: Value, fmod: bool) -> Any:
    """x mod z = x - z * whole(x / z), and the quotient is piecewise constant."""
    quotient = b.div(x, z)
    return b.neg(b.mul(dy, b.trunc(quotient) if fmod else b.floor(quotient)))


def _pow_by_base(b: Builder, dy: Value, x: Value, z: Value, y: Value) -> Any:
    """z * x**(z - 1), and 0 for z = 0 at every x."""
    exponent = _constant_number(z)
    if exponent == 2:
        return b.mul(dy, conjugate(b, b.mul(x, 2.0)))
    if exponent == 0.5:
        return b.div(b.mul(dy, 0.5), conjugate(b, y))
    if exponent is not None and exponent != 0:
        return b.mul(dy, conjugate(b, b.mul(b.pow(x, exponent - 1), exponent)))
    slope = b.mul(z, b.pow(x, b.where(b.eq(z, 0.0), 1.0, b.sub(z, 1.0))))
    return b.mul(dy, conjugate(b, slope))


def _pow_by_exponent(b: Builder, dy: Value, x: Value, z: Value, y: Value) -> Any:
    """y * log(x), and 0 for x = 0, where y does not change."""
    is_zero = b.eq(x, 0.0)
    logarithm = b.log(b.where(is_zero, 1.0, x))
    return b.mul(dy, conjugate(b, b.mul(y, logarithm)))


def _constant_number(value: Value) -> float | None:
    """The element of a real constant scalar, else None."""
    given = value.node.attrs.get("value") if value.node.op == "constant" else None
    if given is None or np.size(given) != 1 or value.rank or value.dtype.is_complex:
        return None
    return float(np.asarray(given).reshape(()).astype(np.float64))


def _winner(loses: str, position: int) -> Callable[..., Any]:
    """dy for the operand that wins; equal operands receive one half each, as in PyTorch."""

    def partial(b: Builder, dy: Value, x: Value, z: Value, y: Value) -> Any:
        mine, other = (x, z) if position == 0 else (z, x)
        shared = b.where(b.eq(x, z), b.mul(dy, 0.5), dy)
        return b.where(b.op(loses, mine, other), 0.0, shared)

    return partial


_SYMMETRIC = {"commutative": True, "is_cheap": True}
_max_size, _min_size = np.frompyfunc(max_size, 2, 1), np.frompyfunc(min_size, 2, 1)
OPDEFS = [
    _op(
        "add",
        np.add,
        "x + y",
        "add",
        np.add,
        grad=elementwise(lambda b, dy, x, z, y: dy, lambda b, dy, x, z, y: dy),
        onnx="Add",
        keeps_nonnegative=True,
        **_SYMMETRIC,
    ),
    _op(
        "sub",
        np.subtract,
        "x - y",
        "sub",
        np.subtract,
        grad=elementwise(lambda b, dy, x, z, y: dy, lambda b, dy, x, z, y: b.neg(dy)),
        onnx="Sub",
        is_cheap=True,
    ),
    _op(
        "mul",
        np.multiply,
        "x * y",
        "mul",
        np.multiply,
        grad=elementwise(
            lambda b, dy, x, z, y: b.mul(dy, conjugate(b, z)),
            lambda b, dy, x, z, y: b.mul(dy, conjugate(b, x)),
        ),
        onnx="Mul",
        keeps_nonnegative=True,
        **_SYMMETRIC,
    ),
    _op(
        "div",
        divide,
        "x / y; integers truncate towards zero",
        "div",
        np.floor_divide,
        grad=elementwise(
            lambda b, dy, x, z, y: b.div(dy, conjugate(b, z)),
            lambda b, dy, x, z, y: b.neg(b.mul(b.div(dy, conjugate(b, z)), conjugate(b, y))),
        ),
        onnx="Div",
        keeps_nonnegative=True,
    ),
    _op(
        "mod",
        remainder,
        "Remainder with the sign of y, or of x for fmod.",
        _rem_scalar,
        lambda x, y, fmod: np.mod(x, y),
        grad=elementwise(lambda b, dy, x, z, y, fmod: dy, _mod_by_divisor),
        attrs={"fmod": Attr("bool", False)},
    ),
    _op(
        "pow",
        power,
        "x to the power y",
        "pow",
        grad=elementwise(_pow_by_base, _pow_by_exponent),
        samples=_samples(integers=False, low=0.1),
    ),
    _op(
        "maximum",
        np.maximum,
        "The larger of x and y; NaN propagates.",
        "max",
        _max_size,
        grad=elementwise(_winner("lt", 0), _winner("lt", 1)),
        keeps_nonnegative=True,
        **_SYMMETRIC,
    ),
    _op(
        "minimum",
        np.minimum,
        "The smaller of x and y; NaN propagates.",
        "min",
        _min_size,
        grad=elementwise(_winner("gt", 0), _winner("gt", 1)),
        **_SYMMETRIC,
    ),
]
