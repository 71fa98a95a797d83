"""Products in two-dimensional registers (AMX): of halves summed in f32, of 8-bit codes in i32.

A tile register holds 16 rows of 64 bytes. One instruction adds to a tile of 16 × 16 sums the
product of 16 rows of 32 bf16 with 32 rows of 16, which a panel holds as pairs, [k / 2][16][2]; of
codes it takes twice as many, as fours. A product goes in blocks of 32 × 32 sums, four tiles, so
that every tile of numbers is used twice:

    c00 += a0 b0    c01 += a0 b1        a0, a1   rows 0 to 15 and 16 to 31 of a
    c10 += a1 b0    c11 += a1 b1        b0, b1   columns 0 to 15 and 16 to 31 of the panel

Where the rows of a tile lie equally far apart (those of a matrix, the pixels of a line) and all
rows of the block exist, tiles are loaded where the numbers lie; else a step's numbers are copied
side by side first, zeros behind the end of k. The sums go through a scratch to the epilogue, row by
row.

A process must ask the operating system before it uses tiles (`system.allow_tiles`); `target.host`
does, and names the feature only where that was granted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, bf16, i16
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import BYTES, ROWS, SIZE, Tiles
from bitwright.backends.cpu.kernels.matmul.dot.half_dot import HalfSums
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot
from bitwright.backends.cpu.kernels.matmul.matmul import Tile
from bitwright.target import Target

Array = np.ndarray[Any, Any]
BLOCK = Tile(SIZE, 2, ROWS)
STEP_CYCLES, REST_CYCLES, BLOCK_CYCLES = 250, 400, 250
"""What a step of a block of tiles takes, one that ends a run and is copied, and the block beside
them, as measured (where a step of dots takes `step_cycles`)."""
_amx = Type("x86_amx", "x86amx", 8192, False, False)


class Amx:
    """LLVM chooses the registers, and configures them where a function begins."""

    def __repr__(self) -> str:
        return self.instruction

    def __init__(self, instruction: str) -> None:
        self.instruction = instruction

    def _shape(self, f: Kernel, count: int) -> list[Value]:
        return [f.const(i16, size) for size in (ROWS, BYTES, BYTES)[:count]]

    def zeros(self, f: Kernel) -> list[Value]:
        return [f.intrinsic("llvm.x86.tilezero.internal", _amx, *self._shape(f, 2))]

    def sums(self, f: Kernel, pointer: Value, stride: Value) -> list[Value]:
        return [self.read(f, pointer, stride)]

    def read(self, f: Kernel, pointer: Value, stride: Value) -> Value:
        name = "llvm.x86.tileloadd64.internal"
        return f.intrinsic(name, _amx, *self._shape(f, 2), pointer, stride)

    def dot(self, f: Kernel, total: list[Value], a: Any, b: Any) -> list[Value]:
        name = f"llvm.x86.{self.instruction}.internal"
        return [f.intrinsic(name, _amx, *self._shape(f, 3), *total, a, b)]

    def write(self, f: Kernel, total: list[Value], pointer: Value, stride: Value) -> None:
        name = "llvm.x86.tilestored64.internal"
        f.intrinsic_void(name, *self._shape(f, 2), pointer, stride, *total)


@dataclass(frozen=True)
class TileDots(HalfSums):
    """A step takes 32 bf16 of every row, and of every column of the panel."""

    tiles: Tiles
    element, unit, group, has_rest, widens = bf16, bf16.vector(32), 32, False, False

    def __repr__(self) -> str:
        return f"TileDots({self.tiles!r})"


@dataclass(frozen=True)
class SplitDots(TileDots):
    """f16 as sums of two bf16: x = high + low exactly, high the nearest bf16 and low the rest.

        x w  =  high_x high_w + low_x high_w + high_x low_w        less low_x low_w < 2^-16 |x w|

    Rows lie in three planes (`kernels.matmul.dot.split_half_dot`): high, low, and high once more, where 0 stands
    for what is not finite, which then meets no zero of low_w. Weights are finite.
    """

    unit = bf16.vector(64)
    parts = ((0, 0), (1, 0), (2, 1))

    def __repr__(self) -> str:
        return f"SplitDots({self.tiles!r})"


@dataclass(frozen=True)
class AmxInt8(Int8Dot):
    """A step takes 64 codes; there are instructions for both signs of a's."""

    tiles: Tiles | None = None
    group = 64

    def __repr__(self) -> str:
        return f"TileCodes({self.tiles!r}, {self.form})"


def tile_dots(target: Target) -> TileDots | None:
    return TileDots(Amx("tdpbf16ps")) if target.has("amx-tile", "amx-bf16") else None


def split_dots(target: Target) -> SplitDots | None:
    return SplitDots(Amx("tdpbf16ps")) if target.has("amx-tile", "amx-bf16") else None


def tile_qvalues(target: Target, signed: bool, offset: bool) -> AmxInt8 | None:
    """For weights whose zero point is 0."""
    if not target.has("amx-tile", "amx-int8"):
        return None
    return AmxInt8(signed, False, 0, offset, Amx("tdpbssd" if signed else "tdpbusd"))


def block_cycles(run: int, lines: int, group: int) -> int:
    """Cycles of a block of an image's windows, which are `lines` runs."""
    steps, rest = divmod(run, group)
    return lines * (steps * STEP_CYCLES + bool(rest) * REST_CYCLES) + BLOCK_CYCLES


def pack_tiles(w: Array) -> Array:
    """Runs of numbers w[runs, run, n] as panels [n / 32][runs · run / step][16][32][4 / bytes]."""
    runs, run, columns = w.shape
    inner = 4 // w.dtype.itemsize
    step = ROWS * inner
    panels, steps = -(-columns // BLOCK.columns), -(-run // step)
    padded = np.zeros((runs, steps * step, panels * BLOCK.columns), w.dtype)
    padded[:, :run, :columns] = w
    cut = padded.reshape(runs * steps, ROWS, inner, panels, BLOCK.columns)
    return np.ascontiguousarray(cut.transpose(3, 0, 1, 4, 2))


def pack_split(w: Array) -> Array:
    """Runs of f16 as panels of bf16, [n / 32][runs · run / 32][high, low][16][32][2]."""
    wide = w.astype(np.float32)
    high = wide.astype(bfloat16)
    low = (wide - high.astype(np.float32)).astype(bfloat16)
    return np.stack([pack_tiles(high), pack_tiles(low)], axis=2)
