"""Attention in 8-bit codes: what `attention(..., in_codes=True)` means.

    q, k      codes rint(x 127 / peak) of every row, peak the largest |x| of the row
    scores    f32(Σ q k) · (peak_q / 127 · scale) · (peak_k / 127)
    v         codes rint((v - mean) m u), u = 127 / the largest peak of the head and m the largest
              of 1, 3/2, 2, 3, 4 … 256 with m peak <= that; mean of each feature over all keys, of
              a few bits
    weights   w = rint(255 a) and t = rint(a · 255 · 2^7 m) with a = e^(s - top), s = score + bias
              - ln m and top the largest s of the query
    y         Σ w v / Σ t · (2^7 / u) + mean

The scale 1 / m of a row of v is part of its weight, so that keys with a large score and small
values take no codes from the others; weights too small for a code w are taken for those of average
values, and not lost: the sum of all t has them.

All of it is the same numbers everywhere. Every step is one IEEE f32 operation, and sums are of
whole numbers, exact in any order as far as 2^24 goes: that of t for 514 keys of equal weight, or as
many more as others are lighter. Two steps are not: e^x, for which there is
one polynomial (`backends.cpu.math.decay`, ONNX Runtime's), and the sum behind a mean, whose order
runtimes choose. So a mean is rounded to multiples of a tenth to a fifth of the head's largest,
where last bits hardly ever tell: what is taken off is put back, so that any number near it will do.

A peak below 2^-119 counts as zero, of a whole head of v below 2^-111; one that is not finite makes
its row, or for v its head, NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
STEPS = np.float32(127)
WEIGHT_STEPS = np.float32(255)
PARTS = np.float32(2.0**7)
"""Of a step of a weight, in which all are added up."""
TINY = np.float32(2.0**-119)
"""A smaller peak has no finite number of codes to a unit."""
FINER = np.ldexp([1.5, 2], np.arange(8)[:, None]).reshape(-1).astype(np.float32)
"""Numbers m by which rows of v may be finer than the head's largest, besides 1."""
LOGS = np.log(FINER.astype(np.float64)).astype(np.float32)
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
    finer: Array
    """m of each row"""
    logs: Array
    """ln m"""
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
        finer, logs = np.append([[1], [0]], [FINER, LOGS], axis=1).astype(np.float32)[:, level]
        unit = np.where(highest < FLAT, np.float32(1), STEPS / highest)
        unit = np.where(np.isfinite(highest), unit, np.float32(np.nan))
        return ValueCodes(_whole(distance * (finer * unit)), finer, logs, unit, mean)


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
    with np.errstate(all="ignore"):
        total = scores.astype(np.float32) + bias.astype(np.float32) - coded.logs.swapaxes(-1, -2)
        top = total.max(axis=-1, keepdims=True, initial=-np.inf)
        shift = np.where(np.isneginf(top), np.float32(0), top)
        power = np.exp((total - shift).astype(np.float64)).astype(np.float32)
        parts = np.rint(power * (coded.finer * (WEIGHT_STEPS * PARTS)).swapaxes(-1, -2))
    sums = parts.sum(axis=-1, keepdims=True, dtype=np.float64)
    hidden = np.isneginf(bias.max(axis=-1, keepdims=True, initial=-np.inf))
    weights = np.where(np.isnan(power), 0.0, np.rint(power * WEIGHT_STEPS))
    found = np.matmul(weights, coded.codes.astype(np.float64))
    y = found / np.where(sums == 0, 1.0, sums) * PARTS / coded.unit + coded.mean
    return np.asarray(np.where(hidden, 0.0, y))
