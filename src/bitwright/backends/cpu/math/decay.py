"""e^x for x <= 0, as softmax needs it: short, 1 at 0, and 0 where the result would not be normal.

As `exponential`, with the polynomial one degree shorter and 2^n written without a check, since n
stays in the normal range. Largest error 2e-7 of the result for x > -2, and of e^x relative to 1
everywhere; NaN stays NaN.

Where e^x ends as codes, last bits decide on steps: `exact_decay` has the bits of `exponential`.
"""

from __future__ import annotations

import math

from bitwright.backends.cpu.emit import Function, Value, f32, i32
from bitwright.backends.cpu.math.basis import LN2_HIGH, LN2_LOW, SINGLE, horner
from bitwright.backends.cpu.math.exponential import CURVE, exp

# e^r = 1 + r P(r) on |r| <= ln 2 / 2, relative error 2^-23.4
_CURVE = (1.0, 0.9999997, 0.49999148, 0.16667639, 0.04189816, 0.008290272)
_LOW = -87.3
"""Below it, e^x is no normal f32."""
# adding it leaves round(x) + 127, the exponent field of 2^x, in the last bits
_MAGIC = 1.5 * 2.0**23 + 127.0


def decay(f: Function, x: Value) -> Value:
    """e^x for x <= 0."""
    if x.type.scalar is not f32:
        return exp(f, x)
    # what comes out below _LOW is not used, and cannot be denormal, which would be slow
    return f.select(f.lt(x, _LOW), 0.0, _power(f, x))


def exact_decay(f: Function, x: Value) -> Value:
    """e^x of f32 for x <= 0, and no less than e^-80; NaN stays NaN."""
    r, power = split(f, f.quick_max(f.const(x.type, -80.0), x))
    return f.mul(horner(f, r, CURVE[SINGLE]), power)


def split(f: Function, x: Value) -> tuple[Value, Value]:
    """(r, 2^n) with e^x = 2^n e^r, in f32 where the power is a normal number."""
    shifted = f.fma(x, math.log2(math.e), _MAGIC)
    whole = f.sub(shifted, _MAGIC)
    r = f.fma(whole, -LN2_HIGH[SINGLE], x)
    power = f.bitcast(f.shl(f.bitcast(shifted, x.type.of(i32)), 23), x.type)
    return f.fma(whole, -LN2_LOW[SINGLE], r), power


def _power(f: Function, x: Value) -> Value:
    """e^x where that is a normal number."""
    shifted = f.fma(x, math.log2(math.e), _MAGIC)
    r = f.fma(f.sub(shifted, _MAGIC), -math.log(2), x)
    power = f.bitcast(f.shl(f.bitcast(shifted, x.type.of(i32)), 23), x.type)
    return f.mul(horner(f, r, _CURVE), power)
