"""Scales of few bits: what is computed with them does not depend on who computes it.

    y = (Σ q w) s_x s_w          here: a sum of whole numbers, times one factor
    y = Σ (q s_x) (w s_w)        a runtime that sums dequantized numbers in f32, in its own order

The two are the same number, and every partial sum is exact, if s_x is a power of two and Σ q w and
s_w have at most the 24 bits of f32 together: s_w then has `SCALE_BITS`. A code never falls to the
other side of a tie because somebody added up in another order; in a deep model one such code is
followed by many.

Scales of at most `FACTOR_BITS` make s_x s_w exact, so that s_x s_w / s_y is rounded once, in
whatever order it is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
F32_BITS = 24
FACTOR_BITS = F32_BITS // 2
"""Two numbers of so many bits have an exact product in f32."""
SUM_BITS = 18
"""Of a sum of products of codes; those of a convolution are hardly ever larger."""
SCALE_BITS = F32_BITS - SUM_BITS


def rounded(x: Any, bits: int = FACTOR_BITS) -> Array:
    """The nearest numbers with so many significant bits."""
    return _with_bits(x, bits, np.rint)


def rounded_up(x: Any, bits: int = FACTOR_BITS) -> Array:
    """The least numbers of so many bits that are not below positive ones."""
    return _with_bits(x, bits, np.ceil)


def rounded_down(x: Any, bits: int = FACTOR_BITS) -> Array:
    """The largest numbers of so many bits that are not above positive ones."""
    return _with_bits(x, bits, np.floor)


def round_scales_for_sums(scales: Array, terms: int, limit: int) -> Array:
    """Scales of weights, of `SCALE_BITS`, each next to the one that gives the largest code `limit`.

    A lower one makes less rounding error, s² / 12 for each of the terms, but cuts the largest off.
    """
    low, high = rounded_down(scales, SCALE_BITS), rounded_up(scales, SCALE_BITS)
    lost = np.square(limit * (scales - low))
    return np.where(lost < terms * (np.square(high) - np.square(low)) / 12, low, high)


def nearest_power(x: Any) -> np.float32:
    """The power of two next to a positive number, by ratio."""
    return np.float32(np.exp2(np.rint(np.log2(np.float64(x)))))


def _with_bits(x: Any, bits: int, to_whole: np.ufunc) -> Array:
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.asarray(np.ldexp(to_whole(np.ldexp(mantissa, bits)), exponent - bits))
