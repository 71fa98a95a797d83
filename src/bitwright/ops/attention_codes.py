"""Attention in 8-bit codes: what `attention(..., in_codes=True)` means.

    q, k      codes rint(x 127 / peak) of every row, peak the largest |x| of the row
    scores    f32(Σ q k) · (peak_q / 127 · scale) · (peak_k / 127)
    v         codes rint((v - mean) u) of every row, u = 127 / peak of that row, mean that of each
              feature over all keys
    weights   w = 255 e^(s - top) with s = score - ln u and top the largest s of the query
    y         Σ rint(w) v / Σ w u + mean

The scale 1 / u of a row of v is part of its weight, so that keys with a large score and small
values take no codes from the others; weights too small for a code are taken for those of average
values, and not lost. No row of v has a peak below 2^-10 of the head's largest.

Means (added up from the first key on), peaks and codes of q, k and v are IEEE f32 operations on
every machine, sums of products exact integers. Scores and e^x are f32 numbers that may differ in
their last bits, and by them a weight by one of its 255 steps. A peak below 2^-119 counts as zero;
one that is not finite makes its row, or for v its head, NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
STEPS = np.float32(127)
WEIGHT_STEPS = 255.0
TINY = np.float32(2.0**-119)
"""A smaller peak has no finite number of codes to a unit."""
LEAST_PEAK = np.float32(2.0**-10)
"""Of a row of v, relative to the head's largest."""


def codes_of(x: Array) -> tuple[Array, Array]:
    """Codes and steps of rows."""
    values = x.astype(np.float32)
    peak = np.abs(values).max(axis=-1, keepdims=True, initial=0)
    with np.errstate(all="ignore"):
        inverse = np.where(peak < TINY, np.float32(0), STEPS / peak)
        step = np.where(np.isfinite(peak), peak / STEPS, np.float32(np.nan))
        return _whole(values * inverse), step


def value_codes(v: Array) -> tuple[Array, Array, Array]:
    """Codes, codes to a unit of each row, and the means of the features."""
    values = v.astype(np.float32)
    count = v.shape[-2]
    mean = np.zeros((*v.shape[:-2], 1, v.shape[-1]), np.float32)
    with np.errstate(all="ignore"):
        if count:
            total = np.cumsum(values, axis=-2, dtype=np.float32)[..., -1:, :]
            mean = total / np.float32(count)
        distance = values - mean
        peak = np.abs(distance).max(axis=-1, keepdims=True, initial=0)
        highest = peak.max(axis=-2, keepdims=True, initial=0)
        inverse = STEPS / np.maximum(peak, highest * LEAST_PEAK)
        inverse = np.where(highest < TINY, np.float32(1), inverse)
        inverse = np.where(np.isfinite(highest), inverse, np.float32(np.nan))
        return _whole(distance * inverse), inverse, mean


def _whole(x: Array) -> Array:
    rounded = np.rint(x)
    return np.where(np.isfinite(rounded), rounded, 0).astype(np.int64)


def coded_scores(q: Array, k: Array, scale: float) -> Array:
    """Scores of queries and keys, in f32."""
    q_codes, q_steps = codes_of(q)
    k_codes, k_steps = codes_of(k)
    sums = np.matmul(q_codes, k_codes.swapaxes(-1, -2)).astype(np.float32)
    return np.asarray(sums * k_steps.swapaxes(-1, -2) * (q_steps * np.float32(scale)))


def weighted_codes(scores: Array, bias: Array, v: Array) -> Array:
    """The values of all keys, each by its weight; zeros where the bias hides every key."""
    codes, inverse, mean = value_codes(v)
    units = inverse.astype(np.float64).swapaxes(-1, -2)
    total = scores.astype(np.float64) + bias - np.log(units)
    top = total.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = WEIGHT_STEPS * np.exp(total - np.where(np.isneginf(top), 0.0, top))
    sums = (weights * units).sum(axis=-1, keepdims=True)
    hidden = np.isneginf(bias.max(axis=-1, keepdims=True, initial=-np.inf))
    rounded = np.where(np.isnan(weights), 0.0, np.rint(weights))
    y = np.matmul(rounded, codes.astype(np.float64)) / np.where(sums == 0, 1.0, sums) + mean
    return np.asarray(np.where(hidden, 0.0, y))
