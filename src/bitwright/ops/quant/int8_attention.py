"""Int8 attention: the semantics of `attention(..., int8=True)`.

    q, k      rint(x 127 / peak) per row, peak the largest |x| of the row
    scores    f32(Σ q k) · (peak_q / 127 · scale) · (peak_k / 127)
    v         rint((v - mean) m u), u = 127 / the largest peak of the head and m the largest
              of 1, 3/2, 2, 3, 4 … 256 with m peak <= that peak; mean of each feature over all
              keys, rounded to a few bits
    weights   w = rint(255 a) and t = rint(a · 255 · 2^7 m) with a = e^(s - top), s = score + bias
              - ln m and top the largest s of the query
    y         Σ w v / Σ t · (2^7 / u) + mean

The scale 1 / m of a row of v is part of its weight. Keys with a large score and small values thus
do not use up the range of the others. A weight that rounds to w = 0 still counts in the sum of t,
so it contributes the mean value.

Causal attention must not depend on later tokens. It has no mean, u = 127 / the peak of the first
key, and m is one of 2^-40 … 256; larger values are clipped. t = rint(a · 255 · 2^7) m, because with
m inside the rounding a query that sees only rows with small m would round every t to 0.

The result is the same on every runtime. Each step is one IEEE f32 operation, and sums add integers
(causal: multiples of the smallest m). They are exact in any order up to 2^24: for t that is 514
keys of equal weight, or more if some weigh less. Two steps are not exact: e^x, for which one
polynomial is fixed (`codegen.math.exponential`, ONNX Runtime's), and the sum of a mean, whose order
each runtime chooses. The mean is therefore rounded to multiples of a tenth to a fifth of the head's
largest mean, so its last bits rarely matter. Any value near the mean is correct, because what v
loses is added back to y.

A peak of q or k below 2^-119 counts as zero, and a largest peak of v below 2^-111 as 1. A peak that
is not finite makes its row NaN; for v, its head; for causal v, the queries that see the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
STEPS = np.float32(127)
WEIGHT_STEPS = np.float32(255)
PARTS = np.float32(2.0**7)
"""Fractional steps of a weight in the sum t."""
TINY = np.float32(2.0**-119)
"""127 / peak overflows f32 for smaller peaks."""
FLAT = np.float32(2.0**-111)
"""256 · 127 / peak overflows f32 for smaller peaks."""
MEAN_ROUNDING = np.float32(1.5 * 2.0**20)
"""Adding and subtracting this multiple of the largest mean rounds a mean to a few bits."""
MOST_ADDED = np.float32(2.0**126)


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """Rows quantized symmetrically to 8 bits, and the scale of each row."""
    values = x.astype(np.float32)
    peak = np.abs(values).max(axis=-1, keepdims=True, initial=0)
    with np.errstate(all="ignore"):
        inverse = np.where(peak < TINY, np.float32(0), STEPS / peak)
        scale = np.where(np.isfinite(peak), peak / STEPS, np.float32(np.nan))
        return _whole(values * inverse), scale


@dataclass(frozen=True)
class QuantizedValues:
    """The operand v, quantized."""

    qvalues: Array
    finer: Array
    """m of each row"""
    logs: Array
    """ln m"""
    unit: Array
    """u of each head"""
    mean: Array


def levels(causal: bool) -> tuple[Array, Array]:
    """Every m that a row of v can have, and ln m."""
    halves = np.ldexp([1, 1.5], np.arange(-8 if causal else 0, 8)[:, None]).reshape(-1)
    coarse = np.ldexp(1.0, np.arange(-40, -8)) if causal else np.zeros(0)
    found = np.concatenate([coarse, halves, [256.0]])
    return found.astype(np.float32), np.log(found).astype(np.float32)


def quantize_values(v: Array, causal: bool) -> QuantizedValues:
    """v quantized with m of each row, u of each head and the mean of each feature."""
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
    """The mean of each feature over all rows, summed in row order and rounded to a few bits."""
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
    q8, q_scale = quantize_rows(q)
    k8, k_scale = quantize_rows(k)
    sums = np.matmul(q8, k8.swapaxes(-1, -2)).astype(np.float32)
    return np.asarray(sums * k_scale.swapaxes(-1, -2) * (q_scale * np.float32(scale)))


def weighted_values(scores: Array, bias: Array, v: Array, causal: bool) -> Array:
    """softmax(scores + bias) @ v in int8; zeros where the bias masks every key."""
    values = quantize_values(v, causal)
    finer, logs = values.finer.swapaxes(-1, -2), values.logs.swapaxes(-1, -2)
    with np.errstate(all="ignore"):
        total = scores.astype(np.float32) + bias.astype(np.float32) - logs
        top = total.max(axis=-1, keepdims=True, initial=-np.inf)
        shift = np.where(np.isneginf(top), np.float32(0), top)
        power = np.exp((total - shift).astype(np.float64)).astype(np.float32)
        most = WEIGHT_STEPS * PARTS
        parts = np.rint(power * most) * finer if causal else np.rint(power * (finer * most))
    sums = parts.sum(axis=-1, keepdims=True, dtype=np.float64)
    masked = np.isneginf(bias.max(axis=-1, keepdims=True, initial=-np.inf))
    weights = np.where(np.isnan(power), 0.0, np.rint(power * WEIGHT_STEPS))
    found = np.matmul(weights, values.qvalues.astype(np.float64))
    y = found / np.where(sums == 0, 1.0, sums) * PARTS / values.unit + values.mean
    return np.asarray(np.where(masked, 0.0, y))
