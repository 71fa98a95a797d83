"""Exact Winograd convolution of 8-bit values in integer arithmetic.

    y = A [Σ_c (G w_c G') · (B d_c B')] A'                 as in `kernels.conv.winograd`

With the points 0, ±1, ±2 and infinity B is integer, and so is G with its rows multiplied by their
denominators s[i]. With L a common multiple of all s,

    L² y = A" [Σ_c (s G w_c G' s') · (B d_c B')] A""       A"[k, i] = A[k, i] L / s[i]

is an equation of integers, which holds modulo 2^32 even if intermediate values overflow 32 bits. L²
is 2^t r with an odd r, which has an inverse modulo 2^32; so y follows from a product and a right
shift if |y| < 2^(31 - t). B d B' is at most 100 times the largest input: values minus their zero
points (`kernels.matmul.dot.int16_dot`) stay within 16 bits, and one instruction multiplies pairs of
channels.

    x          the image in 16 bits, padded with zeros so that every tile is inside
    w          [out / columns][position][in / 2][columns][2]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Module, Signature, Value, i16, i32
from bitwright.backends.cpu.codegen.instr import Instr
from bitwright.backends.cpu.kernels.conv.toom_cook import Matrices, linear_map, matrices
from bitwright.backends.cpu.kernels.conv.winograd import TAPS, Emitter, Winograd
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import pack_groups
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.target import Target

Array = np.ndarray[Any, Any]
_POINTS = tuple(map(Fraction, (0, 1, -1, 2, -2)))
LARGEST = 255
"""The largest magnitude of an 8-bit value minus its zero point."""


@dataclass(frozen=True)
class Int8Winograd(Winograd):
    """Channels are a multiple of the block, columns of the vector."""

    block: int = 0
    """Channels of a vector of 16-bit elements."""
    pairs: Instr | None = None

    @property
    def depth(self) -> int:
        return self.channels

    @property
    def signature(self) -> Signature:
        sizes = ("images", "oh", "ow", "columns", "x_image", "x_line", "x_pixel", "y_stride")
        return Signature(("x", "w", "y", *self.epilogue.pointers), (*sizes, *self.epilogue.sizes))


@dataclass(frozen=True)
class IntegerMaps:
    """The matrices in integers."""

    data: tuple[tuple[Fraction, ...], ...]
    filter: tuple[tuple[Fraction, ...], ...]
    back: tuple[tuple[Fraction, ...], ...]
    shift: int
    """t, and the inverse of r."""
    inverse: int


@cache
def integer_maps(results: int) -> IntegerMaps:
    found: Matrices = matrices(results, TAPS, _POINTS)
    scales = [1 / row[0] for row in found.filter[:-1]] + [Fraction(1)]
    common = math.lcm(*(int(scale) for scale in scales))
    filters = [tuple(c * s for c in row) for row, s in zip(found.filter, scales, strict=True)]
    back = [tuple(c * common / s for c, s in zip(row, scales, strict=True)) for row in found.back]
    odd, shift = common**2, 0
    while odd % 2 == 0:
        odd, shift = odd // 2, shift + 1
    return IntegerMaps(found.data, tuple(filters), tuple(back), shift, pow(odd, -1, 1 << 32))


def int8_winograd_tile(target: Target, columns: int) -> Tile:
    """The register tile: sums, the panel, a product and a broadcast element fit the registers."""
    sums, lanes = 16 if target.vector_registers >= 32 else 8, target.lanes(32)
    vectors = 2 if columns % (2 * lanes) == 0 else 1
    return Tile(sums // vectors, vectors, lanes)


def channel_block(target: Target, channels: int) -> int:
    """Channels of a vector: a full register or half of one; 0 where neither divides the
    channels."""
    lanes = target.lanes(16)
    return next((size for size in (lanes, lanes // 2) if size > 1 and channels % size == 0), 0)


def int8_scratch_bytes(results: int, tile: Tile, channels: int) -> int:
    """Bytes of a thread's stack per group of tiles."""
    return (results + TAPS - 1) ** 2 * tile.rows * (channels * 2 + tile.columns * 4)


def transformed(weight: Array, results: int) -> Array | None:
    """Transforms w[out, in, 3, 3] to integers [n, n, in, out]; None where they exceed 16 bits."""
    matrix = np.array([[int(c) for c in row] for row in integer_maps(results).filter], np.int64)
    found = np.einsum("ij,ocjk,lk->ilco", matrix, weight.astype(np.int64), matrix)
    fits = found.min(initial=0) >= -(2**15) and found.max(initial=0) < 2**15
    return found.astype(np.int16) if fits else None


