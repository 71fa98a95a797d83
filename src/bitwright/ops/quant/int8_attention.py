"""Attention in 8-bit codes: what `attention(..., int8=True)` means.

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

Where attention is causal, nothing of a later token may be in a query's result. There is no mean
then, u = 127 / the peak of the first key, m is of 2^-40 … 256, what is larger still is cut off, and
t = rint(a · 255 · 2^7) m: who has only rows with small m would find no whole parts of them.

All of it is the same numbers everywhere. Every step is one IEEE f32 operation, and sums are of
whole numbers (causal: of multiples of the smallest m), exact in any order as far as 2^24 of them
go: that of t for 514 keys of equal weight, or as many more as others are lighter. Two steps are
not: e^x, for which there is one polynomial (`codegen.math.exponential`, ONNX Runtime's), and
the sum behind a mean, whose order runtimes choose. So a mean is rounded to multiples of a tenth to
a fifth of the head's largest, where last bits hardly ever tell: what is taken off is put back, so
that any number near it will do.

A peak of q or k below 2^-119 counts as zero, and a largest peak of v below 2^-111 as 1. One that is
not finite makes its row, or for v its head, NaN; where attention is causal, those who see the key.
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
FLAT = np.float32(2.0**-111)
"""With a smaller peak, codes of finer rows to a unit would not be finite."""
MEAN_ROUNDING = np.float32(1.5 * 2.0**20)
"""Adding so many times the largest mean, and taking it away again, leaves few bits of a mean."""
MOST_ADDED = np.float32(2.0**126)


def qvalues_of(x: Array) -> tuple[Array, Array]:
    """Codes and steps of rows."""
    values = x.astype(np.float32)
    peak = np.abs(values).max(axis=-1, keepdims=True, initial=0)
    with np.errstate(all="ignore"):
        inverse = np.where(peak < TINY, np.float32(0), STEPS / peak)
        step = np.where(np.isfinite(peak), peak / STEPS, np.float32(np.nan))
        return _whole(values * inverse), step


@dataclass(frozen=True)
class QuantizedValues:
    qvalues: Array
    finer: Array
    """m of each row"""
    logs: Array
    """ln m"""
    unit: Array
    """u of each head"""
    mean: Array


def levels(causal: bool) -> tuple[Array, Array]:
    """Every m that a row of v may have, and ln m."""
    halves = np.ldexp([1, 1.5], np.arange(-8 if causal else 0, 8)[:, None]).reshape(-1)
    coarse = np.ldexp(1.0, np.arange(-40, -8)) if causal else np.zeros(0)
    found = np.concatenate([coarse, halves, [256.0]])
    return found.astype(np.float32), np.log(found).astype(np.float32)


def value_qvalues(v: Array, causal: bool) -> QuantizedValues:
    values = v.astype(np.float32)
    with np.errstate(all="ignore"):
        mean = _rounded_mean(values, causal)
        distance = values - mean
        peak = np.abs(distance).max(axis=-1, keepdims=True, initial=0)
        seen = peak[..., :1, :] if causal else peak
        largest = seen.max(axis=-2, keepdims=True, initial=0)
        largest = np.where(largest < FLAT, np.float32(1), largest)
        unit = np.where(np.isfinite(largest), STEPS / largest, np.float32(np.nan))
        table = levels(causal)
        level = (peak <= largest / table[0][1:]).sum(axis=-1, keepdims=True)
        finer, logs = (numbers[level] for numbers in table)
        qvalues = np.clip(_whole(distance * (finer * unit)), -127, 127)
        return QuantizedValues(qvalues, finer, logs, unit, mean)


def _rounded_mean(values: Array, causal: bool) -> Array:
    """The means of the features over all rows, added up from the first row on."""
    count = values.shape[-2]
    if not count or causal:
        return np.zeros((*values.shape[:-2], 1, values.shape[-1]), np.float32)
    total = np.cumsum(values, axis=-2, dtype=np.float32)[..., -1:, :]
    mean = total / np.float32(count)
    largest = np.abs(mean).max(axis=-1, keepdims=True, initial=0)
    added = np.minimum(largest * MEAN_ROUNDING, MOST_ADDED)
    return np.asarray((mean + added) - added)


def _whole(x: Array) -> Array:
    rounded = np.rint(x)
    return np.where(np.isfinite(rounded), rounded, 0).astype(np.int64)


def quantized_scores(q: Array, k: Array, scale: float) -> Array:
    """Scores of queries and keys, in f32."""
    q_qvalues, q_steps = qvalues_of(q)
    k_qvalues, k_steps = qvalues_of(k)
    sums = np.matmul(q_qvalues, k_qvalues.swapaxes(-1, -2)).astype(np.float32)
    return np.asarray(sums * k_steps.swapaxes(-1, -2) * (q_steps * np.float32(scale)))


def weighted_qvalues(scores: Array, bias: Array, v: Array, causal: bool) -> Array:
    """The values of all keys, each by its weight; zeros where the bias hides every key."""
    match_dequantize = value_qvalues(v, causal)
    finer = match_dequantize.finer.swapaxes(-1, -2)
    with np.errstate(all="ignore"):
        total = (
            scores.astype(np.float32)
            + bias.astype(np.float32)
            - match_dequantize.logs.swapaxes(-1, -2)
        )
        top = total.max(axis=-1, keepdims=True, initial=-np.inf)
        shift = np.where(np.isneginf(top), np.float32(0), top)
        power = np.exp((total - shift).astype(np.float64)).astype(np.float32)
        most = WEIGHT_STEPS * PARTS
        parts = np.rint(power * most) * finer if causal else np.rint(power * (finer * most))
    sums = parts.sum(axis=-1, keepdims=True, dtype=np.float64)
    hidden = np.isneginf(bias.max(axis=-1, keepdims=True, initial=-np.inf))
    weights = np.where(np.isnan(power), 0.0, np.rint(power * WEIGHT_STEPS))
    found = np.matmul(weights, match_dequantize.qvalues.astype(np.float64))
    y = (
        found / np.where(sums == 0, 1.0, sums) * PARTS / match_dequantize.unit
        + match_dequantize.mean
    )
    return np.asarray(np.where(hidden, 0.0, y))
