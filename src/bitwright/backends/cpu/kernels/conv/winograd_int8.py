"""3×3 convolutions of codes with fewer products, exact in whole numbers.

    y = A [Σ_c (G w_c G') · (B d_c B')] A'                 as in `kernels.conv.winograd`

With the points 0, ±1, ±2 and infinity B is whole, and so is G once its rows are multiplied by s[i],
what they were divided by. With L a common multiple of all s,

    L² y = A" [Σ_c (s G w_c G' s') · (B d_c B')] A""       A"[k, i] = A[k, i] L / s[i]

is an equation of whole numbers, and holds modulo 2^32 whatever leaves 32 bits on the way. L² is
2^t r with an odd r, which has an inverse modulo 2^32; so y follows from a product and a shift to
the right, if |y| < 2^(31 - t). B d B' has at most 100 times the largest number: codes without
their zero point (`kernels.matmul.dot.int16_dot`) stay within 16 bits, and pairs of channels are one instruction.

    x          the image as 16-bit numbers, with so many zeros around it that every tile lies inside
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
from bitwright.backends.cpu.kernels.matmul.matmul import Tile
from bitwright.target import Target

Array = np.ndarray[Any, Any]
_POINTS = tuple(map(Fraction, (0, 1, -1, 2, -2)))
LARGEST = 255
"""A code without its zero point."""


@dataclass(frozen=True)
class CodeWinograd(Winograd):
    """Channels are whole blocks, columns whole vectors."""

    block: int = 0
    """Channels that a vector of 16-bit numbers holds."""
    pairs: Instr | None = None

    @property
    def depth(self) -> int:
        return self.channels

    @property
    def signature(self) -> Signature:
        sizes = ("images", "oh", "ow", "columns", "x_image", "x_line", "x_pixel", "y_stride")
        return Signature(("x", "w", "y", *self.epilogue.pointers), (*sizes, *self.epilogue.sizes))


@dataclass(frozen=True)
class WholeMaps:
    """The matrices, in whole numbers."""

    data: tuple[tuple[Fraction, ...], ...]
    filter: tuple[tuple[Fraction, ...], ...]
    back: tuple[tuple[Fraction, ...], ...]
    shift: int
    """t, and the inverse of r."""
    inverse: int


@cache
def whole_maps(results: int) -> WholeMaps:
    found: Matrices = matrices(results, TAPS, _POINTS)
    scales = [1 / row[0] for row in found.filter[:-1]] + [Fraction(1)]
    common = math.lcm(*(int(scale) for scale in scales))
    filters = [tuple(c * s for c in row) for row, s in zip(found.filter, scales, strict=True)]
    back = [tuple(c * common / s for c, s in zip(row, scales, strict=True)) for row in found.back]
    odd, shift = common**2, 0
    while odd % 2 == 0:
        odd, shift = odd // 2, shift + 1
    return WholeMaps(found.data, tuple(filters), tuple(back), shift, pow(odd, -1, 1 << 32))


def code_tile(target: Target, columns: int) -> Tile:
    """Sums, the panel, a product and a number that is spread fit the registers."""
    sums, lanes = 16 if target.vector_registers >= 32 else 8, target.lanes(32)
    vectors = 2 if columns % (2 * lanes) == 0 else 1
    return Tile(sums // vectors, vectors, lanes)


def code_block(target: Target, channels: int) -> int:
    """Channels of a vector: as many as a register holds, or half; 0 where they do not fit."""
    lanes = target.lanes(16)
    return next((size for size in (lanes, lanes // 2) if size > 1 and channels % size == 0), 0)


def code_scratch_bytes(results: int, tile: Tile, channels: int) -> int:
    """What one group of tiles takes of a thread's stack."""
    return (results + TAPS - 1) ** 2 * tile.rows * (channels * 2 + tile.columns * 4)


