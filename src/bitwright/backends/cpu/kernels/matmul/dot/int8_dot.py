"""Products of 8-bit codes, summed exactly in i32.

    Dots      four at a time by an instruction (vpdpbusd, usdot, sdot)
    Pairs     two at a time, widened to 16 bits (pmaddwd), from groups of four
    Singles   one at a time, widened to 32 bits: any target

Panels hold signed codes [n / columns][k / group][columns][group], the last group filled with zeros.
A dot instruction wants its first operand of one sign: codes of the other have their top bit
flipped, x' = x ^ 128, which moves them by 128; x - x' is `shift`. A zero point of w that differs
from 0 needs the sum of each row's codes, which is one more vector of sums per row, with ones for
weights:

    Σ (x - xz)(w - wz)  =  Σ x'w - wz Σ x' + (shift - xz)(Σ w - K wz)

The last term is known per column where xz is, when the program is made: with the bias it is the
`offset` that sums begin with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, i8, i16, i32
from bitwright.backends.cpu.codegen.instr import Instr, dot_s8s8, dot_u8s8, pairs_s16s16
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import ONE_PLANE
from bitwright.backends.cpu.kernels.matmul.matmul import Tile, best_tile
from bitwright.target import Target

Array = np.ndarray[Any, Any]
_TOP_BITS = 0x80808080


@dataclass(frozen=True)
class Int8Dot:
    """What the three ways have in common."""

    signed: bool
    """Whether the codes of a are."""
    has_rest: bool
    extra: int = 0
    offset: bool = False
    """Whether sums begin with a number of their column instead of 0."""
    element, sum, group, widens = i8, i32, 1, False
    tiles = None
    parts = ONE_PLANE

    @property
    def form(self) -> tuple[bool, bool, int, bool]:
        return self.signed, self.has_rest, self.extra, self.offset

    @property
    def unit(self) -> Type:
        return i8.vector(self.group)

    @property
    def shift(self) -> int:
        """How much is missing from each code of a as it is multiplied."""
        return 0

    @property
    def pointers(self) -> tuple[str, ...]:
        return ("offset",) * self.offset + ("w_zero",) * self.extra

    def start(self, f: Kernel, column: Value, masks: list[Value], lanes: int) -> list[Value]:
        zero = f.const(i32.vector(lanes), 0)
        found = [zero] * (len(masks) + self.extra)
        if self.offset:
            for v, mask in enumerate(masks):
                at = column + v * lanes
                found[v] = f.load(zero.type, f.args.pointer("offset"), at, mask=mask)
        return found

    def panel(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Any]:
        width = lanes * self.group
        parts = [
            self.factor(f, f.load(i8.vector(width), w, v * width, align=1)) for v in range(vectors)
        ]
        return parts + [self.ones(f, part) for part in parts[: self.extra]]

    def factor(self, f: Kernel, qvalues: Value) -> Any:
        """Weights as they are multiplied."""
        return qvalues

    def ones(self, f: Kernel, part: Any) -> Any:
        """Weights of 1."""
        return f.const(part.type, 1)

    def rest(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Any:
        # no byte behind the row is read: the buffer may end there
        start = f.offset(row, step * self.group)
        qvalues = f.const(i8.vector(self.group), 0)
        for place in range(self.group - 1):
            inside = f.lt(place, count)
            code = f.load(i8, start, f.min(place, count - 1))
            qvalues = f.with_lane(qvalues, place, f.select(inside, self.entered(f, code), 0))
        return self.spread(f, qvalues, lanes)

    def entered(self, f: Kernel, code: Value) -> Value:
        """A code of a as it is multiplied."""
        return code

    def spread(self, f: Kernel, qvalues: Value, lanes: int) -> Any:
        """A group of codes, for every lane."""
        raise NotImplementedError

    def corrected(
        self, product: Any, rows: Sequence[Value], column: Value, sums: list[Value]
    ) -> list[Value]:
        return sums

    def finished(self, f: Kernel, sums: list[Value], column: Value, masks: list[Value]) -> None:
        if not self.extra:
            return
        total = sums[len(masks)]
        for v, mask in enumerate(masks):
            at = column + v * total.type.lanes
            zero = f.load(total.type, f.args.pointer("w_zero"), at, mask=mask)
            sums[v] = sums[v] - zero * total


@dataclass(frozen=True)
class Dots(Int8Dot):
    """Four products and their sum are one instruction."""

    dot: Instr | None = None
    takes_signed: bool = False
    """Whether the instruction takes a's codes as signed."""
    group = 4

    def __repr__(self) -> str:
        assert self.dot is not None
        return f"Dots({self.dot.llvm_name}, {self.form})"

    @property
    def shift(self) -> int:
        if self.signed == self.takes_signed:
            return 0
        return -128 if self.signed else 128

    def number(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        word = f.load(i32, f.offset(row, step * 4), align=1)
        if self.shift:
            word = f.xor(word, _TOP_BITS)
        return f.bitcast(f.splat(word, lanes), i8.vector(4 * lanes))

    def entered(self, f: Kernel, code: Value) -> Value:
        return f.xor(code, 0x80) if self.shift else code

    def spread(self, f: Kernel, qvalues: Value, lanes: int) -> Value:
        return f.bitcast(f.splat(f.bitcast(qvalues, i32), lanes), i8.vector(4 * lanes))

    def multiply(self, f: Kernel, number: Value, part: Value, total: Value) -> Value:
        assert self.dot is not None
        return self.dot(f, total, number, part)


@dataclass(frozen=True)
class Pairs(Int8Dot):
    """Two products of 16-bit numbers and their sum are one instruction; it cannot overflow.

    A 16-bit number of memory holds two codes: the upper one by a shift, the lower one by two (or a
    mask). That gives the first and third, and the second and fourth of a group, on both sides,
    without a single shuffle.
    """

    pairs: Instr | None = None
    group = 4

    def __repr__(self) -> str:
        assert self.pairs is not None
        return f"Pairs({self.pairs.llvm_name}, {self.form})"

    def factor(self, f: Kernel, qvalues: Value) -> Any:
        return self._halves(f, qvalues, True)

    def ones(self, f: Kernel, part: Any) -> Any:
        return tuple(f.const(half.type, 1) for half in part)

    def number(self, f: Kernel, row: Value, step: Value, lanes: int) -> Any:
        word = f.load(i32, f.offset(row, step * 4), align=1)
        return self._halves(f, f.splat(word, lanes), self.signed)

    def spread(self, f: Kernel, qvalues: Value, lanes: int) -> Any:
        return self._halves(f, f.splat(f.bitcast(qvalues, i32), lanes), self.signed)

    def _halves(self, f: Kernel, qvalues: Value, signed: bool) -> tuple[Value, Value]:
        """The even and the odd codes, in 16 bits each."""
        both = f.bitcast(qvalues, i16.vector(qvalues.type.total_bytes // 2))
        if signed:
            return f.ashr(f.shl(both, 8), 8), f.ashr(both, 8)
        return f.and_(both, 0xFF), f.lshr(both, 8)

    def multiply(self, f: Kernel, number: Any, part: Any, total: Value) -> Value:
        assert self.pairs is not None
        for ours, theirs in zip(number, part, strict=True):
            total = total + self.pairs(f, ours, theirs)
        return total


@dataclass(frozen=True)
class Singles(Int8Dot):
    """Plain 32-bit arithmetic."""

    def factor(self, f: Kernel, qvalues: Value) -> Value:
        return f.convert(qvalues, i32)

    def number(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return f.splat(f.convert(f.load(i8, row, step), i32, self.signed), lanes)

    def multiply(self, f: Kernel, number: Value, part: Value, total: Value) -> Value:
        return total + number * part


def best_qvalues(
    target: Target, signed: bool, run: int, row_sums: bool = False, offset: bool = False
) -> Int8Dot:
    """The fastest exact way for rows that are read in runs of this length."""
    extra = int(row_sums)
    unsigned_dot, signed_dot = dot_u8s8(target), dot_s8s8(target)
    dot = signed_dot if signed and signed_dot else unsigned_dot or signed_dot
    if dot is not None:
        return Dots(signed, run % 4 != 0, extra, offset, dot, dot is signed_dot)
    pairs = pairs_s16s16(target)
    if pairs is not None:
        return Pairs(signed, run % 4 != 0, extra, offset, pairs)
    return Singles(signed, False, extra, offset)


def qvalues_tile(target: Target, columns: int, qvalues: Int8Dot) -> Tile:
    """The register tile for a known number of columns."""
    return best_tile(target, columns, isinstance(qvalues, Dots), qvalues.extra)


def pack_qvalues(w: Array, tile: Tile, group: int) -> Array:
    """Runs of signed codes in panels."""
    return pack_groups(w.astype(np.int8, copy=False), tile, group)


def pack_groups(w: Array, tile: Tile, group: int) -> Array:
    """Runs of numbers w[runs, run, n] as panels [n / columns][runs · run / group][columns][group];
    every run is filled up to whole groups."""
    runs, run, columns = w.shape
    panels = -(-columns // tile.columns)
    groups = -(-run // group)
    padded = np.zeros((runs, groups * group, panels * tile.columns), w.dtype)
    padded[:, :run, :columns] = w
    cut = padded.reshape(runs * groups, group, panels, tile.columns)
    return np.ascontiguousarray(cut.transpose(2, 0, 3, 1))
