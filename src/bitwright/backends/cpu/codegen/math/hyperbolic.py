"""sinh, cosh, tanh, their inverses, and the logistic function, from exp, expm1 and log1p.

Largest error in f32: tanh 2 ulp, sigmoid 3 ulp, atanh 3 ulp, the others 1 ulp (computed in f64);
in f64: 4 ulp.
"""

from __future__ import annotations

import math

from bitwright.backends.cpu.codegen.emit import Function, Value
from bitwright.backends.cpu.codegen.math.basis import DOUBLE, SINGLE, format_of, horner, in_f64
from bitwright.backends.cpu.codegen.math.exponential import exp, exp_inside, expm1
from bitwright.backends.cpu.codegen.math.logarithm import log, log1p

# beyond these tanh rounds to 1
_TANH_END = {SINGLE: 10.0, DOUBLE: 20.0}
# tanh x = x + x³ P(x²) on |x| <= 0.625, relative error 2^-27
_TANH = (-0.3333328, 0.13331442, -0.053739715, 0.020639079, -0.0057049743)
_LARGE = 2.0**28  # x² + 1 = x² from here on


def tanh(f: Function, x: Value) -> Value:
    """1 - 2 / (e^2x + 1) where that is accurate; a polynomial below 0.625; expm1 in f64."""
    form = format_of(x)
    size = f.min(f.abs(x), _TANH_END[form])
    double = f.add(size, size)
    if form is DOUBLE:
        grown = expm1(f, double)
        return f.copysign(f.div(grown, f.add(grown, 2.0)), x)
    square = f.mul(size, size)
    near = f.fma(f.mul(square, size), horner(f, square, _TANH), size)
    far = f.sub(1.0, f.div(2.0, f.add(exp_inside(f, double), 1.0)))
    return f.copysign(f.select(f.lt(size, 0.625), near, far), x)


def sigmoid(f: Function, x: Value) -> Value:
    """1 / (1 + e^-x), computed from e^-|x|, which cannot overflow."""
    small = exp(f, f.neg(f.abs(x)))
    return f.div(f.select(f.lt(x, 0.0), small, 1.0), f.add(small, 1.0))


@in_f64
def sinh(f: Function, x: Value) -> Value:
    """(e^x - e^-x) / 2"""
    size = f.abs(x)
    grown = expm1(f, size)
    near = f.mul(f.add(grown, f.div(grown, f.add(grown, 1.0))), 0.5)
    root = exp(f, f.mul(size, 0.5))
    return f.copysign(f.select(f.gt(size, 700.0), f.mul(f.mul(root, 0.5), root), near), x)


@in_f64
def cosh(f: Function, x: Value) -> Value:
    """(e^x + e^-x) / 2"""
    root = exp(f, f.mul(f.abs(x), 0.5))
    half = f.mul(root, 0.5)
    # e^(x/2) · e^(x/2) / 2 overflows only if the result does
    return f.add(f.mul(half, root), f.div(f.div(0.5, root), root))


@in_f64
def asinh(f: Function, x: Value) -> Value:
    """ln(x + √(x² + 1))"""
    size = f.abs(x)
    inside = f.min(size, _LARGE)
    square = f.mul(inside, inside)
    root = f.sqrt(f.add(square, 1.0))
    near = log1p(f, f.add(inside, f.div(square, f.add(root, 1.0))))
    far = f.add(log(f, size), math.log(2))
    return f.copysign(f.select(f.gt(size, _LARGE), far, near), x)


@in_f64
def acosh(f: Function, x: Value) -> Value:
    """ln(x + √(x² - 1)); NaN below 1"""
    above = f.sub(f.min(x, _LARGE), 1.0)
    near = log1p(f, f.add(above, f.sqrt(f.mul(above, f.add(above, 2.0)))))
    far = f.add(log(f, x), math.log(2))
    y = f.select(f.gt(x, _LARGE), far, near)
    return f.select(f.ult(x, 1.0), math.nan, y)  # unordered or below


def atanh(f: Function, x: Value) -> Value:
    """½ ln((1 + x) / (1 - x)); infinite at ±1, NaN beyond"""
    size = f.abs(x)
    ratio = f.div(f.add(size, size), f.sub(1.0, size))
    return f.copysign(f.mul(log1p(f, ratio), 0.5), x)