def transformed(weight: Array, results: int) -> Array | None:
    """w[out, in, 3, 3] as whole numbers [n, n, in, out]; None where 16 bits do not hold them."""
    matrix = np.array([[int(c) for c in row] for row in whole_maps(results).filter], np.int64)
    found = np.einsum("ij,ocjk,lk->ilco", matrix, weight.astype(np.int64), matrix)
    fits = found.min(initial=0) >= -(2**15) and found.max(initial=0) < 2**15
    return found.astype(np.int16) if fits else None


def is_exact(weight: Array, results: int) -> bool:
    """Whether no sum of products is too large to be found again."""
    largest = np.abs(weight.astype(np.int64)).sum(axis=(1, 2, 3)).max(initial=0) * LARGEST
    return bool(largest < 1 << (31 - whole_maps(results).shift))


def pack_code_filter(numbers: Array, tile: Tile) -> Array:
    lines, columns, *matrix = numbers.shape
    return pack_groups(numbers.reshape(lines * columns, *matrix), tile, 2)


def emit_code_winograd(module: Module, name: str, form: CodeWinograd) -> Signature:
    with module.kernel(name, form.signature) as f:
        _CodeEmitter(f, form).emit()
    return form.signature


class _CodeEmitter(Emitter):
    number, total = i16, i32
    form: CodeWinograd

    def prepare(self) -> None:
        maps = whole_maps(self.form.results)
        self.data = linear_map(maps.data, is_whole=True)
        self.back = linear_map(maps.back, is_whole=True)
        self.shift, self.inverse = maps.shift, maps.inverse
        self.block = self.form.block
        self.numbers = i16.vector(self.block)

    def _enter(self, number: Value, image: Value, line: Value, column: Value) -> None:
        f, form, rows = self.f, self.form, self.tile.rows
        by_line, by_pixel = f.args.size("x_line"), f.args.size("x_pixel")
        start = image * f.args.size("x_image") + line * by_line + column * by_pixel
        group, rank = self._rank(number)
        to = f.gep(i16, self.v, group * (form.positions * form.depth * rows) + rank * self.block)
        with f.loop(0, form.depth, self.block, nonempty=True) as blocks:
            x = f.gep(i16, f.args.pointer("x"), start + blocks.index)
            self._transform_qvalues(x, f.gep(i16, to, blocks.index * rows))

    def _transform_qvalues(self, x: Value, to: Value) -> None:
        """B d B' of one block of channels, each position to its own place."""
        f, width = self.f, self.form.width
        by_line, by_pixel = f.args.size("x_line"), f.args.size("x_pixel")
        lines = [f.gep(i16, x, by_line * line) for line in range(width)]
        halfway = [
            self.data.apply(f, [f.load(self.numbers, s, by_pixel * c, align=2) for s in lines])
            for c in range(width)
        ]
        apart = self.form.depth * self.tile.rows
        for line in range(width):
            row = self.data.apply(f, [column[line] for column in halfway])
            for column, value in enumerate(row):
                f.store(value, to, (line * width + column) * apart, align=2)

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

    def _add_pairs(self, height: int, numbers: Value, w: Value, totals: list[Value]) -> None:
        """Two channels of every tile, spread, times the panel's vectors."""
        f, tile, pairs = self.f, self.tile, self.form.pairs
        assert pairs is not None
        both = i16.vector(2 * self.lanes)
        panel = [f.load(both, w, v * both.lanes, align=2) for v in range(tile.vectors)]
        for row in range(height):
            pair = f.load(i32, f.gep(i16, numbers, row * self.block), align=2)
            number = f.bitcast(f.splat(pair, self.lanes), both)
            for v, part in enumerate(panel):
                at = row * tile.vectors + v
                totals[at] = totals[at] + pairs(f, number, part)

    def scaled(self, value: Value) -> Value:
        if self.inverse != 1:
            value = value * self.inverse
        return self.f.ashr(value, self.shift)

    def mask(self, column: Value) -> Value | None:
        return None
