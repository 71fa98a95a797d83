"""Quantizers of weights and activations in numpy, equal to the ops of the quantized graph.

weights      symmetric i8 in -127..127, one scale per output channel
activations  asymmetric u8, one scale for the tensor (static) or one per row (dynamic);
             symmetric activations are u8 with zero point 128 (i8 with zero point 0)
f8           activations and weights in f8e4m3fn without zero points
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from bitwright.ir.arrays import Array

WEIGHT_LIMIT = 127
LEVELS = 255
MIDDLE = 128
F8_LIMIT = np.float32(448)
F8_HEADROOM = 2.0
"""A static f8 range holds this multiple of the largest calibrated value. A float type loses no
precision by it, except near its smallest numbers."""


class Range(NamedTuple):
    """Scale and zero point of a static u8 activation."""

    scale: np.float32
    zero_point: int

    @classmethod
    def over(cls, low: float, high: float) -> Range:
        """The asymmetric range of [low, high], widened to contain 0."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = np.float32((high - low) / LEVELS)
        if not np.isfinite(scale) or scale < np.finfo(np.float32).tiny:
            return cls(np.float32(1), 0)
        return cls(scale, int(np.clip(np.rint(-low / scale), 0, LEVELS)))

    @classmethod
    def around_zero(cls, low: float, high: float) -> Range:
        """The symmetric range of [low, high]: i8 with zero point 0, shifted by 128."""
        scale = np.float32(max(-low, high, 0.0) / (LEVELS // 2))
        if not np.isfinite(scale) or scale < np.finfo(np.float32).tiny:
            scale = np.float32(1)
        return cls(scale, MIDDLE)

    def round_trip(self, x: Array) -> Array:
        qvalues = np.rint(x / self.scale)
        qvalues += self.zero_point
        np.clip(qvalues, 0, LEVELS, out=qvalues)
        qvalues -= self.zero_point
        qvalues *= self.scale
        return qvalues

    @property
    def bounds(self) -> tuple[float, float]:
        """The real numbers that the lowest and the highest quantized value stand for."""
        scale = float(self.scale)
        return -self.zero_point * scale, (LEVELS - self.zero_point) * scale


class F8Range(NamedTuple):
    """Scale of a static f8e4m3fn activation."""

    scale: np.float32
    zero_point: int = 0

    @classmethod
    def over(cls, low: float, high: float) -> F8Range:
        scale = np.float32(max(-low, high, 0.0) * F8_HEADROOM / F8_LIMIT)
        if not np.isfinite(scale) or scale < np.finfo(np.float32).tiny:
            scale = np.float32(1)
        return cls(scale)

    def round_trip(self, x: Array) -> Array:
        return np.asarray(f8_values(x / self.scale) * self.scale)

    @property
    def bounds(self) -> tuple[float, float]:
        largest = float(F8_LIMIT) * float(self.scale)
        return -largest, largest


def f8_values(x: Array) -> Array:
    """x rounded to f8e4m3fn, as f32; values out of range saturate."""
    bounded = np.clip(x, -F8_LIMIT, F8_LIMIT)
    return np.asarray(bounded.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def f8_rows_round_trip(x: Array) -> Array:
    """Quantize to f8e4m3fn and dequantize, with one scale per row of the last axis."""
    peak = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.where(peak == 0, np.float32(1), peak / F8_LIMIT)
    return np.asarray(f8_values(x / scale) * scale)


def f8_weights_round_trip(matrix: Array) -> Array:
    """Weights rounded to f8e4m3fn with one scale per column."""
    scales = weight_scales(matrix, float(F8_LIMIT))
    return np.asarray(f8_values(matrix / scales) * scales)


def rows_round_trip(x: Array) -> Array:
    """Quantize and dequantize with one range per row of the last axis."""
    low = np.minimum(x.min(axis=-1, keepdims=True), 0)
    high = np.maximum(x.max(axis=-1, keepdims=True), 0)
    scale = np.where(high == low, np.float32(1), (high - low) / np.float32(LEVELS))
    zero = np.rint(-low / scale)
    return np.asarray((np.clip(np.rint(x / scale) + zero, 0, LEVELS) - zero) * scale)


def weight_scales(matrix: Array, limit: float = WEIGHT_LIMIT, block: int = 0) -> Array:
    """Scales [..., columns, blocks] that map the largest weight of each block to `limit`.

    Block 0 means all terms of a column.
    """
    if block:
        starts = list(range(0, matrix.shape[-1], block))
        peaks = np.maximum.reduceat(np.abs(matrix), starts, axis=-1)
    else:
        highest = matrix.max(axis=-1, keepdims=True, initial=0)
        peaks = np.maximum(highest, -matrix.min(axis=-1, keepdims=True, initial=0))
    scales = (peaks / limit).astype(np.float32)
    return np.where(scales < np.finfo(np.float32).tiny, np.float32(1), scales)


def weight_qvalues(
    matrix: Array, scales: Array, highest: int = WEIGHT_LIMIT, lowest: int | None = None
) -> Array:
    """Nearest integers, as floats, within [lowest, highest]; `lowest` defaults to -highest."""
    qvalues = np.divide(matrix, scales)
    np.rint(qvalues, out=qvalues)
    return np.clip(qvalues, -highest if lowest is None else lowest, highest, out=qvalues)


def decibels(error: float) -> float:
    """The signal-to-noise ratio in dB of a relative squared error."""
    return float(-10 * np.log10(max(error, 1e-20)))
