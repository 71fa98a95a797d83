"""erf(x) = 2/√π ∫₀ˣ e^(-t²) dt.

|x| < 1: an odd polynomial. Beyond: 1 - e^Q(|x|), where Q approximates ln erfc; since erfc is small
there, errors of Q and of the exponential shrink with it. Largest error: 2 ulp (f32 and f64).

Where a vector can look up 32 numbers by lane, f32 takes the nearest k / 8 instead and a polynomial
of degree 4 around it, which interpolates erf at Chebyshev's points: half the instructions, largest
error 2.1 ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from bitwright.backends.cpu.emit import Function, Value, f32, i32
from bitwright.backends.cpu.instr import lookup_pair_f32
from bitwright.backends.cpu.math.basis import DOUBLE, SINGLE, format_of, horner
from bitwright.backends.cpu.math.exponential import exp_inside

# erf(x) = x + x P(x²) on |x| <= 1, relative error 2^-29 and 2^-62
_NEAR = {
    SINGLE: (
        0.12837917,
        -0.37612626,
        0.112835854,
        -0.026853811,
        0.0051883273,
        -0.0008010189,
        7.853844e-05,
    ),
    DOUBLE: (
        0.12837916709551258,
        -0.3761263890318375,
        0.11283791670954857,
        -0.026866170645072893,
        0.005223977624780835,
        -0.0008548326978740568,
        0.00012055331036846668,
        -1.4925593505766364e-05,
        1.6460972801190717e-06,
        -1.6350025076223882e-07,
        1.4657878989888879e-08,
        -1.1365663136628493e-09,
        5.945257693941542e-11,
    ),
}
# ln erfc(x) on [1, 4] and [1, 6], weighted by erfc/erf, error 2^-29 and 2^-57
_FAR = {
    SINGLE: (
        -0.00034158528,
        -1.1270889,
        -0.63814527,
        -0.10310639,
        0.021837888,
        -0.0029476138,
        0.0001863746,
    ),
    DOUBLE: (
        -5.028358036943037e-07,
        -1.1283740896219585,
        -0.6366436273875091,
        -0.10270344157549129,
        0.018990182983850783,
        0.00041062191254807287,
        -0.0019159368636216543,
        0.0007706378867242542,
        -0.00013504699015476728,
        -2.0268336533587306e-05,
        2.2823155803277392e-05,
        -8.667363345612641e-06,
        2.1357241841239605e-06,
        -3.733110914294832e-07,
        4.642392912739775e-08,
        -3.934350642587331e-09,
        2.045011840395524e-10,
        -4.928746703744201e-12,
    ),
}
# erf rounds to 1 from here on
_END = {SINGLE: 4.0, DOUBLE: 6.0}


_STEPS, _ENTRIES = 8, 32
# within the last k / 8, around which erf is nearly 1
_TABLE_END = 3.9


def _interpolated(
    function: Callable[[float], float], low: float, high: float, count: int
) -> list[float]:
    """c0 + c1 t + … through `count` Chebyshev points of an interval."""
    middle, half = (low + high) / 2, (high - low) / 2
    angles = [math.pi * (2 * i + 1) / (2 * count) for i in range(count)]
    points = [middle + half * math.cos(angle) for angle in angles]
    slopes = [function(point) for point in points]  # divided differences, one order at a time
    for order in range(1, count):
        for i in range(count - 1, order - 1, -1):
            slopes[i] = (slopes[i] - slopes[i - 1]) / (points[i] - points[i - order])
    found = [0.0] * count
    for slope, point in zip(reversed(slopes), reversed(points), strict=True):
        moved = [0.0, *found[:-1]]
        found = [up - point * own for up, own in zip(moved, found, strict=True)]
        found[0] += slope
    return found


@cache
def _table() -> tuple[tuple[float, ...], ...]:
    """Coefficients by order, each for every k; around 0 there is no constant one."""
    half = 0.5 / _STEPS
    rows = [[0.0, *_interpolated(lambda t: math.erf(t) / t, 0.0, half, 4)]]
    for k in range(1, _ENTRIES - 1):
        start = k / _STEPS
        rows.append(_interpolated(lambda t, start=start: math.erf(start + t), -half, half, 5))
    rows.append([1.0, 0.0, 0.0, 0.0, 0.0])
    return tuple(zip(*rows, strict=True))


def _looked_up(f: Function, x: Value) -> Value:
    look_up = lookup_pair_f32(f.target)
    assert look_up is not None
    size = f.quick_min(_TABLE_END, f.abs(x))
    rounded = f.fma(size, float(_STEPS), SINGLE.magic)
    t = f.fma(f.sub(rounded, SINGLE.magic), -1.0 / _STEPS, size)
    place = f.bitcast(rounded, i32.vector(16))
    total: Value | None = None
    for row in reversed(_table()):
        halves = (f.const_vector(f32, row[:16]), f.const_vector(f32, row[16:]))
        coefficient = look_up(f, halves[0], place, halves[1])
        total = coefficient if total is None else f.fma(total, t, coefficient)
    assert total is not None
    return f.copysign(total, x)


def erf(f: Function, x: Value) -> Value:
    form = format_of(x)
    if form is SINGLE and x.type.lanes == 16 and lookup_pair_f32(f.target) is not None:
        return _looked_up(f, x)
    size = f.min(f.abs(x), _END[form])
    near = f.fma(size, horner(f, f.mul(size, size), _NEAR[form]), size)
    far = f.sub(1.0, exp_inside(f, horner(f, size, _FAR[form])))
    return f.copysign(f.select(f.lt(size, 1.0), near, far), x)
