"""Quantizes rows of weights into blocks of 32 (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) or as a whole (I8).

    w = scale * q + offset         offset 0, or one per block (Q4_1, Q5_1)

Scales are searched: several widths of the grid, each fitted by least squares to the values that it
gives, and the one with the least weighted square error is kept. Scales are rounded to f16 before
values are quantized, as files store them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.frontend.language.stored import ROW_FORMAT
from bitwright.ops.quant.block_formats import dequantize

Array = np.ndarray[Any, Any]
BLOCK = 32
_WIDTHS = (1.0, 1.05, 0.97, 0.94, 0.9, 0.86, 0.82, 0.77)
"""Widths of the searched grids, as parts of the range of the block."""
_TINY = np.float32(1e-30)
F16_MAX = np.float32(65504)


@dataclass(frozen=True)
class Grid:
    """Scale and offset of every block: f32[...], rounded to f16."""

    scale: Array
    offset: Array

    def quantize(self, w: Array, low: int, high: int) -> Array:
        """Values of the grid nearest to w[..., n]; scale and offset have one axis less."""
        scale: Array = self.scale[..., None]
        inverse = np.where(np.abs(scale) > _TINY, 1 / np.where(scale == 0, 1, scale), 0)
        return np.asarray(np.clip(np.rint((w - self.offset[..., None]) * inverse), low, high))

    def values(self, q: Array) -> Array:
        return np.asarray(q * self.scale[..., None] + self.offset[..., None])


@dataclass(frozen=True)
class BlockEncoder:
    """One format: the range of its values, and how blocks are packed."""

    name: str
    low: int
    high: int
    has_offset: bool
    pack: Callable[[Array, Array, Array], Array]
    """u8[n, bytes] of q[n, 32] with scale[n] and offset[n]."""
    bits: float = 0.0
    has_rows: bool = False
    """Whether a whole row shares a scale."""

    def size(self, columns: int) -> int:
        """The values that share a scale, in rows of this length."""
        return columns if self.has_rows else BLOCK

    def why_not(self, columns: int) -> str:
        """Why rows of this length cannot be encoded; empty if they can."""
        return f"its {columns} columns are no multiple of {BLOCK}" * bool(
            columns % self.size(columns)
        )

    def dequantize(self, packed: Array) -> Array:
        """The values of encoded rows, f32[rows, columns]."""
        if not self.has_rows:
            return dequantize(packed, self.name)
        q, scale = split_rows(packed)
        return q.astype(np.float32) * scale[:, None]

    def fit(self, w: Array, importance: Array | None = None) -> Grid:
        """The grid of each block w[..., 32]; `importance` weighs square errors."""
        w = np.asarray(w, np.float32)
        weight = np.ones_like(w) if importance is None else np.broadcast_to(importance, w.shape)
        weight = np.maximum(weight, _TINY)
        best, least = None, None
        for start in self._starts(w):
            grid = start
            for _ in range(2):  # values of the grid, then the grid of least squares for them
                grid = _rounded(self._least_squares(w, grid.quantize(w, *self.range), weight))
                q = grid.quantize(w, *self.range)
                error = (weight * (grid.values(q) - w) ** 2).sum(-1)
                if best is None or least is None:
                    best, least = grid, error
                    continue
                better = error < least
                best = Grid(
                    np.where(better, grid.scale, best.scale),
                    np.where(better, grid.offset, best.offset),
                )
                least = np.where(better, error, least)
        assert best is not None
        return best

    @property
    def range(self) -> tuple[int, int]:
        return self.low, self.high

    def _starts(self, w: Array) -> list[Grid]:
        zero = np.zeros(w.shape[:-1], np.float32)
        if self.has_offset:
            low, high = w.min(-1), w.max(-1)
            middle, half = (low + high) / 2, (high - low) / 2
            steps = self.high - self.low
            return [_rounded(Grid(2 * half * s / steps, middle - half * s)) for s in _WIDTHS]
        peak = np.take_along_axis(w, np.abs(w).argmax(-1)[..., None], -1)[..., 0]
        if self.high == -self.low:  # the same range on both sides
            return [_rounded(Grid(peak * s / self.high, zero)) for s in _WIDTHS]
        return [_rounded(Grid(peak * s / self.low, zero)) for s in _WIDTHS] + [
            _rounded(Grid(peak / self.high, zero))
        ]

    def _least_squares(self, w: Array, q: Array, weight: Array) -> Grid:
        """The scale and offset of least weighted square error for given values."""
        qq = (weight * q * q).sum(-1)
        wq = (weight * w * q).sum(-1)
        if not self.has_offset:
            return Grid(np.where(qq > 0, wq / np.maximum(qq, _TINY), 0), np.zeros_like(qq))
        total, sq, sw = weight.sum(-1), (weight * q).sum(-1), (weight * w).sum(-1)
        determinant = total * qq - sq * sq
        flat = determinant <= 1e-6 * total * qq
        safe = np.where(flat, 1, determinant)
        scale = np.where(flat, 0, (total * wq - sq * sw) / safe)
        return Grid(scale, (sw - scale * sq) / total)

    def encode(self, w: Array, importance: Array | None = None) -> Array:
        """u8[rows, bytes] of w[rows, columns]; `importance` [columns] weighs errors."""
        rows, columns = w.shape
        size = self.size(columns)
        blocks = np.asarray(w, np.float32).reshape(rows, columns // size, size)
        if importance is not None:
            importance = importance.reshape(columns // size, size)
        grid = self.fit(blocks, importance)
        return self.packed(grid.quantize(blocks, *self.range), grid)

    def packed(self, q: Array, grid: Grid) -> Array:
        """u8[rows, bytes] of values [rows, blocks, size]."""
        rows = q.shape[0]
        flat = q.reshape(-1, q.shape[-1])
        found = self.pack(flat, grid.scale.reshape(-1), grid.offset.reshape(-1))
        return np.ascontiguousarray(found.reshape(rows, -1))


def _rounded(grid: Grid) -> Grid:
    with np.errstate(over="ignore"):
        scale, offset = (
            np.clip(part, -F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)
            for part in (grid.scale, grid.offset)
        )
    return Grid(scale, offset)


def _half(values: Array) -> Array:
    return values.astype(np.float16)[:, None].view(np.uint8)


def _nibbles(q: Array) -> Array:
    return (q[:, :16] & 15) | ((q[:, 16:] & 15) << 4)


def _packed_rows(q: Array, scale: Array) -> Array:
    """Scales become positive, as integer products want them; a row of zeros has a small one."""
    signed = np.where(scale[:, None] < 0, -q, q) * (scale[:, None] != 0)
    positive = np.maximum(np.abs(scale), np.float32(2.0**-24))
    return np.hstack([signed.astype(np.int8).view(np.uint8), _half(positive)])


def split_rows(packed: Array) -> tuple[Array, Array]:
    """i8[rows, K] and f32[rows] of encoded rows: K bytes, then the scale in f16."""
    q = np.ascontiguousarray(packed[:, :-2]).view(np.int8)
    scale = np.ascontiguousarray(packed[:, -2:]).view(np.float16)[:, 0]
    return q, scale.astype(np.float32)


def _fifth(q: Array) -> Array:
    return np.packbits((q >> 4) & 1, axis=1, bitorder="little")


def _shifted(q: Array, by: int) -> Array:
    return (q + by).astype(np.uint8)


ENCODERS = {
    encoder.name: encoder
    for encoder in (
        BlockEncoder(
            "Q4_0", -8, 7, False,
            lambda q, d, m: np.hstack([_half(d), _nibbles(_shifted(q, 8))]), 4.5,
        ),
        BlockEncoder(
            "Q4_1", 0, 15, True,
            lambda q, d, m: np.hstack([_half(d), _half(m), _nibbles(_shifted(q, 0))]), 5.0,
        ),
        BlockEncoder(
            "Q5_0", -16, 15, False,
            lambda q, d, m: np.hstack(
                [_half(d), _fifth(_shifted(q, 16)), _nibbles(_shifted(q, 16))]
            ), 5.5,
        ),
        BlockEncoder(
            "Q5_1", 0, 31, True,
            lambda q, d, m: np.hstack(
                [_half(d), _half(m), _fifth(_shifted(q, 0)), _nibbles(_shifted(q, 0))]
            ), 6.0,
        ),
        BlockEncoder(
            "Q8_0", -127, 127, False,
            lambda q, d, m: np.hstack([_half(d), q.astype(np.int8).view(np.uint8)]), 8.5,
        ),
        BlockEncoder(
            ROW_FORMAT, -127, 127, False, lambda q, d, m: _packed_rows(q, d), 8.0, has_rows=True
        ),
    )
}  # fmt: skip
