"""Scales with few significant bits: results do not depend on the runtime's order of operations.

    y = (Σ q w) s_x s_w          bitwright: an integer sum times one factor
    y = Σ (q s_x) (w s_w)        a runtime that sums dequantized values in f32, in any order

Both are equal, and every partial sum is exact, if s_x is a power of two and Σ q w and s_w together
have at most the 24 bits of f32: s_w then has `SCALE_BITS`. Without this, a different summation
order can flip a rounding tie, and in a deep model one flipped value changes many others.

Scales of at most `FACTOR_BITS` make s_x s_w exact, so that s_x s_w / s_y is rounded once in any
order of evaluation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.arrays import Array

F32_BITS = 24
FACTOR_BITS = F32_BITS // 2
"""Two factors of this width have an exact product in f32."""
SUM_BITS = 18
"""Bits of an integer sum; sums of convolutions rarely exceed them."""
SCALE_BITS = F32_BITS - SUM_BITS


def rounded(x: Any, bits: int = FACTOR_BITS) -> Array:
    """x rounded to the nearest number with `bits` significant bits."""
    return _with_bits(x, bits, np.rint)


def rounded_up(x: Any, bits: int = FACTOR_BITS) -> Array:
    """Positive x rounded up to `bits` significant bits."""
    return _with_bits(x, bits, np.ceil)


def rounded_down(x: Any, bits: int = FACTOR_BITS) -> Array:
    """Positive x rounded down to `bits` significant bits."""
    return _with_bits(x, bits, np.floor)


def round_scales_for_sums(scales: Array, terms: int, limit: int) -> Array:
    """Weight scales rounded to `SCALE_BITS`, up or down by the lower estimated error.

    A lower scale has less rounding error, s² / 12 per term, but clips the largest weight.
    """
    low, high = rounded_down(scales, SCALE_BITS), rounded_up(scales, SCALE_BITS)
    lost = np.square(limit * (scales - low))
    return np.where(lost < terms * (np.square(high) - np.square(low)) / 12, low, high)


def nearest_power(x: Any) -> np.float32:
    """The nearest power of two of positive x, by ratio."""
    return np.float32(np.exp2(np.rint(np.log2(np.float64(x)))))


def _with_bits(x: Any, bits: int, to_whole: np.ufunc) -> Array:
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.asarray(np.ldexp(to_whole(np.ldexp(mantissa, bits)), exponent - bits))
