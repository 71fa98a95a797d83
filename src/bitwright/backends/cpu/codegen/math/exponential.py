"""e^x and e^x - 1.

x = n ln 2 + r with |r| <= ln 2 / 2, so that e^x = 2^n · e^r and e^r is a short polynomial.
Largest error: exp 0.9 ulp (1.1 without fma), expm1 2 ulp. In f32 with fma, e^x has the bits of ONNX
Runtime's Exp: softmax and x / (1 + e^-x) often precede 8-bit quantization, where a different last
bit can change the quantized value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitwright.backends.cpu.codegen.emit import Function, Value
from bitwright.backends.cpu.codegen.math.basis import (
    DOUBLE,
    LN2_HIGH,
    LN2_LOW,
    SINGLE,
    Format,
    format_of,
    horner,
    nearest,
    power_of_two,
    scale,
)

# e^r on |r| <= ln 2 / 2, relative error 2^-27 and 2^-64
_EXP = {
    SINGLE: (
        1.0, 1.0, float.fromhex("0x1.fffff6p-2"), float.fromhex("0x1.555450p-3"),
        float.fromhex("0x1.555b5ap-5"), float.fromhex("0x1.125edcp-7"),
        float.fromhex("0x1.694000p-10"),
    ),
    DOUBLE: (
        1.0, 1.0, 0.5, 0.16666666666666682, 0.041666666666666095, 0.008333333333316983,
        0.001388888888911639, 0.000198412698965142, 2.4801586925656112e-05, 2.7557234728557597e-06,
        2.755758233694174e-07, 2.511208429742466e-08, 2.0826565595847573e-09,
    ),
}  # fmt: skip
# e^r - 1 = r + r² P(r) on the same interval, relative error 2^-32 and 2^-62
_EXPM1 = {
    SINGLE: (0.5, 0.16666666, 0.04166636, 0.00833339, 0.0013940668, 0.0001984594),
    DOUBLE: (
        0.5, 0.16666666666666677, 0.04166666666666651, 0.008333333333321653, 0.0013888888888962587,
        0.00019841269886074323, 2.4801587172243856e-05, 2.755724425328948e-06,
        2.7557402772604665e-07, 2.5109024783867538e-08, 2.087532846633739e-09,
    ),
}  # fmt: skip
# beyond these the result is 0 or infinity
_LOW, _HIGH = {SINGLE: -104.0, DOUBLE: -746.0}, {SINGLE: 89.0, DOUBLE: 710.0}


def _reduce(f: Function, x: Value, form: Format) -> tuple[Value, Value]:
    """(r, n) of the module's formula."""
    whole, n = nearest(f, x, math.log2(math.e), form)
    r = f.fma(whole, -LN2_HIGH[form], x)
    return f.fma(whole, -LN2_LOW[form], r), n


def split(f: Function, x: Value, ln2: Sequence[float] = ()) -> tuple[Value, Value]:
    """(r, 2^n) of the module's formula, where 2^n is a normal number; `ln2` replaces the default
    parts of ln 2."""
    form = format_of(x)
    # the last bits of the sum are then n + bias, the exponent field of 2^n
    magic = form.magic + form.bias
    shifted = f.fma(x, math.log2(math.e), magic)
    whole = f.sub(shifted, magic)
    bits = f.shl(f.bitcast(shifted, x.type.of(form.integer)), form.fraction_bits)
    for part in ln2 or (LN2_HIGH[form], LN2_LOW[form]):
        x = f.fma(whole, -part, x)
    return x, f.bitcast(bits, x.type)


def exp_inside(f: Function, x: Value) -> Value:
    """e^x for x known to give a normal number, without range checks."""
    r, power = split(f, x)
    return f.mul(horner(f, r, _EXP[format_of(x)]), power)


def exp(f: Function, x: Value) -> Value:
    """e^x for every x."""
    form = format_of(x)
    # inputs that give 0 are computed as e^0: denormal intermediate results would be slow
    vanishes = f.lt(x, _LOW[form])
    inside = f.min(f.select(vanishes, 0.0, x), _HIGH[form])
    r, n = _reduce(f, inside, form)
    return f.select(vanishes, 0.0, scale(f, horner(f, r, _EXP[form]), n, form))


def expm1(f: Function, x: Value) -> Value:
    """e^x - 1, as accurate near 0 as elsewhere."""
    form = format_of(x)
    inside = f.clamp(x, -60.0, _HIGH[form])
    r, n = _reduce(f, inside, form)
    curve = f.fma(horner(f, r, _EXPM1[form]), f.mul(r, r), r)
    # 2^n c + (2^n - 1), with 2^(n-1) in place of 2^n, which may overflow where e^x does not
    half = power_of_two(f, f.sub(n, 1), form)
    doubled = f.fma(curve, half, f.sub(half, 0.5))
    return f.copysign(f.add(doubled, doubled), x)
