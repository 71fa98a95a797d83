"""Argument reduction to [-π/4, π/4]: x = n π/2 + r, in f64.

Up to 2^20 the product n π/2 is subtracted in parts of 33 bits, each exact (Cody and Waite). Beyond,
x · 2/π is computed modulo 4 from the bits of 2/π that matter for x's exponent (Payne and Hanek):
higher bits give full rotations, much lower bits are negligible.
"""

from __future__ import annotations

import math

from bitwright.backends.cpu.codegen.emit import Function, Value, f64, i64
from bitwright.backends.cpu.codegen.math.basis import DOUBLE, nearest, power_of_two

_LIMIT = 2.0**20
# π/2 = A + B + C, A and B of 33 bits
_A, _B, _C = 1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21
_HALF_PI, _HALF_PI_LOW = 1.5707963267948966, 6.123233995736766e-17
_CHUNK, _TERMS = 24, 8
# 2/π: 51 chunks of 24 bits, enough for the largest f64
_TWO_OVER_PI = (
    "a2f9836e4e441529fc2757d1f534ddc0db6295993c439041fe5163abdebbc561b7246e3a424dd2e006492eea"
    "09d1921cfe1deb1cb129a73ee88235f52ebb4484e99c7026b45f7e413991d639835339f49c845f8bbdf9283b"
    "1ff897ffde05980fef2f118b5a0a6d1f6d367ecf27cb09b74f463f669e5fea2d7527bac7ebe5f17b3d0739f7"
    "8a5292ea6bfb5fb11f8d5d0856033046fc7b6babf0cfbc"
)


def reduce_angle(f: Function, x: Value) -> tuple[Value, Value, Value]:
    """(n, r, r'): the quadrant (i64, exact modulo 4) and the remainder as a sum r + r'."""
    n, r, tail = _cody_waite(f, x)
    far = f.any(f.ge(f.abs(x), _LIMIT))
    with f.if_(far, carry=(n, r, tail)) as branch:
        is_far = f.ge(f.abs(x), _LIMIT)
        chosen = zip(_payne_hanek(f, x), (n, r, tail), strict=True)
        branch.next(*(f.select(is_far, there, here) for there, here in chosen))
    n, r, tail = branch.results
    return n, r, tail


def _cody_waite(f: Function, x: Value) -> tuple[Value, Value, Value]:
    whole, n = nearest(f, x, 2 / math.pi, DOUBLE)
    first = f.sub(x, f.mul(whole, _A))
    second = f.mul(whole, _B)
    rest = f.sub(first, second)
    lost = f.sub(f.sub(f.sub(first, rest), second), f.mul(whole, _C))
    r = f.add(rest, lost)
    return n, r, f.add(f.sub(rest, r), lost)


def _payne_hanek(f: Function, x: Value) -> tuple[Value, Value, Value]:
    bits = f.bitcast(x, x.type.of(i64))
    exponent = f.sub(f.and_(f.lshr(bits, 52), 0x7FF), 1023 + 52)
    digits = f.or_(f.and_(bits, (1 << 52) - 1), 1 << 52)
    high = f.convert(f.lshr(digits, 27), f64)
    low = f.convert(f.and_(digits, (1 << 27) - 1), f64)
    # the first chunk whose product is not a multiple of 4
    first = f.convert(f.floor(f.mul(f.convert(f.sub(exponent, 2), f64), 1 / _CHUNK)), i64)
    first = f.clamp(first, 0, len(_TWO_OVER_PI) * 4 // _CHUNK - _TERMS)
    place = f.sub(exponent, f.mul(f.add(first, 1), _CHUNK))
    unit = power_of_two(f, f.clamp(place, -100, 100), DOUBLE)
    chunks = [int(_TWO_OVER_PI[i : i + 6], 16) for i in range(0, len(_TWO_OVER_PI) - 5, 6)]
    table = f.module.table(f, f64, [float(chunk) for chunk in chunks])
    terms = []
    for position in range(_TERMS):
        chunk = f.gather(x.type, table, f.add(first, position))
        scaled = f.mul(f.mul(chunk, unit), 2.0 ** (-_CHUNK * position))
        terms += [_modulo_4(f, f.mul(f.mul(high, scaled), 2.0**27))]
        terms += [_modulo_4(f, f.mul(low, scaled))]
    total, tail = _exact_sum(f, terms)
    whole = f.round(total)
    part = f.sub(total, whole)
    fraction = f.add(part, tail)
    rest = f.add(f.sub(part, fraction), tail)
    r = f.mul(fraction, _HALF_PI)
    low_r = f.fma(fraction, _HALF_PI_LOW, f.mul(rest, _HALF_PI))
    n = f.convert(whole, i64)
    negative = f.lt(bits, 0)
    n = f.select(negative, f.sub(0, n), n)
    return n, f.select(negative, f.neg(r), r), f.select(negative, f.neg(low_r), low_r)


def _modulo_4(f: Function, x: Value) -> Value:
    return f.sub(x, f.mul(f.floor(f.mul(x, 0.25)), 4.0))


def _exact_sum(f: Function, terms: list[Value]) -> tuple[Value, Value]:
    """The sum and its rounding error."""
    total, lost = terms[0], f.const(terms[0].type, 0.0)
    for term in terms[1:]:
        after = f.add(total, term)
        moved = f.sub(after, total)
        error = f.add(f.sub(total, f.sub(after, moved)), f.sub(term, moved))
        total, lost = after, f.add(lost, error)
    return total, lost
