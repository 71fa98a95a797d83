"""erf(x) = 2/√π ∫₀ˣ e^(-t²) dt.

|x| < 1: an odd polynomial. Beyond: 1 - e^Q(|x|), where Q approximates ln erfc; since erfc is small
there, errors of Q and of the exponential shrink with it. Largest error: 2 ulp (f32 and f64).
"""

from __future__ import annotations

from bitwright.backends.cpu.emit import Function, Value
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


def erf(f: Function, x: Value) -> Value:
    form = format_of(x)
    size = f.min(f.abs(x), _END[form])
    near = f.fma(size, horner(f, f.mul(size, size), _NEAR[form]), size)
    far = f.sub(1.0, exp_inside(f, horner(f, size, _FAR[form])))
    return f.copysign(f.select(f.lt(size, 1.0), near, far), x)
