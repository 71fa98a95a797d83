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
def bw_tanh_fast(x):
    # 1 - 2 / (exp(2x) + 1): absolute error about 1e-7, for activations that are rounded afterwards
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)

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

@triton.jit
def bw_gelu_erf(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
"""

_FUNCTIONS = {
    match.group(1): match.group(0).strip()
    for match in re.finditer(r"@triton\.jit\ndef (\w+)\(.*?(?=\n@triton|\Z)", _SOURCES, re.DOTALL)
}


def needed(text: str) -> str:
    """The helpers that a text calls, in the order of their definitions."""
    found: set[str] = set()
    left = [text]
    while left:
        for name in re.findall(r"\bbw_\w+(?=\()", left.pop()):
            if name in _FUNCTIONS and name not in found:
                found.add(name)
                left.append(_FUNCTIONS[name])
    return "\n\n".join(source for name, source in _FUNCTIONS.items() if name in found)


def names() -> tuple[str, ...]:
    return tuple(_FUNCTIONS)
