"""Attention in 8-bit codes: what `attention(..., in_codes=True)` means.

    q, k      codes rint(x 127 / peak) of every row, peak the largest |x| of the row
    scores    f32(Σ q k) · (peak_q / 127 · scale) · (peak_k / 127)
    v         codes rint((v - mean) 2^j u), u = 127 / the largest peak of the head and j <= 10 the
              largest with 2^j peak <= that; mean of each feature over all keys, of a few bits
    weights   a = rint(2^14 e^(s - top)) and w = rint(a / 64) with s = score + bias - j ln 2 and
              top the largest s of the query + ln 256/255
    y         Σ w v / Σ a 2^j · (64 / u) + mean

The scale 2^-j of a row of v is part of its weight, so that keys with a large score and small
values take no codes from the others; weights too small for a code w are taken for those of average
values, and not lost.

All of it is the same numbers everywhere. Every step is one IEEE f32 operation, and sums are of
whole numbers, exact in any order as far as 2^24 goes. Two steps are not: e^x, for which there is
one polynomial (`backends.cpu.math.decay`, ONNX Runtime's), and the sum behind a mean, whose order
runtimes choose. So a mean is rounded to multiples of a tenth to a fifth of the head's largest,
where last bits hardly ever tell: what is taken off is put back, so that any number near it will do.

A peak below 2^-119 counts as zero, of a whole head of v below 2^-109; one that is not finite makes
its row, or for v its head, NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
STEPS = np.float32(127)
WEIGHT_BITS = 14
"""Of the numbers a; codes have eight of them."""
TO_CODES = np.float32(2.0 ** (8 - WEIGHT_BITS))
HEADROOM = np.float32(np.log(256 / 255))
"""Over the largest score, so that the largest weight is 255 and not 256."""
TINY = np.float32(2.0**-119)
"""A smaller peak has no finite number of codes to a unit."""
HALVINGS = np.arange(1, 11)
"""Powers j by which rows of v may be finer than the head's largest."""
FINER = np.float32(2.0) ** HALVINGS.astype(np.float32)
LOGS = (HALVINGS * np.log(2)).astype(np.float32)
FLAT = TINY * FINER[-1]
"""A head of smaller values has no codes."""
MEAN_ROUNDING = np.float32(1.5 * 2.0**20)
"""Adding so many times the largest mean, and taking it away again, leaves few bits of a mean."""
MOST_ADDED = np.float32(2.0**126)


def codes_of(x: Array) -> tuple[Array, Array]:
    """Codes and steps of rows."""
    values = x.astype(np.float32)
    peak = np.abs(values).max(axis=-1, keepdims=True, initial=0)
    with np.errstate(all="ignore"):
        inverse = np.where(peak < TINY, np.float32(0), STEPS / peak)
        step = np.where(np.isfinite(peak), peak / STEPS, np.float32(np.nan))
        return _whole(values * inverse), step


@dataclass(frozen=True)
class ValueCodes:
    codes: Array
    level: Array
    """j of each row"""
    unit: Array
    """u of each head"""
    mean: Array


def value_codes(v: Array) -> ValueCodes:
    values = v.astype(np.float32)
    with np.errstate(all="ignore"):
        mean = _rounded_mean(values)
        distance = values - mean
        peak = np.abs(distance).max(axis=-1, keepdims=True, initial=0)
        highest = peak.max(axis=-2, keepdims=True, initial=0)
        level = (peak <= highest / FINER).sum(axis=-1, keepdims=True)
        unit = np.where(highest < FLAT, np.float32(1), STEPS / highest)
        unit = np.where(np.isfinite(highest), unit, np.float32(np.nan))
        codes = _whole(distance * (np.ldexp(np.float32(1), level) * unit))
        return ValueCodes(codes, level, unit, mean)


def _rounded_mean(values: Array) -> Array:
    """The means of the features over all rows, added up from the first row on."""
    count = values.shape[-2]
    if not count:
        return np.zeros((*values.shape[:-2], 1, values.shape[-1]), np.float32)
    total = np.cumsum(values, axis=-2, dtype=np.float32)[..., -1:, :]
    mean = total / np.float32(count)
    largest = np.abs(mean).max(axis=-1, keepdims=True, initial=0)
    added = np.minimum(largest * MEAN_ROUNDING, MOST_ADDED)
    return np.asarray((mean + added) - added)


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
    coded = value_codes(v)
    logs = np.concatenate([np.zeros(1, np.float32), LOGS])[coded.level].swapaxes(-1, -2)
    with np.errstate(all="ignore"):
        total = scores.astype(np.float32) + bias.astype(np.float32) - logs
        top = total.max(axis=-1, keepdims=True, initial=-np.inf)
        shift = np.where(np.isneginf(top), np.float32(0), top + HEADROOM)
        fine = np.rint(np.ldexp(np.exp((total - shift).astype(np.float64)), WEIGHT_BITS))
    sums = np.matmul(fine, np.ldexp(1.0, coded.level))
    hidden = np.isneginf(bias.max(axis=-1, keepdims=True, initial=-np.inf))
    weights = np.where(np.isnan(fine), 0.0, np.rint(fine * TO_CODES))
    found = np.matmul(weights, coded.codes.astype(np.float64))
    y = found / np.where(sums == 0, 1.0, sums) / TO_CODES / coded.unit + coded.mean
    return np.asarray(np.where(hidden, 0.0, y))
