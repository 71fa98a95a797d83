"""Helper functions that kernels call, as Triton source: rounding, division, math.

They run natively and in Triton's interpreter, which has no libdevice. `needed(text)` returns the
helpers that a text uses, and those that they use. Arguments are f32 unless a name says otherwise.
Accuracies are those that tests/backends/gpu/test_gpu_derived.py asks for.
"""

from __future__ import annotations

import re

HEADER = "import triton\nimport triton.language as tl\n"

_SOURCES = """
@triton.jit
def bw_max(a, b):
    return tl.where((a > b) | (a != a), a, b)

@triton.jit
def bw_min(a, b):
    return tl.where((a < b) | (a != a), a, b)

@triton.jit
def bw_round(x):
    # to the nearest whole number, halves to even; 2**23 aligns the last bit of f32 to 1
    size = tl.abs(x)
    whole = (size + 8388608.0) - 8388608.0
    whole = tl.where(size < 8388608.0, whole, size)
    return tl.where(x < 0, -whole, whole)

@triton.jit
def bw_round_f64(x):
    size = tl.abs(x)
    whole = (size + 4503599627370496.0) - 4503599627370496.0
    whole = tl.where(size < 4503599627370496.0, whole, size)
    return tl.where(x < 0, -whole, whole)

@triton.jit
def bw_whole_small(x):
    # bw_round_small as i32, without a conversion: the sum's low bits are the whole number
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000

@triton.jit
def bw_round_small(x):
    # as bw_round for |x| < 2**22, without branches
    return (x + 12582912.0) - 12582912.0

@triton.jit
def bw_trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))

@triton.jit
def bw_expm1(x):
    # near 0 a Taylor polynomial of degree 8, whose relative error is below 1e-8 for |x| < 0.35
    p = 1.0 / 40320.0
    p = p * x + 1.0 / 5040.0
    p = p * x + 1.0 / 720.0
    p = p * x + 1.0 / 120.0
    p = p * x + 1.0 / 24.0
    p = p * x + 1.0 / 6.0
    p = p * x + 0.5
    near = x + x * x * p
    return tl.where(tl.abs(x) < 0.35, near, tl.exp(x) - 1.0)

@triton.jit
def bw_log1p(x):
    # log(1 + x) = x * log(u) / (u - 1) with u = 1 + x rounded (Kahan)
    u = 1.0 + x
    d = u - 1.0
    safe = tl.where(d == 0, 1.0, d)
    found = tl.log(u) * tl.div_rn(x, safe)
    found = tl.where(u == float("inf"), u, found)
    return tl.where(d == 0, x, found)

@triton.jit
def bw_tanh(x):
    size = tl.minimum(tl.abs(x), 20.0)
    e = bw_expm1(2.0 * size)
    y = tl.div_rn(e, e + 2.0)
    y = tl.where(x < 0, -y, y)
    return tl.where(x != x, x, y)

@triton.jit
def bw_exp2(x):
    # one instruction on a GPU; relative error 2**-22
    return tl.exp2(x)

@triton.jit
def bw_reciprocal(x):
    # relative error 2**-23; the twin of the form in _NATIVE
    return 1.0 / x

@triton.jit
def bw_sigmoid_short(x, alpha: tl.constexpr):
    # of alpha * x, with a relative error of 1e-6
    return bw_reciprocal(1.0 + bw_exp2(x * (-1.4426950408889634 * alpha)))

@triton.jit
def bw_tanh_short(x):
    # relative error of 5e-6: a Taylor polynomial near 0, where 1 - 2 / (exp(2x) + 1) cancels
    e = bw_exp2(x * 2.8853900817779268)
    far = tl.fma(bw_reciprocal(1.0 + e), tl.full([], -2.0, tl.float32), 1.0)
    z = x * x
    near = tl.fma(tl.fma(z, tl.full([], 2.0 / 15.0, tl.float32), -1.0 / 3.0) * z, x, x)
    return tl.where(tl.abs(x) < 0.15, near, far)

@triton.jit
def bw_gelu_tail(x, power, limit: tl.constexpr):
    # max(x, 0) - |x| * P(normal <= -|x|), the probability as 2**power. The sum of halves is
    # max(x, 0), and NaN at NaN and -inf, as in the formula.
    size = tl.abs(x)
    positive = tl.fma(size, tl.full([], 0.5, tl.float32), 0.5 * x)
    return tl.fma(-tl.minimum(size, limit), bw_exp2(power), positive)

@triton.jit
def bw_gelu(x):
    # power: a minimax polynomial of degree 9 on [0, 6]. Absolute error 2.4e-7, relative error
    # 4e-7 near 0 and 1e-5 where the result is at least 1e-4 (x/2 * (1 + erf) cancels there)
    a = tl.minimum(tl.abs(x), 6.0)
    p = tl.fma(a, tl.full([], 1.5898562821803353e-07, tl.float32), -3.828386070381384e-06)
    p = tl.fma(p, a, 3.656493208836764e-05)
    p = tl.fma(p, a, -0.00014637407730333507)
    p = tl.fma(p, a, -0.00027248813421465456)
    p = tl.fma(p, a, 0.007281622849404812)
    p = tl.fma(p, a, -0.0526740588247776)
    p = tl.fma(p, a, -0.4591398537158966)
    p = tl.fma(p, a, -1.1511149406433105)
    p = tl.fma(p, a, -0.9999997615814209)
    return bw_gelu_tail(x, p, 6.0)

@triton.jit
def bw_gelu_short(x):
    # degree 5 on [0, 5.5]: absolute error 5e-6, relative error 2e-4 where the result is at least
    # 1e-4, and 3e-5 near 0
    a = tl.minimum(tl.abs(x), 5.5)
    p = tl.fma(a, tl.full([], -0.0003881747543346137, tl.float32), 0.006453962530940771)
    p = tl.fma(p, a, -0.05023320019245148)
    p = tl.fma(p, a, -0.4615742564201355)
    p = tl.fma(p, a, -1.1502896547317505)
    p = tl.fma(p, a, -1.0000444650650024)
    return bw_gelu_tail(x, p, 5.5)

@triton.jit
def bw_sinh(x):
    size = tl.abs(x)
    e = bw_expm1(tl.minimum(size, 30.0))
    near = 0.5 * (e + tl.div_rn(e, e + 1.0))
    half = tl.exp(0.5 * size)
    y = tl.where(size < 30.0, near, 0.5 * half * half)
    y = tl.where(x < 0, -y, y)
    return tl.where(x != x, x, y)

@triton.jit
def bw_cosh(x):
    half = tl.exp(0.5 * tl.abs(x))
    e = half * half
    return tl.where(e > 1e30, 0.5 * half * half, 0.5 * e + tl.div_rn(0.5, e))

@triton.jit
def bw_tan(x):
    return tl.div_rn(tl.sin(x), tl.cos(x))

@triton.jit
def bw_atan(x):
    size = tl.abs(x)
    large = size > 2.414213562373095
    medium = (size > 0.4142135623730950) & (size <= 2.414213562373095)
    one = tl.where(large, -1.0, tl.where(medium, size - 1.0, size))
    two = tl.where(large, size, tl.where(medium, size + 1.0, 1.0))
    t = tl.div_rn(one, two)
    t = tl.where(size == float("inf"), 0.0, t)
    z = t * t
    p = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    y = p * z * t + t
    y = y + tl.where(large, 1.5707963267948966, tl.where(medium, 0.7853981633974483, 0.0))
    y = tl.where(x < 0, -y, y)
    return tl.where(x != x, x, y)

@triton.jit
def bw_asin(x):
    size = tl.abs(x)
    far = size > 0.5
    z = tl.where(far, 0.5 * (1.0 - size), x * x)
    s = tl.where(far, tl.sqrt_rn(tl.where(z < 0, float("nan"), z)), size)
    p = 4.2163199048e-2 * z + 2.4181311049e-2
    p = (p * z + 4.5470025998e-2) * z + 7.4953002686e-2
    p = (p * z + 1.6666752422e-1) * z * s + s
    y = tl.where(far, 1.5707963267948966 - 2.0 * p, p)
    return tl.where(x < 0, -y, y)

@triton.jit
def bw_acos(x):
    # for |x| > 0.5: 2 asin(sqrt((1 - |x|) / 2)), which keeps relative accuracy near 1
    size = tl.abs(x)
    z = 0.5 * (1.0 - size)
    half = 2.0 * bw_asin(tl.sqrt_rn(tl.where(z < 0, float("nan"), z)))
    far = tl.where(x < 0, 3.141592653589793 - half, half)
    return tl.where(size > 0.5, far, 1.5707963267948966 - bw_asin(x))

@triton.jit
def bw_asinh(x):
    size = tl.abs(x)
    square = size * size
    near = bw_log1p(size + tl.div_rn(square, 1.0 + tl.sqrt_rn(square + 1.0)))
    y = tl.where(size > 1e9, tl.log(size) + 0.6931471805599453, near)
    y = tl.where(x < 0, -y, y)
    return tl.where(x != x, x, y)

@triton.jit
def bw_acosh(x):
    t = x - 1.0
    inside = 2.0 * t + t * t
    near = bw_log1p(t + tl.sqrt_rn(tl.where(inside < 0, float("nan"), inside)))
    return tl.where(x > 1e9, tl.log(x) + 0.6931471805599453, near)

@triton.jit
def bw_atanh(x):
    size = tl.abs(x)
    y = 0.5 * bw_log1p(tl.div_rn(2.0 * size, 1.0 - size))
    y = tl.where(size > 1.0, float("nan"), y)
    return tl.where(x < 0, -y, y)

@triton.jit
def bw_pow(x, y):
    # exp(y * log|x|) in f64, so that the error of the exponent stays below that of f32
    size = tl.abs(x).to(tl.float64)
    wide = y.to(tl.float64)
    found = tl.exp(wide * tl.log(size)).to(tl.float32)
    whole = tl.floor(y)
    is_whole = (whole == y)
    is_odd = is_whole & (tl.floor(0.5 * y) * 2.0 != y)
    found = tl.where(size == 0, tl.where(y < 0, float("inf"), 0.0), found)
    found = tl.where((x < 0) & is_odd, -found, found)
    found = tl.where((x < 0) & (size != float("inf")) & (tl.abs(y) != float("inf")) & (whole != y),
    float("nan"), found)
    found = tl.where((size == 1) & (tl.abs(y) == float("inf")), 1.0, found)
    found = tl.where((x != x) | (y != y), float("nan"), found)
    return tl.where((y == 0) | (x == 1), 1.0, found)
"""

