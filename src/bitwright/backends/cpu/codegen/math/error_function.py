"""erf(x) = 2/√π ∫₀ˣ e^(-t²) dt.

Near 0: an odd polynomial. Beyond: 1 - erfc(|x|), where erfc is e to the power of a polynomial. erfc
is small there, so errors of the polynomial and of the exponential are reduced.

    f64   |x| < 1           x + x P(x²)
          from there        1 - e^Q(|x|)
    f32   |x| <= 0.921875   x + x P(x²)
          from there        1 - e^-(|x| + |x| Q(|x|)), with a polynomial of degree 6 for e^r

Largest error: 2 ulp in f64; in f32 1 ulp, 1.2 without fma. GELU is often followed by 8-bit
quantization, where a different last bit can change the quantized value. In f32, degrees,
coefficients and evaluation order are therefore those of ONNX Runtime, so the results agree with it
and between all processors with fused multiply-add.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Function, Value
from bitwright.backends.cpu.codegen.math.basis import SINGLE, format_of, horner
from bitwright.backends.cpu.codegen.math.exponential import exp_inside, split

# erf(x) = x + x P(x²) on |x| <= 0.921875 and 1, the latter with a relative error of 2^-62
_NEAR_SINGLE = (
    1.28379151e-1, -3.76124859e-1, 1.12818025e-1, -2.67667342e-2, 4.99339588e-3, -5.99104969e-4,
)  # fmt: skip
_NEAR_DOUBLE = (
    0.12837916709551258, -0.3761263890318375, 0.11283791670954857, -0.026866170645072893,
    0.005223977624780835, -0.0008548326978740568, 0.00012055331036846668, -1.4925593505766364e-05,
    1.6460972801190717e-06, -1.6350025076223882e-07, 1.4657878989888879e-08,
    -1.1365663136628493e-09, 5.945257693941542e-11,
)  # fmt: skip
# -ln erfc(x) = x + x Q(x) on [0.921875, 3.925]
_FAR_SINGLE = (
    1.28717512e-1, 6.34846687e-1, 1.06777847e-1, -2.42545605e-2, 3.88393435e-3, -3.83208680e-4,
    1.72948930e-5,
)  # fmt: skip
# ln erfc(x) on [1, 6], weighted by erfc/erf, error 2^-57
_FAR_DOUBLE = (
    -5.028358036943037e-07, -1.1283740896219585, -0.6366436273875091, -0.10270344157549129,
    0.018990182983850783, 0.00041062191254807287, -0.0019159368636216543, 0.0007706378867242542,
    -0.00013504699015476728, -2.0268336533587306e-05, 2.2823155803277392e-05,
    -8.667363345612641e-06, 2.1357241841239605e-06, -3.733110914294832e-07, 4.642392912739775e-08,
    -3.934350642587331e-09, 2.045011840395524e-10, -4.928746703744201e-12,
)  # fmt: skip
# e^r on |r| <= ln 2 / 2
_POWER_SINGLE = (
    1.0, 1.0, 4.99999851e-1, 1.66664466e-1, 4.16689515e-2, 8.37550033e-3, 1.38319808e-3,
)  # fmt: skip
# the bound between the formulas, and the bound from which erf rounds to 1
_BORDER_SINGLE, _END_SINGLE = 0.921875, 3.925
_END_DOUBLE = 6.0


def erf(f: Function, x: Value) -> Value:
    return _single(f, x) if format_of(x) is SINGLE else _double(f, x)


def _single(f: Function, x: Value) -> Value:
    size = f.quick_min(f.const(x.type, _END_SINGLE), f.abs(x))  # NaN stays NaN
    near = f.fma(horner(f, f.mul(size, size), _NEAR_SINGLE), size, size)
    power = f.fma(horner(f, size, _FAR_SINGLE), size, size)
    r, scale = split(f, f.neg(power))
    # multiplying by a power of two is exact
    far = f.fma(f.neg(horner(f, r, _POWER_SINGLE)), scale, 1.0)
    return f.copysign(f.select(f.gt(size, _BORDER_SINGLE), far, near), x)


def _double(f: Function, x: Value) -> Value:
    size = f.min(f.abs(x), _END_DOUBLE)
    near = f.fma(size, horner(f, f.mul(size, size), _NEAR_DOUBLE), size)
    far = f.sub(1.0, exp_inside(f, horner(f, size, _FAR_DOUBLE)))
    return f.copysign(f.select(f.lt(size, 1.0), near, far), x)