def is_exact(weight: Array, results: int) -> bool:
    """Whether every result is small enough to be recovered exactly."""
    largest = np.abs(weight.astype(np.int64)).sum(axis=(1, 2, 3)).max(initial=0) * LARGEST
    return bool(largest < 1 << (31 - integer_maps(results).shift))


def pack_int8_filter(weights: Array, tile: Tile) -> Array:
    lines, columns, *matrix = weights.shape
    return pack_groups(weights.reshape(lines * columns, *matrix), tile, 2)


def emit_int8_winograd(module: Module, name: str, form: Int8Winograd) -> Signature:
    with module.kernel(name, form.signature) as f:
        _Int8Emitter(f, form).emit()
    return form.signature


class _Int8Emitter(Emitter):
    operand, total = i16, i32
    form: Int8Winograd

    def prepare(self) -> None:
        maps = integer_maps(self.form.results)
        self.data = linear_map(maps.data, is_whole=True)
        self.back = linear_map(maps.back, is_whole=True)
        self.shift, self.inverse = maps.shift, maps.inverse
        self.block = self.form.block
        self.data_vector = i16.vector(self.block)

    def _transform_tile(self, number: Value, image: Value, line: Value, column: Value) -> None:
        f, form, rows = self.f, self.form, self.tile.rows
        by_line, by_pixel = f.args.size("x_line"), f.args.size("x_pixel")
        start = image * f.args.size("x_image") + line * by_line + column * by_pixel
        group, rank = self._rank(number)
        to = f.gep(i16, self.v, group * (form.positions * form.depth * rows) + rank * self.block)
        with f.loop(0, form.depth, self.block, nonempty=True) as blocks:
            x = f.gep(i16, f.args.pointer("x"), start + blocks.index)
            self._transform_int16(x, f.gep(i16, to, blocks.index * rows))

    def _transform_int16(self, x: Value, to: Value) -> None:
        """Stores B d B' of one block of channels, by position."""
        f, width = self.f, self.form.width
        by_line, by_pixel = f.args.size("x_line"), f.args.size("x_pixel")
        lines = [f.gep(i16, x, by_line * line) for line in range(width)]
        halfway = [
            self.data.apply(f, [f.load(self.data_vector, s, by_pixel * c, align=2) for s in lines])
            for c in range(width)
        ]
        stride = self.form.depth * self.tile.rows
        for line in range(width):
            row = self.data.apply(f, [column[line] for column in halfway])
            for column, value in enumerate(row):
                f.store(value, to, (line * width + column) * stride, align=2)

    def _product(self, height: int, v: Value, w: Value, sums: Value) -> None:
        f, form, tile, block = self.f, self.form, self.tile, self.block
        zeros = [f.const(self.vector, 0)] * (height * tile.vectors)
        with f.loop(0, form.depth, block, carry=(w, *zeros), nonempty=True) as blocks:
            start = f.gep(i16, v, blocks.index * tile.rows)
            with f.loop(0, block, 4, carry=blocks.carried, nonempty=True) as loop:
                w, *totals = loop.carried
                for step in (0, 2):
                    self._add_pairs(height, f.gep(i16, start, loop.index + step), w, totals)
                    w = f.gep(i16, w, 2 * tile.columns)
                loop.next(w, *totals)
            blocks.next(*loop.results)
        for number, total in enumerate(blocks.results[1:]):
            f.store(total, sums, number * self.lanes, align=self.align)

    def _add_pairs(self, height: int, data: Value, w: Value, totals: list[Value]) -> None:
        """Adds the products of two channels of every tile, broadcast, and the vectors of the
        panel."""
        f, tile, pairs = self.f, self.tile, self.form.pairs
        assert pairs is not None
        both = i16.vector(2 * self.lanes)
        panel = [f.load(both, w, v * both.lanes, align=2) for v in range(tile.vectors)]
        for row in range(height):
            pair = f.load(i32, f.gep(i16, data, row * self.block), align=2)
            lhs = f.bitcast(f.splat(pair, self.lanes), both)
            for v, part in enumerate(panel):
                at = row * tile.vectors + v
                totals[at] = totals[at] + pairs(f, lhs, part)

    def scaled(self, value: Value) -> Value:
        if self.inverse != 1:
            value = value * self.inverse
        return self.f.ashr(value, self.shift)

    def mask(self, column: Value) -> Value | None:
        return None
