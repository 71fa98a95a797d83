"""Mathematical functions of one operand: y = f(x), with the type of x.

Scalar forms without an operation in the scalar interface are composed of others:
    expm1(x) = tanh(x/2) * (exp(x) + 1)      log1p(x) = 2 * atanh(x / (2 + x)) near 0
These are accurate near 0 and have the right limits at the infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.decide import decided, magnitude
from bitwright.ops.core.derivatives import chain, conjugate
from bitwright.ops.core.gradients import elementwise, zero_gradient
from bitwright.ops.core.inference import same_float
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.scalar import erf, scalar_form
from bitwright.ops.core.symbolic import on_elements


def real_number(x: TensorType, **_: Any) -> TensorType:
    expect.real("the operand", x)
    return x


def real_float(x: TensorType, **_: Any) -> TensorType:
    expect.dtype("the operand", x, expect.is_float, "a real floating type")
    return x


def _number(x: TensorType, **_: Any) -> TensorType:
    expect.number("the operand", x)
    return x


def unary_samples(
    low: float, high: float, integers: bool, variants: Sequence[Mapping[str, Any]]
) -> list[Sample]:
    """Numbers between `low` and `high` of several element types and ranks."""
    pick = partial(draw, low=low, high=high)
    found = [
        sample(pick(3, 5)),
        sample(pick()),
        sample(pick(0, 3)),
        sample(pick(2, 7, dtype="f64")),
        sample(pick(9, dtype="f16"), tolerance=2e-3),
        sample(pick(9, dtype="bf16"), tolerance=2e-2),
    ]
    if integers:
        found += [sample(draw(6, dtype=t, low=-9, high=9)) for t in ("i64", "i8", "u8")]
    return found + [sample(pick(3, 5), **attrs) for attrs in variants]


def unary(
    name: str,
    reference: Callable[..., Any],
    doc: str,
    scalar: Callable[..., Any] | None = None,
    *,
    infer: Callable[..., Any] = same_float,
    low: float = -2,
    high: float = 2,
    variants: Sequence[Mapping[str, Any]] = (),
    **rest: Any,
) -> OpDef:
    """An op on one operand whose reference takes the wide array.

    Samples lie between `low` and `high`; `variants` are more attributes to sample. The scalar form
    is by default the renderer's operation of this name.
    """
    integers = infer in (real_number, _number)

    def compute(x: Array, **attrs: Any) -> Any:
        return reference(wide(x), **attrs)

    return OpDef(
        name,
        Kind.ELEMENTWISE,
        "x",
        infer=infer,
        reference=compute,
        samples=lambda: unary_samples(low, high, integers, variants),
        scalar=scalar or scalar_form(name),
        doc=doc,
        **rest,
    )


def expm1_scalar(e: Any, x: Any) -> Any:
    return e.mul(e.tanh(e.mul(x, 0.5)), e.add(e.exp(x), 1.0))


def log1p_scalar(e: Any, x: Any) -> Any:
    near = e.mul(e.atanh(e.div(x, e.add(x, 2.0))), 2.0)
    return e.select(e.lt(e.abs(x), 0.5), near, e.log(e.add(x, 1.0)))


def _sign_scalar(e: Any, x: Any) -> Any:
    one_or_nan = e.select(e.eq(x, x), 1, x)
    size = e.select(e.ne(x, 0), one_or_nan, 0)
    return e.select(e.lt(x, 0), e.neg(size), size)


def _trunc_scalar(e: Any, x: Any) -> Any:
    return e.select(e.lt(x, 0), e.ceil(x), e.floor(x))


def _rsqrt_scalar(e: Any, x: Any) -> Any:
    return e.div(1.0, e.sqrt(x))


def _reciprocal_scalar(e: Any, x: Any) -> Any:
    return e.div(1.0, x)


def _sign_of(b: Builder, x: Value, y: Value) -> Any:
    return b.sign(x)


def _erf_slope(b: Builder, x: Value, y: Value) -> Any:
    return b.mul(b.exp(b.neg(b.mul(x, x))), 2 / math.sqrt(math.pi))


def _one_minus_square(b: Builder, x: Value) -> Any:
    """(1 - x) (1 + x), which has no cancellation near 1."""
    return b.mul(b.sub(1.0, x), b.add(x, 1.0))


def _one_plus_square(b: Builder, x: Value) -> Any:
    return b.add(b.mul(x, x), 1.0)


def _acosh_slope(b: Builder, x: Value, y: Value) -> Any:
    """1 / sqrt(x² - 1); in complex numbers the two roots keep the branch."""
    below, above = b.sub(x, 1.0), b.add(x, 1.0)
    if x.dtype.is_complex:
        return b.mul(b.rsqrt(below), b.rsqrt(above))
    return b.rsqrt(b.mul(below, above))


OPDEFS = [
    unary(
        "neg",
        np.negative,
        "-x; integers wrap",
        infer=_number,
        grad=elementwise(lambda b, dy, x, y: b.neg(dy)),
        sizes=on_elements(np.negative),
        onnx="Neg",
        is_cheap=True,
        shrinks=True,
    ),
    unary(
        "abs",
        np.abs,
        "|x|; the lowest integer wraps to itself",
        infer=real_number,
        grad=chain(_sign_of),
        sizes=decided(magnitude),
        onnx="Abs",
        is_cheap=True,
        shrinks=True,
        never_negative=True,
    ),
    unary(
        "sign",
        np.sign,
        "-1, 0, 1 or NaN, as x is",
        _sign_scalar,
        infer=real_number,
        grad=zero_gradient,
        onnx="Sign",
    ),
    unary(
        "exp",
        np.exp,
        "e to the power x",
        grad=chain(lambda b, x, y: y),
        onnx="Exp",
        never_negative=True,
    ),
    unary(
        "expm1",
        np.expm1,
        "exp(x) - 1, accurate near 0",
        expm1_scalar,
        grad=chain(lambda b, x, y: b.add(y, 1.0)),
    ),
    unary(
        "log",
        np.log,
        "natural logarithm",
        low=0.1,
        grad=elementwise(lambda b, dy, x, y: b.div(dy, conjugate(b, x))),
        onnx="Log",
    ),
    unary(
        "log1p",
        np.log1p,
        "log(1 + x), accurate near 0",
        log1p_scalar,
        low=-0.9,
        grad=elementwise(lambda b, dy, x, y: b.div(dy, conjugate(b, b.add(x, 1.0)))),
    ),
    unary(
        "sqrt",
        np.sqrt,
        "square root",
        low=0,
        grad=elementwise(lambda b, dy, x, y: b.div(b.mul(dy, 0.5), conjugate(b, y))),
        onnx="Sqrt",
        never_negative=True,
    ),
    unary(
        "rsqrt",
        lambda x: 1 / np.sqrt(x),
        "1 / sqrt(x)",
        _rsqrt_scalar,
        low=0.1,
        grad=chain(lambda b, x, y: b.mul(b.mul(b.mul(y, y), y), -0.5)),
    ),
    unary(
        "reciprocal",
        lambda x: 1 / x,
        "1 / x",
        _reciprocal_scalar,
        low=0.2,
        grad=chain(lambda b, x, y: b.neg(b.mul(y, y))),
        onnx="Reciprocal",
    ),
    unary(
        "sin",
        np.sin,
        "sine of x radians",
        grad=chain(lambda b, x, y: b.cos(x)),
        onnx="Sin",
        max_abs=1.0,
    ),
    unary(
        "cos",
        np.cos,
        "cosine of x radians",
        grad=chain(lambda b, x, y: b.neg(b.sin(x))),
        onnx="Cos",
        max_abs=1.0,
    ),
    unary(
        "tan",
        np.tan,
        "tangent of x radians",
        high=1.4,
        grad=chain(lambda b, x, y: _one_plus_square(b, y)),
        onnx="Tan",
    ),
    unary(
        "asin",
        np.arcsin,
        "arc sine",
        low=-1,
        high=1,
        grad=chain(lambda b, x, y: b.rsqrt(_one_minus_square(b, x))),
        onnx="Asin",
    ),
    unary(
        "acos",
        np.arccos,
        "arc cosine",
        low=-1,
        high=1,
        grad=chain(lambda b, x, y: b.neg(b.rsqrt(_one_minus_square(b, x)))),
        onnx="Acos",
    ),
    unary(
        "atan",
        np.arctan,
        "arc tangent",
        grad=chain(lambda b, x, y: b.reciprocal(_one_plus_square(b, x))),
        onnx="Atan",
    ),
    unary(
        "sinh",
        np.sinh,
        "hyperbolic sine",
        grad=chain(lambda b, x, y: b.cosh(x)),
        onnx="Sinh",
    ),
    unary(
        "cosh",
        np.cosh,
        "hyperbolic cosine",
        grad=chain(lambda b, x, y: b.sinh(x)),
        onnx="Cosh",
    ),
    unary(
        "tanh",
        np.tanh,
        "hyperbolic tangent",
        grad=chain(lambda b, x, y: b.sub(1.0, b.mul(y, y))),
        onnx="Tanh",
        shrinks=True,
    ),
    unary(
        "asinh",
        np.arcsinh,
        "inverse of sinh",
        grad=chain(lambda b, x, y: b.rsqrt(_one_plus_square(b, x))),
        onnx="Asinh",
    ),
    unary(
        "acosh",
        np.arccosh,
        "inverse of cosh",
        low=1,
        grad=chain(_acosh_slope),
        onnx="Acosh",
    ),
    unary(
        "atanh",
        np.arctanh,
        "inverse of tanh",
        low=-0.9,
        high=0.9,
        grad=chain(lambda b, x, y: b.reciprocal(_one_minus_square(b, x))),
        onnx="Atanh",
    ),
    unary(
        "erf",
        erf,
        "error function",
        infer=real_float,
        grad=chain(_erf_slope),
        onnx="Erf",
        max_abs=1.0,
    ),
    *(
        unary(name, reference, doc, infer=real_float, grad=zero_gradient, onnx=name.capitalize())
        for name, reference, doc in (
            ("floor", np.floor, "the whole number at or below x"),
            ("ceil", np.ceil, "the whole number at or above x"),
            ("round", np.rint, "the nearest whole number, halves to even"),
        )
    ),
    unary(
        "trunc",
        np.trunc,
        "x without its fraction",
        _trunc_scalar,
        infer=real_float,
        grad=zero_gradient,
    ),
]
