"""Products of bf16 and f16 numbers, summed in f32.

    TileDots   bf16, 32 at a time in two-dimensional registers (`kernels.matmul.dot.amx`)
    SplitDots  f16, as sums of two bf16 each, in the same registers
    HalfDots   bf16, two at a time by an instruction (vdpbf16ps)
    Widened    rows become f32 a piece at a time, in a scratch that stays in the first-level cache;
               panels stay halves in memory and become f32 in registers; where there are many rows,
               both become f32 once for several tiles (`kernels.matmul.upcast_product`)

A product of two halves is exact in f32, so a result is Σ_k a[k] w[k] with one f32 rounding a term:
in the order of k (`Widened`), or of pairs with the odd number first (`HalfDots`). Both lie within
K · 2^-24 of Σ |a[k] w[k]| of the exact sum.

Panels are [n / columns][k / 2][columns][2] for the instruction. For `Widened` they are
[n / columns][k][columns]; two vectors of bf16 columns share a vector of memory, lane by lane, from
which a shift takes one and a mask the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, bf16, f32, i32
from bitwright.backends.cpu.codegen.emit import stored as stored_type
from bitwright.backends.cpu.codegen.instr import Instr, dot_bf16
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import ONE_PLANE, half_a_pair, pair
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import pack_groups
from bitwright.backends.cpu.kernels.matmul.matmul import Tile, best_tile
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import bf16 as brain
from bitwright.target import Target

Array = np.ndarray[Any, Any]
_UPPER = -0x10000
SLOW_DOTS = {"cooperlake", "sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d"}
"""Processors, as LLVM names them, that do two f32 products in half the time of a dot of bf16 (on
the third: 163 against 86 Gop/s). Their tiles are what is fast in bf16."""


class HalfSums:
    """What all ways have in common."""

    sum, extra = f32, 0
    pointers: tuple[str, ...] = ()
    tiles: Any = None
    parts: tuple[tuple[int, int], ...] = ONE_PLANE

    def start(self, f: Kernel, column: Value, masks: list[Value], lanes: int) -> list[Value]:
        return [f.const(f32.vector(lanes), 0.0)] * len(masks)

    def corrected(
        self, product: Any, rows: Sequence[Value], column: Value, sums: list[Value]
    ) -> list[Value]:
        return sums

    def finished(self, f: Kernel, sums: list[Value], column: Value, masks: list[Value]) -> None:
        pass


@dataclass(frozen=True)
class HalfDots(HalfSums):
    """Two products and their sum are one instruction."""

    dot: Instr
    has_rest: bool
    element, unit, group, widens = bf16, bf16.vector(2), 2, False

    def __repr__(self) -> str:
        return f"HalfDots({self.dot.llvm_name}, {self.has_rest})"

    def panel(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Value]:
        return [f.load(bf16.vector(2 * lanes), w, v * 2 * lanes) for v in range(vectors)]

    def number(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return pair(f, bf16, row, step, lanes)

    def rest(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Value:
        return half_a_pair(f, bf16, row, step, lanes)

    def multiply(self, f: Kernel, number: Value, part: Value, total: Value) -> Value:
        return self.dot(f, total, number, part)


@dataclass(frozen=True)
class Widened(HalfSums):
    """One f32 product at a time."""

    half: DType
    whole: bool = False
    """Whether many rows go through `kernels.matmul.upcast_product`."""
    group, has_rest, widens = 1, False, True

    def __repr__(self) -> str:
        return f"Widened({self.half}, {self.whole})"

    @property
    def element(self) -> Type:
        return stored_type(self.half)

    @property
    def unit(self) -> Type:
        return self.element

    def panel(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Value]:
        found: list[Value] = []
        paired = vectors - vectors % 2 if self.half == brain else 0
        for v in range(0, paired, 2):
            both = f.load(i32.vector(lanes), f.offset(w, v * lanes * 2), align=2)
            parts = f.shl(both, 16), f.and_(both, _UPPER)
            found += [f.bitcast(part, f32.vector(lanes)) for part in parts]
        for v in range(paired, vectors):
            found.append(f.convert(f.load(self.element.vector(lanes), w, v * lanes), f32))
        return found

    def number(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return f.splat(f.load(f32, row, step), lanes)

    def rest(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Value:
        raise AssertionError("a step takes one number: none is ever left over")

    def multiply(self, f: Kernel, number: Value, part: Value, total: Value) -> Value:
        return f.fma(number, part, total)


Halves = HalfDots | Widened


def best_halves(target: Target, half: DType, run: int) -> Halves:
    """The fastest way for rows of this type that are read in runs of this length."""
    dot = dot_bf16(target) if half == brain and target.cpu not in SLOW_DOTS else None
    return Widened(half) if dot is None else HalfDots(dot, run % 2 != 0)


def halves_tile(target: Target, columns: int, numbers: Halves) -> Tile:
    """The register tile for a known number of columns."""
    return best_tile(target, columns, unpacking=int(numbers.widens))


def pack_halves(w: Array, tile: Tile, numbers: Halves) -> Array:
    """Runs of halves w[runs, run, n] in panels."""
    if isinstance(numbers, HalfDots):
        return pack_groups(w, tile, 2)
    panels = pack_groups(w, tile, 1)[..., 0]
    if numbers.half != brain:
        return panels
    order = np.arange(tile.columns)
    paired = tile.columns - tile.vectors % 2 * tile.lanes
    order[:paired] = order[:paired].reshape(-1, 2, tile.lanes).swapaxes(1, 2).reshape(-1)
    return np.ascontiguousarray(panels[..., order])
