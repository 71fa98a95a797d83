"""x^y and the remainder of a division, for floats.

    x^y = e^(y ln |x|), with the sign and the limits that C's pow gives
    rem(x, y) = x - y · trunc(x / y), exactly

pow in f32 is computed in f64 and off by at most 1 ulp; in f64 its relative error is at most
2^-51 · (2 + |y ln x|), and whole powers of whole numbers are exact up to 2^53. rem is exact.
"""

from __future__ import annotations

import math

from bitwright.backends.cpu.codegen.emit import Function, Value, f64, i64
from bitwright.backends.cpu.codegen.math.basis import in_f64
from bitwright.backends.cpu.codegen.math.exponential import exp
from bitwright.backends.cpu.codegen.math.logarithm import log


def pow_(f: Function, x: Value, y: Value) -> Value:
    power = _power(f, x, y)
    return _exact_where_whole(f, x, y, power) if x.type.scalar is f64 else power


def _exact_where_whole(f: Function, x: Value, y: Value, power: Value) -> Value:
    """Square and multiply, where every product is an integer that f64 represents."""
    fits = f.and_(f.ge(y, 0.0), f.lt(y, 64.0))
    fits = f.and_(fits, f.and_(f.eq(f.trunc(y), y), f.eq(f.trunc(x), x)))
    total, square, left = f.const(x.type, 1.0), x, f.select(fits, y, 0.0)
    for _ in range(6):
        half = f.trunc(f.mul(left, 0.5))
        odd = f.ne(left, f.mul(half, 2.0))
        total = f.select(odd, f.mul(total, square), total)
        square, left = f.mul(square, square), half
    return f.select(f.and_(fits, f.le(f.abs(total), 2.0**53)), total, power)


@in_f64
def _power(f: Function, x: Value, y: Value) -> Value:
    size = f.abs(x)
    power = exp(f, f.mul(y, log(f, size)))
    half = f.mul(y, 0.5)
    whole = f.eq(f.trunc(y), y)
    odd = f.and_(whole, f.ne(f.trunc(half), half))
    negative = f.lt(f.bitcast(x, x.type.of(i64)), 0)
    power = f.select(f.and_(negative, odd), f.neg(power), power)
    finite_negative = f.and_(f.lt(x, 0.0), f.lt(size, math.inf))
    power = f.select(f.and_(finite_negative, f.not_(whole)), math.nan, power)
    # y ln |x| is 0 · inf where |x| = 1 and y is infinite
    at_one = f.or_(f.eq(x, 1.0), f.and_(f.eq(x, -1.0), f.eq(f.abs(y), math.inf)))
    return f.select(f.or_(at_one, f.eq(y, 0.0)), 1.0, power)


@in_f64
def remainder(f: Function, x: Value, y: Value) -> Value:
    """The remainder with the sign of x. Each iteration subtracts the quotient's leading 26 bits, so
    that its products with both halves of y are exact."""
    together = max((x.type, y.type), key=lambda type_: type_.lanes)
    x, y = f.as_value(x, together), f.as_value(y, together)
    divisor = f.abs(y)
    high = f.bitcast(f.and_(f.bitcast(divisor, y.type.of(i64)), -(1 << 27)), y.type)
    low = f.sub(divisor, high)
    finite = f.and_(f.lt(f.abs(x), math.inf), f.gt(divisor, 0.0))
    start = f.select(finite, f.abs(x), 0.0)
    with f.do_while(carry=(start,)) as loop:
        rest = loop.carried[0]
        bits = f.bitcast(f.div(rest, divisor), y.type.of(i64))
        quotient = f.trunc(f.bitcast(f.and_(bits, -(1 << 27)), y.type))
        quotient = f.select(f.lt(rest, divisor), 0.0, quotient)
        left = f.sub(f.sub(rest, f.mul(quotient, high)), f.mul(quotient, low))
        loop.next(left, again=f.any(f.ge(left, divisor)))
    y_or_x = f.select(f.eq(divisor, math.inf), f.abs(x), loop.results[0])
    defined = f.select(finite, f.copysign(y_or_x, x), math.nan)
    return f.select(f.or_(f.is_nan(x), f.is_nan(y)), math.nan, defined)
