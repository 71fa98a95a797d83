"""Quantizers of weights and activations in numpy, equal to the ops of the quantized graph.

weights      symmetric i8 in -127..127, one scale per output channel
activations  asymmetric u8, one scale for the tensor (static) or one per row (dynamic);
             symmetric activations are u8 with zero point 128 (i8 with zero point 0)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bitwright.ir.arrays import Array

WEIGHT_LIMIT = 127
LEVELS = 255
MIDDLE = 128


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
