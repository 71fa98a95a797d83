"""Mathematical functions of one operand: y = f(x), with the type of x.

Scalar forms without an operation in the scalar interface are composed of others:
    expm1(x) = tanh(x/2) * (exp(x) + 1)      log1p(x) = 2 * atanh(x / (2 + x)) near 0
These are accurate near 0 and have the right limits at the infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from bitwright.ir.types import TensorType
from bitwright.ops.core.decide import decided, magnitude
from bitwright.ops.core.inference import is_float, is_number, require_dtype, same_float
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, NotYet, OpDef, Sample, draw, sample
from bitwright.ops.core.scalar import erf
from bitwright.ops.core.symbolic import on_elements


def real_number(x: TensorType, **_: Any) -> TensorType:
    require_dtype("the operand", x, lambda d: d.is_float or d.is_integer, "a real number type")
    return x


def real_float(x: TensorType, **_: Any) -> TensorType:
    require_dtype("the operand", x, is_float, "a real floating type")
    return x


def _number(x: TensorType, **_: Any) -> TensorType:
    require_dtype("the operand", x, is_number, "a number type")
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
    scalar: Callable[..., Any],
    doc: str,
    *,
    infer: Callable[..., Any] = same_float,
    low: float = -2,
    high: float = 2,
    variants: Sequence[Mapping[str, Any]] = (),
    **rest: Any,
) -> OpDef:
    """An op on one operand whose reference takes the wide array.

    Samples lie between `low` and `high`; `variants` are more attributes to sample.
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
        grad=NotYet,
        samples=lambda: unary_samples(low, high, integers, variants),
        scalar=scalar,
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


OPDEFS = [
    unary(
        "neg",
        np.negative,
        lambda e, x: e.neg(x),
        "-x; integers wrap",
        infer=_number,
        sizes=on_elements(np.negative),
        onnx="Neg",
        is_cheap=True,
        shrinks=True,
    ),
    unary(
        "abs",
        np.abs,
        lambda e, x: e.abs(x),
        "|x|; the lowest integer wraps to itself",
        infer=real_number,
        sizes=decided(magnitude),
        onnx="Abs",
        is_cheap=True,
        shrinks=True,
        never_negative=True,
    ),
    unary(
        "sign", np.sign, _sign_scalar, "-1, 0, 1 or NaN, as x is", infer=real_number, onnx="Sign"
    ),
    unary(
        "exp", np.exp, lambda e, x: e.exp(x), "e to the power x", onnx="Exp", never_negative=True
    ),
    unary("expm1", np.expm1, expm1_scalar, "exp(x) - 1, accurate near 0"),
    unary("log", np.log, lambda e, x: e.log(x), "natural logarithm", low=0.1, onnx="Log"),
    unary("log1p", np.log1p, log1p_scalar, "log(1 + x), accurate near 0", low=-0.9),
    unary(
        "sqrt",
        np.sqrt,
        lambda e, x: e.sqrt(x),
        "square root",
        low=0,
        onnx="Sqrt",
        never_negative=True,
    ),
    unary(
        "rsqrt",
        lambda x: 1 / np.sqrt(x),
        lambda e, x: e.div(1.0, e.sqrt(x)),
        "1 / sqrt(x)",
        low=0.1,
    ),
    unary(
        "reciprocal",
        lambda x: 1 / x,
        lambda e, x: e.div(1.0, x),
        "1 / x",
        low=0.2,
        onnx="Reciprocal",
    ),
    unary("sin", np.sin, lambda e, x: e.sin(x), "sine of x radians", onnx="Sin", max_abs=1.0),
    unary("cos", np.cos, lambda e, x: e.cos(x), "cosine of x radians", onnx="Cos", max_abs=1.0),
    unary("tan", np.tan, lambda e, x: e.tan(x), "tangent of x radians", high=1.4, onnx="Tan"),
    unary("asin", np.arcsin, lambda e, x: e.asin(x), "arc sine", low=-1, high=1, onnx="Asin"),
    unary("acos", np.arccos, lambda e, x: e.acos(x), "arc cosine", low=-1, high=1, onnx="Acos"),
    unary("atan", np.arctan, lambda e, x: e.atan(x), "arc tangent", onnx="Atan"),
    unary("sinh", np.sinh, lambda e, x: e.sinh(x), "hyperbolic sine", onnx="Sinh"),
    unary("cosh", np.cosh, lambda e, x: e.cosh(x), "hyperbolic cosine", onnx="Cosh"),
    unary("tanh", np.tanh, lambda e, x: e.tanh(x), "hyperbolic tangent", onnx="Tanh", shrinks=True),
    unary("asinh", np.arcsinh, lambda e, x: e.asinh(x), "inverse of sinh", onnx="Asinh"),
    unary("acosh", np.arccosh, lambda e, x: e.acosh(x), "inverse of cosh", low=1, onnx="Acosh"),
    unary(
        "atanh",
        np.arctanh,
        lambda e, x: e.atanh(x),
        "inverse of tanh",
        low=-0.9,
        high=0.9,
        onnx="Atanh",
    ),
    unary(
        "erf",
        erf,
        lambda e, x: e.erf(x),
        "error function",
        infer=real_float,
        onnx="Erf",
        max_abs=1.0,
    ),
    unary(
        "floor",
        np.floor,
        lambda e, x: e.floor(x),
        "the whole number at or below x",
        infer=real_float,
        onnx="Floor",
    ),
    unary(
        "ceil",
        np.ceil,
        lambda e, x: e.ceil(x),
        "the whole number at or above x",
        infer=real_float,
        onnx="Ceil",
    ),
    unary(
        "round",
        np.rint,
        lambda e, x: e.round(x),
        "the nearest whole number, halves to even",
        infer=real_float,
        onnx="Round",
    ),
    unary("trunc", np.trunc, _trunc_scalar, "x without its fraction", infer=real_float),
]
