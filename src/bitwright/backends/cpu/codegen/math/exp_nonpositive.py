"""e^x for x <= 0, as softmax needs it: fast, 1 at 0, and 0 where the result is not normal.

As `exponential`, with a polynomial one degree lower and 2^n without range checks, since n stays in
the normal range. Largest relative error 2e-7 for x > -2, largest absolute error 2e-7 everywhere;
NaN stays NaN. `exp_nonpositive_exact` has the bits of `exponential`: if e^x is then quantized, a
difference in the last bit can change the quantized value.
"""

from __future__ import annotations

import math

from bitwright.backends.cpu.codegen.emit import Function, Value, f32
from bitwright.backends.cpu.codegen.math.basis import horner
from bitwright.backends.cpu.codegen.math.exponential import exp, exp_inside, split

# e^r = 1 + r P(r) on |r| <= ln 2 / 2, relative error 2^-23.4
_CURVE = (1.0, 0.9999997, 0.49999148, 0.16667639, 0.04189816, 0.008290272)
_LOW = -87.3
"""Below it, e^x is not a normal f32."""


def exp_nonpositive(f: Function, x: Value) -> Value:
    """e^x for x <= 0."""
    if x.type.scalar is not f32:
        return exp(f, x)
    # results below _LOW are discarded; they are never denormal, which would be slow
    return f.select(f.lt(x, _LOW), 0.0, _power(f, x))


def exp_nonpositive_exact(f: Function, x: Value) -> Value:
    """e^x of f32 for x <= 0, and no less than e^-80; NaN stays NaN."""
    return exp_inside(f, f.quick_max(f.const(x.type, -80.0), x))


def _power(f: Function, x: Value) -> Value:
    """e^x where it is a normal number."""
    r, power = split(f, x, (math.log(2),))
    return f.mul(horner(f, r, _CURVE), power)
