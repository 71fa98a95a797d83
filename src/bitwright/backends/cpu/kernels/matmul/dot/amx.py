"""Dot products in AMX tile registers: half floats summed in f32, 8-bit integers summed in i32.

A tile register holds 16 rows of 64 bytes. One instruction adds the product of 16 rows of 32 bf16
with 32 rows of 16 bf16 to a tile of 16 × 16 sums; the panel holds the second operand as pairs,
[k / 2][16][2]. An 8-bit instruction takes 64 values per row, in groups of four. A product is
computed in blocks of 32 × 32 sums, four tiles, so that every operand tile is used twice:

    c00 += a0 b0    c01 += a0 b1        a0, a1   rows 0 to 15 and 16 to 31 of a
    c10 += a1 b0    c11 += a1 b1        b0, b1   columns 0 to 15 and 16 to 31 of the panel

Where the rows of a tile have a constant stride (rows of a matrix, pixels of a line) and all rows of
the block exist, tiles are loaded in place. Otherwise the elements of a step are copied to a scratch
first, with zeros behind the end of k. The sums go through a scratch to the epilogue, row by row.

A process must request permission from the operating system to use tiles (`system.allow_tiles`);
`target.host` requests it, and lists the feature only where it was granted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, bf16, i16
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import BYTES, ROWS, SIZE, Tiles
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import DotProduct
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.target import Target

Array = np.ndarray[Any, Any]
BLOCK = Tile(SIZE, 2, ROWS)
STEP_CYCLES, REST_CYCLES, BLOCK_CYCLES = 250, 400, 250
"""Measured cycles of a step of a block, of a copied step at the end of a run, and of the block
itself (a step of a vector dot product takes `step_cycles`)."""
_amx = Type("x86_amx", "x86amx", 8192, False, False)


class Amx:
    """Tile instructions; LLVM allocates the registers and configures them on function entry."""

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
class AmxBf16Dot(DotProduct):
    """A step takes 32 bf16 of every row and every column."""

    tiles: Tiles
    name, has_tail = "bf16_amx", False
    element, unit, group = bf16, bf16.vector(32), 32

    def __repr__(self) -> str:
        return f"AmxBf16Dot({self.tiles!r})"


@dataclass(frozen=True)
class AmxSplitF16Dot(AmxBf16Dot):
    """f16 as sums of two bf16: x = high + low exactly, high the nearest bf16 and low the rest.

        x w  =  high_x high_w + low_x high_w + high_x low_w        omits low_x low_w < 2^-16 |x w|

    Rows are split into three planes (`kernels.matmul.dot.split_half_dot`): high, low, and high
    again with 0 for values that are not finite, because low_w may be 0. Weights are finite.
    """

    name = "f16_amx"
    unit = bf16.vector(64)
    plane_pairs = ((0, 0), (1, 0), (2, 1))

    def __repr__(self) -> str:
        return f"AmxSplitF16Dot({self.tiles!r})"


@dataclass(frozen=True)
class AmxInt8Dot(Int8Dot):
    """A step takes 64 values; there is an instruction for each signedness of a."""

    tiles: Tiles | None = None
    group = 64

    def __repr__(self) -> str:
        return f"AmxInt8Dot({self.tiles!r}, {self.form})"

    @property
    def name(self) -> str:
        return f"{super().name}_amx"


def amx_bf16_dot(target: Target) -> AmxBf16Dot | None:
    return AmxBf16Dot(Amx("tdpbf16ps")) if target.has("amx-tile", "amx-bf16") else None


def amx_split_f16_dot(target: Target) -> AmxSplitF16Dot | None:
    return AmxSplitF16Dot(Amx("tdpbf16ps")) if target.has("amx-tile", "amx-bf16") else None


def amx_int8_dot(target: Target, signed: bool, offset: bool) -> AmxInt8Dot | None:
    """The dot product for weights whose zero point is 0; None where the target lacks AMX."""
    if not target.has("amx-tile", "amx-int8"):
        return None
    return AmxInt8Dot(signed, False, 0, offset, Amx("tdpbssd" if signed else "tdpbusd"))


def block_cycles(run: int, lines: int, group: int) -> int:
    """Cycles of a block whose windows consist of `lines` runs."""
    steps, rest = divmod(run, group)
    return lines * (steps * STEP_CYCLES + bool(rest) * REST_CYCLES) + BLOCK_CYCLES


def pack_tiles(w: Array) -> Array:
    """Packs w[runs, run, n] as panels [n / 32][runs · run / step][16][32][4 / bytes]."""
    runs, run, columns = w.shape
    inner = 4 // w.dtype.itemsize
    step = ROWS * inner
    panels, steps = -(-columns // BLOCK.columns), -(-run // step)
    padded = np.zeros((runs, steps * step, panels * BLOCK.columns), w.dtype)
    padded[:, :run, :columns] = w
    cut = padded.reshape(runs * steps, ROWS, inner, panels, BLOCK.columns)
    return np.ascontiguousarray(cut.transpose(3, 0, 1, 4, 2))


def pack_split(w: Array) -> Array:
    """Packs f16 weights as panels of bf16, [n / 32][runs · run / 32][high, low][16][32][2]."""
    wide = w.astype(np.float32)
    high = wide.astype(bfloat16)
    low = (wide - high.astype(np.float32)).astype(bfloat16)
    return np.stack([pack_tiles(high), pack_tiles(low)], axis=2)
