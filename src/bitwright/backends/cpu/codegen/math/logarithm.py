"""ln x and ln(1 + x).

x = 2^e m with m in [√½, √2), so that ln x = e ln 2 + ln(1 + f), f = m - 1.
Largest error: log 1 ulp, log1p 2 ulp (f32 and f64).
"""

from __future__ import annotations

import math

from bitwright.backends.cpu.codegen.emit import Function, Value
from bitwright.backends.cpu.codegen.math.basis import (
    DOUBLE,
    LN2_HIGH,
    LN2_LOW,
    SINGLE,
    Format,
    format_of,
    horner,
    power_of_two,
)

# ln(1 + f) = f - f²/2 + f³ P(f) on [√½ - 1, √2 - 1], relative error 2^-27
_SINGLE = (
    0.3333333, -0.25000826, 0.20001237, -0.16623145, 0.14201336, -0.1316196, 0.12765622,
    -0.07634729,
)  # fmt: skip
# ln(1 + f) = 2s + s³ R(s²), s = f / (2 + f), on the same interval, relative error 2^-59
_DOUBLE = (
    0.6666666666666735, 0.39999999999407504, 0.28571428744139044, 0.22222198378609018,
    0.1818357516384619, 0.15313755676384064, 0.14799068102692162,
)  # fmt: skip
# the bits of √½
_ROOT_HALF = {SINGLE: 0x3F3504F3, DOUBLE: 0x3FE6A09E667F3BCD}


def log(f: Function, x: Value) -> Value:
    """ln x; -inf at 0, NaN below."""
    form = format_of(x)
    tiny = f.lt(x, form.least_normal)
    lifted = f.select(tiny, f.mul(x, 2.0**form.fraction_bits), x)
    exponent, m = _split(f, lifted, form)
    exponent = f.select(tiny, f.sub(exponent, form.fraction_bits), exponent)
    y = _assemble(f, exponent, f.sub(m, 1.0), form)
    return _limits(f, x, 0.0, y)


def log1p(f: Function, x: Value) -> Value:
    """ln(1 + x), as accurate near 0 as elsewhere; -inf at -1, NaN below."""
    form = format_of(x)
    u = f.add(x, 1.0)
    # the exact rounding error of the addition
    lost = f.select(f.lt(x, 1.0), f.sub(x, f.sub(u, 1.0)), f.sub(1.0, f.sub(u, x)))
    exponent, m = _split(f, u, form)
    down = power_of_two(f, f.sub(0, f.min(exponent, 60)), form)
    fraction = f.fma(lost, down, f.sub(m, 1.0))
    y = _assemble(f, exponent, fraction, form)
    return f.copysign(_limits(f, x, -1.0, y), x)


def _split(f: Function, x: Value, form: Format) -> tuple[Value, Value]:
    """The exponent (an integer) and m of a normal number."""
    bits = f.bitcast(x, x.type.of(form.integer))
    above = f.sub(bits, _ROOT_HALF[form])
    exponent = f.ashr(above, form.fraction_bits)
    fraction = f.and_(above, (1 << form.fraction_bits) - 1)
    return exponent, f.bitcast(f.add(fraction, _ROOT_HALF[form]), x.type)


def _assemble(f: Function, exponent: Value, fraction: Value, form: Format) -> Value:
    """e ln 2 + ln(1 + f), small parts first."""
    turns = f.convert(exponent, form.float_)
    low, high = f.mul(turns, LN2_LOW[form]), f.mul(turns, LN2_HIGH[form])
    square = f.mul(fraction, fraction)
    half = f.mul(square, 0.5)
    if form is SINGLE:
        cubic = f.mul(f.mul(square, fraction), horner(f, fraction, _SINGLE))
        rest = f.sub(f.add(cubic, low), half)
    else:
        s = f.div(fraction, f.add(fraction, 2.0))
        t = f.mul(s, s)
        series = f.mul(t, horner(f, t, _DOUBLE))
        rest = f.sub(f.fma(s, f.add(half, series), low), half)
    return f.add(f.add(rest, fraction), high)


def _limits(f: Function, x: Value, pole: float, y: Value) -> Value:
    y = f.select(f.eq(x, math.inf), x, y)
    y = f.select(f.eq(x, pole), -math.inf, y)
    return f.select(f.ult(x, pole), math.nan, y)  # unordered or below
