"""Dot products of bf16 and f16 elements, summed in f32.

    AmxBf16Dot      bf16, 32 at a time in AMX tile registers (`kernels.matmul.dot.amx`)
    AmxSplitF16Dot  f16, each as the sum of two bf16, in the same registers
    Bf16Dot2        bf16, two at a time by vdpbf16ps
    UpcastDot       rows are converted to f32 in pieces, in a scratch that fits the L1 cache; panels
                    stay in half precision in memory and are converted in registers; with many rows
                    both are converted once for several tiles (`kernels.matmul.upcast_product`)

A product of two half floats is exact in f32, so a result is Σ_k a[k] w[k] with one f32 rounding per
term: in the order of k (`UpcastDot`), or in pairs with the odd element first (`Bf16Dot2`). The
error of both is at most K · 2^-24 of Σ |a[k] w[k]|.

Panels are [n / columns][k / 2][columns][2] for the instruction, and [n / columns][k][columns] for
`UpcastDot`. There, two vectors of bf16 columns are interleaved lane by lane: a shift extracts one,
a mask the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, bf16, f32, i32
from bitwright.backends.cpu.codegen.emit import storage_type as stored_type
from bitwright.backends.cpu.codegen.instr import Instr, dot_bf16
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import (
    DotProduct,
    load_last_pair,
    load_pair,
)
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import pack_groups
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, candidate_tiles
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import bf16 as brain
from bitwright.target import Target

Array = np.ndarray[Any, Any]
_UPPER = -0x10000
SLOW_DOTS = {"cooperlake", "sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d"}
"""Processors, by LLVM name, on which two f32 products take half the time of a bf16 dot product (on
the third: 163 against 86 Gop/s). On these, AMX is the fast path for bf16."""


@dataclass(frozen=True)
class Bf16Dot2(DotProduct):
    """One instruction per two products and their sum."""

    instr: Instr
    has_tail: bool
    name = "bf16_avx512bf16"
    element, unit, group = bf16, bf16.vector(2), 2

    def __repr__(self) -> str:
        return f"Bf16Dot2({self.instr.llvm_name}, {self.has_tail})"

    def load_rhs(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Value]:
        return [f.load(bf16.vector(2 * lanes), w, v * 2 * lanes) for v in range(vectors)]

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return load_pair(f, bf16, row, step, lanes)

    def load_lhs_tail(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Value:
        return load_last_pair(f, bf16, row, step, lanes)

    def multiply_add(self, f: Kernel, lhs: Value, rhs: Value, total: Value) -> Value:
        return self.instr(f, total, lhs, rhs)


@dataclass(frozen=True)
class UpcastDot(DotProduct):
    """One f32 multiply-add per step."""

    half: DType
    whole: bool = False
    """Whether products with many rows use `kernels.matmul.upcast_product`."""
    has_tail, upcasts_rows = False, True

    def __repr__(self) -> str:
        return f"UpcastDot({self.half}, {self.whole})"

    @property
    def name(self) -> str:
        return str(self.half)

    @property
    def element(self) -> Type:
        return stored_type(self.half)

    @property
    def unit(self) -> Type:
        return self.element

    def load_rhs(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Value]:
        found: list[Value] = []
        paired = vectors - vectors % 2 if self.half == brain else 0
        for v in range(0, paired, 2):
            both = f.load(i32.vector(lanes), f.offset(w, v * lanes * 2), align=2)
            halves = f.shl(both, 16), f.and_(both, _UPPER)
            found += [f.bitcast(half, f32.vector(lanes)) for half in halves]
        for v in range(paired, vectors):
            found.append(f.convert(f.load(self.element.vector(lanes), w, v * lanes), f32))
        return found

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return f.splat(f.load(f32, row, step), lanes)

    def multiply_add(self, f: Kernel, lhs: Value, rhs: Value, total: Value) -> Value:
        return f.fma(lhs, rhs, total)


HalfDot = Bf16Dot2 | UpcastDot


def choose_half_dot(target: Target, half: DType, run: int) -> HalfDot:
    """The fastest dot product for rows of this type that are read in runs of this length."""
    instr = dot_bf16(target) if half == brain and target.cpu not in SLOW_DOTS else None
    return UpcastDot(half) if instr is None else Bf16Dot2(instr, run % 2 != 0)


def half_tiles(target: Target, columns: int, dot: DotProduct) -> list[Tile]:
    """Register tiles for a known number of columns, the static choice first."""
    return candidate_tiles(target, columns, unpacking=int(dot.upcasts_rows))


def pack_half(w: Array, tile: Tile, dot: DotProduct) -> Array:
    """Packs half floats w[runs, run, n] in panels."""
    if isinstance(dot, Bf16Dot2):
        return pack_groups(w, tile, 2)
    panels = pack_groups(w, tile, 1)[..., 0]
    if not isinstance(dot, UpcastDot) or dot.half != brain:
        return panels
    order = np.arange(tile.columns)
    paired = tile.columns - tile.vectors % 2 * tile.lanes
    order[:paired] = order[:paired].reshape(-1, 2, tile.lanes).swapaxes(1, 2).reshape(-1)
    return np.ascontiguousarray(panels[..., order])
