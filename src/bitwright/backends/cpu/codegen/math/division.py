"""Division of many numbers by one divisor, correctly rounded, with a single division.

    y = 1 / d;  q := v y;  twice:  q := q + y (v - q d)

The first iteration leaves an error below one unit in the last place; the second gives the correctly
rounded quotient (Markstein), provided that no intermediate result underflows or overflows.
"""

from __future__ import annotations

from collections.abc import Callable

from bitwright.backends.cpu.codegen.emit import Function, Value


def divider(f: Function, divisor: Value, lanes: int) -> Callable[[Value], Value]:
    """A function that divides vectors by the divisor."""
    wide = f.splat(divisor, lanes)
    if not f.target.has_fma:
        return lambda v: f.div(v, wide)
    inverse = f.splat(f.div(1.0, divisor), lanes)

    def divided(v: Value) -> Value:
        quotient = f.mul(v, inverse)
        for _ in range(2):
            quotient = f.fma(f.fma(f.neg(quotient), wide, v), inverse, quotient)
        return quotient

    return divided
