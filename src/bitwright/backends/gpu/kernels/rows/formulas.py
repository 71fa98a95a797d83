"""Formulas of row kernels: passes that reduce a row to numbers, and the result from them.

    layer_norm    mean of x; mean of (x - mean)^2         (x - mean) * rstd
    rms_norm      mean of x^2                             x * rstd
    softmax       max of x; sum of exp(x - max)           exp(x - max) / sum
    lp_norm       sum of |x|^p, p 1 or 2                  x / norm, 0 where norm is 0

    q8            max and min of v, with 0                scale, zero point, rint(v / scale) + zero
    f8            max of |v|                              scale, v / scale as float8

A pass is (reduction, value per element, number of masked elements, statements after it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.ir.dtype import DType, f64

TINY = 2.0**-126
QUOTIENT = (
    "inverse = tl.div_rn(tl.full([], 1.0, tl.float32), scale)",
    "if (tl.min(scale) > 1e-25) & (tl.max(scale) < 1e25):",
    "    near = v * inverse",  # two steps of Newton and Markstein round it correctly
    "    near = tl.fma(tl.fma(-near, scale, v), inverse, near)",
    "    ratio = tl.fma(tl.fma(-near, scale, v), inverse, near)",
    "else:",
    "    ratio = tl.div_rn(v, scale)",
)
"""Statements that make the IEEE quotient `ratio` of v and scale."""
NORMS = ("layer_norm", "rms_norm", "softmax", "log_softmax", "lp_norm")


@dataclass(frozen=True)
class Pass:
    reduction: str
    """sum or max."""
    value: str
    masked: str
    after: tuple[str, ...]
    """Statements on the row's `total`."""


@dataclass(frozen=True)
class Formula:
    passes: tuple[Pass, ...]
    result: str
    """The result per element, from x and the numbers of the row."""


def quotient(a: str, b: str, element: DType) -> str:
    """The IEEE quotient."""
    return f"{a} / {b}" if element == f64 else f"tl.div_rn({a}, {b})"


def norm_formula(op: str, number: float, element: DType) -> Formula:
    """`number` is eps, or p of lp_norm."""
    type_ = "tl.float64" if element == f64 else "tl.float32"
    sqrt = "tl.sqrt" if element == f64 else "tl.sqrt_rn"
    eps = f"tl.full([], {float(number)!r}, {type_})"
    mean = quotient("total", f"tl.full([], columns, {type_})", element)
    one = f"tl.full([], 1.0, {type_})"
    root = quotient(one, f"{sqrt}({mean} + {eps})", element)
    if op == "layer_norm":
        return Formula(
            (
                Pass("sum", "x", "0.0", (f"mean = {mean}",)),
                Pass("sum", "(x - mean) * (x - mean)", "0.0", (f"rstd = {root}",)),
            ),
            "(x - mean) * rstd",
        )
    if op == "rms_norm":
        return Formula((Pass("sum", "x * x", "0.0", (f"rstd = {root}",)),), "x * rstd")
    if op in ("softmax", "log_softmax"):
        passes = (
            Pass("max", "x", 'float("-inf")', ("top = total",)),
            Pass("sum", "tl.exp(x - top)", "0.0", ("norm = total",)),
        )
        is_log = op == "log_softmax"
        power = quotient("tl.exp(x - top)", "norm", element)
        return Formula(passes, "x - top - tl.log(norm)" if is_log else power)
    value, after = ("tl.abs(x)", "total") if number == 1 else ("x * x", f"{sqrt}(total)")
    safe = quotient("x", "tl.where(norm == 0, 1.0, norm)", element)
    result = f"tl.where(norm == 0, 0.0, {safe})"
    return Formula((Pass("sum", value, "0.0", (f"norm = {after}",)),), result)


def quantize_passes(to: DType) -> tuple[Pass, ...]:
    """The passes over v that give `scale`, and `zero` for integers."""
    if to.is_float:
        after = (
            f"peak = tl.where(total == 0, 1.0, tl.div_rn(total, tl.full([], {float(to.max)}, "
            "tl.float32)))",
            "scale = peak",
        )
        return (Pass("max", "tl.abs(v)", "0.0", after),)
    low, high = float(to.min), float(to.max)
    last = (
        "bottom = -total",
        f"span = tl.div_rn(highest - bottom, tl.full([], {high - low}, tl.float32))",
        "scale = tl.where(highest == bottom, 1.0, span)",
        f"point = {low} - tl.div_rn(bottom, scale)",
        f"zero = bw_round_small(tl.minimum(tl.maximum(point, {low}), {high}))",
    )
    return (
        Pass("max", "v", "0.0", ("highest = total",)),
        Pass("max", "-v", "0.0", last),
    )


def quantized_lines(to: DType, stored: DType, is_twin: bool) -> Sequence[str]:
    """Statements that make `q` from v, in its storage type; `zero` is moved into its range.

    A float8 is rounded from v (1 / scale). Integers are rounded from the IEEE quotient, as on the
    CPU; natively it takes five instructions.
    """
    if to.is_float:
        type_ = "tl.float8e4nv" if to.name == "f8e4m3fn" else "tl.float8e5"
        inverse = "tl.div_rn(tl.full([], 1.0, tl.float32), scale)"
        safe = f"tl.where(scale < {TINY!r}, 0.0, {inverse})"  # 0 for rows of subnormal numbers
        return (f"inverse = {safe}", f"q = (v * inverse).to({type_})")  # saturates
    low, high = float(to.min), float(to.max)
    type_ = "tl.int8" if stored.is_signed else "tl.uint8"
    quotient_lines = ["ratio = tl.div_rn(v, scale)"] if is_twin else QUOTIENT
    return (
        *quotient_lines,
        f"ratio = tl.where(ratio > {low} - zero, ratio, {low} - zero)",
        f"ratio = tl.where(ratio < {high} - zero, ratio, {high} - zero)",
        *([] if stored == to else [f"zero = zero + {float(stored.min) - low}"]),
        f"q = (bw_round_small(ratio).to(tl.int32) + zero.to(tl.int32)).to({type_})",
    )
