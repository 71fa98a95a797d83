"""sin, cos, tan and their inverses.

sin and cos of r in [-π/4, π/4] are short polynomials; the quadrant selects one and its sign. Angles
are reduced in f64 (`argument_reduction`), so the results hold for every finite x.
Largest error in f32: sin and cos 2 ulp, tan and the inverses 1 ulp; in f64: sin and cos
2 ulp, tan 4 ulp, the inverses 3 ulp.
"""

from __future__ import annotations

import math

from bitwright.backends.cpu.codegen.emit import Function, Value, f64, i32
from bitwright.backends.cpu.codegen.math.argument_reduction import reduce_angle
from bitwright.backends.cpu.codegen.math.basis import DOUBLE, SINGLE, format_of, horner, in_f64

# sin r = r + r³ P(r²), cos r = 1 - r²/2 + r⁴ P(r²) on |r| <= π/4, errors 2^-37, 2^-33 and 2^-68
_SIN = {
    SINGLE: (-0.16666667, 0.008333329, -0.00019839311, 2.718114e-06),
    DOUBLE: (
        -0.16666666666666666, 0.008333333333333323, -0.0001984126984125512, 2.7557319214219044e-06,
        -2.5052104919192298e-08, 1.605836761502869e-10, -7.57874772209018e-13,
    ),
}  # fmt: skip
_COS = {
    SINGLE: (0.041666646, -0.0013887315, 2.4433084e-05),
    DOUBLE: (
        0.041666666666666664, -0.0013888888888888872, 2.4801587301570537e-05,
        -2.755731921499326e-07, 2.0876754285598964e-09, -1.1470284673669922e-11,
        4.737743069397895e-14,
    ),
}  # fmt: skip
# atan x = x + x³ P(x²) on |x| <= tan π/8, error 2^-64
_ATAN = (
    -0.33333333333333326, 0.19999999999997692, -0.14285714285390785, 0.11111111088351247,
    -0.09090908150798481, 0.07692282900644426, -0.06666228856721079, 0.058770423796339885,
    -0.0521853702650573, 0.045040893730305016, -0.033487042123463324, 0.015207950614347794,
)  # fmt: skip
# asin x = x + x³ P(x²) on |x| <= ½, error 2^-60
_ASIN = (
    0.16666666666666763, 0.07499999999970096, 0.04464285717528865, 0.030381942675156853,
    0.022372215909278428, 0.017351595442040135, 0.013981019191444385, 0.01139728804829167,
    0.010789347081288337, 0.003672094867236857, 0.021790848638403807, -0.0211169801934631,
    0.0327023107902627,
)  # fmt: skip
_HALF_PI_LOW = 6.123233995736766e-17  # π/2 less its nearest f64


def sin(f: Function, x: Value) -> Value:
    return _wave(f, x, 0)


def cos(f: Function, x: Value) -> Value:
    return _wave(f, x, 1)


def _wave(f: Function, x: Value, ahead: int) -> Value:
    """sin(x + `ahead` π/2)."""
    n, r, tail = reduce_angle(f, f.convert(x, f64))
    sine, cosine = _both(f, *(f.convert(part, x.type.scalar) for part in (r, tail)))
    quadrant = n if x.type.scalar is f64 else f.convert(n, i32)
    quadrant = f.add(quadrant, ahead)
    y = f.select(f.ne(f.and_(quadrant, 1), 0), cosine, sine)
    y = f.select(f.ne(f.and_(quadrant, 2), 0), f.neg(y), y)
    keeps_zero = y if ahead else f.select(f.eq(x, 0.0), x, y)
    return f.select(f.eq(f.abs(x), math.inf), math.nan, keeps_zero)


def _both(f: Function, r: Value, tail: Value) -> tuple[Value, Value]:
    """sin r + t cos r and cos r - t sin r: sine and cosine of r + t, t being far below r."""
    form = format_of(r)
    square = f.mul(r, r)
    sine = f.fma(f.mul(square, r), horner(f, square, _SIN[form]), tail)
    half = f.mul(square, 0.5)
    cosine = f.sub(1.0, half)
    # the rounding error of 1 - r²/2 is added back with the small terms
    lost = f.sub(f.sub(1.0, cosine), half)
    small = f.fma(f.mul(square, square), horner(f, square, _COS[form]), lost)
    small = f.sub(small, f.mul(r, tail)) if form is DOUBLE else small
    return f.add(r, sine), f.add(cosine, small)


@in_f64
def tan(f: Function, x: Value) -> Value:
    n, r, tail = reduce_angle(f, x)
    sine, cosine = _both(f, r, tail)
    odd = f.ne(f.and_(n, 1), 0)
    y = f.div(f.select(odd, f.neg(cosine), sine), f.select(odd, sine, cosine))
    y = f.select(f.eq(x, 0.0), x, y)
    return f.select(f.eq(f.abs(x), math.inf), math.nan, y)


@in_f64
def atan(f: Function, x: Value) -> Value:
    """Arguments above 1 by atan x = π/2 - atan 1/x, above tan π/8 by π/4 + atan (x-1)/(x+1)."""
    size = f.abs(x)
    inverted = f.gt(size, 1.0)
    z = f.select(inverted, f.div(1.0, size), size)
    rotated = f.gt(z, math.tan(math.pi / 8))
    z = f.select(rotated, f.div(f.sub(z, 1.0), f.add(z, 1.0)), z)
    square = f.mul(z, z)
    y = f.fma(f.mul(square, z), horner(f, square, _ATAN), z)
    y = f.select(rotated, f.add(f.add(y, _HALF_PI_LOW / 2), math.pi / 4), y)
    y = f.select(inverted, f.sub(math.pi / 2, f.sub(y, _HALF_PI_LOW)), y)
    return f.copysign(y, x)


def _asin_parts(f: Function, size: Value) -> tuple[Value, Value, Value]:
    """(whether |x| > ½, z, asin z - z) with z = |x|, or √((1 - |x|)/2) beyond ½."""
    beyond = f.gt(size, 0.5)
    square = f.select(beyond, f.mul(f.sub(1.0, size), 0.5), f.mul(size, size))
    z = f.select(beyond, f.sqrt(square), size)
    return beyond, z, f.mul(f.mul(square, z), horner(f, square, _ASIN))


@in_f64
def asin(f: Function, x: Value) -> Value:
    """NaN outside [-1, 1]; beyond ½ by asin x = π/2 - 2 asin √((1-x)/2)."""
    beyond, z, curve = _asin_parts(f, f.abs(x))
    y = f.add(z, curve)
    far = f.sub(math.pi / 2, f.sub(f.add(y, y), _HALF_PI_LOW))
    return f.copysign(f.select(beyond, far, y), x)


@in_f64
def acos(f: Function, x: Value) -> Value:
    """NaN outside [-1, 1]; π/2 - asin x, rearranged to avoid cancellation."""
    beyond, z, curve = _asin_parts(f, f.abs(x))
    y = f.add(z, curve)
    double = f.add(y, y)
    negative = f.lt(x, 0.0)
    far = f.select(negative, f.sub(math.pi, f.sub(double, 2 * _HALF_PI_LOW)), double)
    signed = f.copysign(y, x)
    near = f.sub(math.pi / 2, f.sub(signed, _HALF_PI_LOW))
    return f.select(beyond, far, near)