_NATIVE_SOURCES = """
@triton.jit
def bw_reciprocal(x):
    form: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(form, "=f,f", [x], tl.float32, True, 1)

@triton.jit
def bw_prefetch(address):
    # brings the lines of these addresses to the L2 cache
    form: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(form, "=r,l", [address.to(tl.int64)], tl.int32, False, 1)
"""
"""Forms on a GPU with inline PTX, which the interpreter has not; the others are their twins."""


def _functions(text: str) -> dict[str, str]:
    found = re.finditer(r"@triton\.jit\ndef (\w+)\(.*?(?=\n@triton|\Z)", text, re.DOTALL)
    return {match.group(1): match.group(0).strip() for match in found}


_FUNCTIONS = _functions(_SOURCES)
_NATIVE = _FUNCTIONS | _functions(_NATIVE_SOURCES)


def needed(text: str, native: bool = False) -> str:
    """The helpers that a text calls, in the order of their definitions."""
    functions = _NATIVE if native else _FUNCTIONS
    found: set[str] = set()
    left = [text]
    while left:
        for name in re.findall(r"\bbw_\w+(?=\()", left.pop()):
            if name in functions and name not in found:
                found.add(name)
                left.append(functions[name])
    return "\n\n".join(source for name, source in functions.items() if name in found)


def names() -> tuple[str, ...]:
    return tuple(_FUNCTIONS)
