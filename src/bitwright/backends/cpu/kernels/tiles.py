"""Products of bf16 numbers in two-dimensional registers (AMX), summed in f32.

A tile register holds 16 rows of 64 bytes. One instruction adds to a tile of 16 × 16 sums the
product of 16 rows of 32 numbers with 32 rows of 16 numbers, which a panel holds as pairs,
[k / 2][16][2]. A product goes in blocks of 32 × 32 sums, four tiles, so that every tile of numbers
is used twice:

    c00 += a0 b0    c01 += a0 b1        a0, a1   rows 0 to 15 and 16 to 31 of a
    c10 += a1 b0    c11 += a1 b1        b0, b1   columns 0 to 15 and 16 to 31 of the panel

Where rows lie equally far apart and both halves of the block exist, tiles are loaded where the
numbers lie; else a step's numbers are copied side by side first, zeros where there are none. The
sums go through a scratch to the epilogue, row by row.

A process must ask the operating system before it uses tiles (`system.allow_tiles`); `target.host`
does, and names the feature only where that was granted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.backends.cpu.emit import Kernel, Type, Value, bf16, i16
from bitwright.backends.cpu.kernels.halves import HalfSums
from bitwright.backends.cpu.kernels.matmul import Tile
from bitwright.backends.cpu.kernels.tile_run import BYTES, ROWS, SIZE, STEP, Tiles
from bitwright.target import Target

Array = np.ndarray[Any, Any]
BLOCK = Tile(SIZE, 2, ROWS)
_amx = Type("x86_amx", "x86amx", 8192, False, False)


class Amx:
    """LLVM chooses the registers, and configures them where a function begins."""

    def __repr__(self) -> str:
        return "amx"

    def _shape(self, f: Kernel, count: int) -> list[Value]:
        return [f.const(i16, size) for size in (ROWS, BYTES, BYTES)[:count]]

    def zero(self, f: Kernel) -> list[Value]:
        return [f.intrinsic("llvm.x86.tilezero.internal", _amx, *self._shape(f, 2))]

    def read(self, f: Kernel, pointer: Value, stride: Value) -> Value:
        name = "llvm.x86.tileloadd64.internal"
        return f.intrinsic(name, _amx, *self._shape(f, 2), pointer, stride)

    def dot(self, f: Kernel, total: list[Value], a: Any, b: Any) -> list[Value]:
        name = "llvm.x86.tdpbf16ps.internal"
        return [f.intrinsic(name, _amx, *self._shape(f, 3), *total, a, b)]

    def write(self, f: Kernel, total: list[Value], pointer: Value, stride: Value) -> None:
        name = "llvm.x86.tilestored64.internal"
        f.intrinsic_void(name, *self._shape(f, 2), pointer, stride, *total)


@dataclass(frozen=True)
class TileDots(HalfSums):
    """A step takes 32 numbers of every row, and of every column of the panel."""

    tiles: Tiles = field(default_factory=Amx)
    element, unit, group, has_rest, widens = bf16, bf16.vector(STEP), STEP, False, False

    def __repr__(self) -> str:
        return f"TileDots({self.tiles!r})"


def tile_dots(target: Target) -> TileDots | None:
    return TileDots() if target.has("amx-tile", "amx-bf16") else None


def pack_tiles(w: Array) -> Array:
    """Runs of bf16 numbers w[runs, run, n] as panels [n / 32][runs · run / 32][16][32][2]."""
    runs, run, columns = w.shape
    panels, steps = -(-columns // BLOCK.columns), -(-run // STEP)
    padded = np.zeros((runs, steps * STEP, panels * BLOCK.columns), w.dtype)
    padded[:, :run, :columns] = w
    cut = padded.reshape(runs * steps, STEP // 2, 2, panels, BLOCK.columns)
    return np.ascontiguousarray(cut.transpose(3, 0, 1, 4, 2))
