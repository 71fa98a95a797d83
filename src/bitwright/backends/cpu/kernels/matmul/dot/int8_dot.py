"""Dot products of 8-bit integers, summed exactly in i32.

    Int8Dot4   four at a time by an instruction (vpdpbusd, usdot, sdot)
    Int8Dot2   two at a time, widened to 16 bits (pmaddwd), from groups of four
    Int8Dot1   one at a time, widened to 32 bits: any target

Panels hold signed weights [n / columns][k / group][columns][group]; the last group is padded with
zeros. A dot instruction takes a first operand of one signedness. Values of the other have their top
bit flipped, x' = x ^ 128, which moves them by 128; `shift` is x - x'. A zero point of w other than
0 needs the sum of each row of a: one more vector of sums per row, with weights of 1:

    Σ (x - xz)(w - wz)  =  Σ x'w - wz Σ x' + (shift - xz)(Σ w - K wz)

Where xz is constant, the last term is a constant of the column. With the bias it is the `offset`
that sums start at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, i8, i16, i32
from bitwright.backends.cpu.codegen.instr import Instr, dot_s8s8, dot_u8s8, pairs_s16s16
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import DotProduct
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, candidate_tiles
from bitwright.target import Target

Array = np.ndarray[Any, Any]
_TOP_BITS = 0x80808080


@dataclass(frozen=True)
class Int8Dot(DotProduct):
    """Base of the integer dot products."""

    signed: bool
    """Whether the values of a are signed."""
    has_tail: bool
    extra: int = 0
    offset: bool = False
    """Whether the sums of a column start at its `offset` instead of 0."""
    element, sum_type = i8, i32

    @property
    def form(self) -> tuple[bool, bool, int, bool]:
        return self.signed, self.has_tail, self.extra, self.offset

    @property
    def name(self) -> str:
        return f"{'s8' if self.signed else 'u8'}s8s32"

    @property
    def unit(self) -> Type:
        return i8.vector(self.group)

    @property
    def shift(self) -> int:
        """x - x': what is missing from each value of a as it is multiplied."""
        return 0

    @property
    def pointers(self) -> tuple[str, ...]:
        return ("offset",) * self.offset + ("w_zero",) * self.extra

    def initial_sums(
        self, f: Kernel, column: Value, masks: Sequence[Value | None], lanes: int
    ) -> list[Value]:
        zero = f.const(i32.vector(lanes), 0)
        found = [zero] * (len(masks) + self.extra)
        if self.offset:
            for v, mask in enumerate(masks):
                at = column + v * lanes
                found[v] = f.load(zero.type, f.args.pointer("offset"), at, mask=mask)
        return found

    def load_rhs(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Any]:
        width = lanes * self.group
        parts = [
            self.prepare_rhs(f, f.load(i8.vector(width), w, v * width, align=1))
            for v in range(vectors)
        ]
        return parts + [self.ones(f, rhs) for rhs in parts[: self.extra]]

    def prepare_rhs(self, f: Kernel, qvalues: Value) -> Any:
        """Packed weights in the form that `multiply_add` takes."""
        return qvalues

    def ones(self, f: Kernel, rhs: Any) -> Any:
        """Weights of 1, which sum up a row."""
        return f.const(rhs.type, 1)

    def load_lhs_tail(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Any:
        # the buffer may end with the row: no byte behind it is read
        start = f.offset(row, step * self.group)
        qvalues = f.const(i8.vector(self.group), 0)
        for place in range(self.group - 1):
            inside = f.lt(place, count)
            q = f.load(i8, start, f.min(place, count - 1))
            qvalues = f.with_lane(qvalues, place, f.select(inside, self.prepare_lhs(f, q), 0))
        return self.broadcast_group(f, qvalues, lanes)

    def prepare_lhs(self, f: Kernel, q: Value) -> Value:
        """A value of a in the form that `multiply_add` takes."""
        return q

    def broadcast_group(self, f: Kernel, qvalues: Value, lanes: int) -> Any:
        """A group of values, broadcast to all lanes."""
        raise NotImplementedError

    def subtract_zero_points(
        self, f: Kernel, sums: list[Value], column: Value, masks: Sequence[Value | None]
    ) -> None:
        if not self.extra:
            return
        total = sums[len(masks)]
        for v, mask in enumerate(masks):
            at = column + v * total.type.lanes
            zero = f.load(total.type, f.args.pointer("w_zero"), at, mask=mask)
            sums[v] = sums[v] - zero * total


@dataclass(frozen=True)
class Int8Dot4(Int8Dot):
    """One instruction per four products and their sum."""

    instr: Instr | None = None
    takes_signed: bool = False
    """Whether the instruction takes the values of a as signed."""
    group = 4

    def __repr__(self) -> str:
        assert self.instr is not None
        return f"Int8Dot4({self.instr.llvm_name}, {self.form})"

    @property
    def name(self) -> str:
        assert self.instr is not None
        mnemonic = self.instr.mnemonic
        return f"{super().name}_{'vnni' if mnemonic.startswith('vpdp') else mnemonic}"

    @property
    def shift(self) -> int:
        if self.signed == self.takes_signed:
            return 0
        return -128 if self.signed else 128

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        word = f.load(i32, f.offset(row, step * 4), align=1)
        if self.shift:
            word = f.xor(word, _TOP_BITS)
        return f.bitcast(f.splat(word, lanes), i8.vector(4 * lanes))

    def prepare_lhs(self, f: Kernel, q: Value) -> Value:
        return f.xor(q, 0x80) if self.shift else q

    def broadcast_group(self, f: Kernel, qvalues: Value, lanes: int) -> Value:
        return f.bitcast(f.splat(f.bitcast(qvalues, i32), lanes), i8.vector(4 * lanes))

    def multiply_add(self, f: Kernel, lhs: Value, rhs: Value, total: Value) -> Value:
        assert self.instr is not None
        return self.instr(f, total, lhs, rhs)


@dataclass(frozen=True)
class Int8Dot2(Int8Dot):
    """One instruction per two products of 16-bit integers and their sum, which cannot overflow.

    Each 16-bit element in memory holds two values. One shift extracts the upper value; two shifts
    or a mask extract the lower one. Both operands then hold the even and the odd values of a group
    without a shuffle.
    """

    instr: Instr | None = None
    group = 4

    def __repr__(self) -> str:
        assert self.instr is not None
        return f"Int8Dot2({self.instr.llvm_name}, {self.form})"

    @property
    def name(self) -> str:
        return f"{super().name}_pmaddwd"

    def prepare_rhs(self, f: Kernel, qvalues: Value) -> Any:
        return self._even_odd(f, qvalues, True)

    def ones(self, f: Kernel, rhs: Any) -> Any:
        return tuple(f.const(half.type, 1) for half in rhs)

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Any:
        word = f.load(i32, f.offset(row, step * 4), align=1)
        return self._even_odd(f, f.splat(word, lanes), self.signed)

    def broadcast_group(self, f: Kernel, qvalues: Value, lanes: int) -> Any:
        return self._even_odd(f, f.splat(f.bitcast(qvalues, i32), lanes), self.signed)

    def _even_odd(self, f: Kernel, qvalues: Value, signed: bool) -> tuple[Value, Value]:
        """The even and the odd values, in 16 bits each."""
        both = f.bitcast(qvalues, i16.vector(qvalues.type.total_bytes // 2))
        if signed:
            return f.ashr(f.shl(both, 8), 8), f.ashr(both, 8)
        return f.and_(both, 0xFF), f.lshr(both, 8)

    def multiply_add(self, f: Kernel, lhs: Any, rhs: Any, total: Value) -> Value:
        assert self.instr is not None
        for a, b in zip(lhs, rhs, strict=True):
            total = total + self.instr(f, a, b)
        return total


@dataclass(frozen=True)
class Int8Dot1(Int8Dot):
    """32-bit multiply and add."""

    def prepare_rhs(self, f: Kernel, qvalues: Value) -> Value:
        return f.convert(qvalues, i32)

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return f.splat(f.convert(f.load(i8, row, step), i32, self.signed), lanes)

    def multiply_add(self, f: Kernel, lhs: Value, rhs: Value, total: Value) -> Value:
        return total + lhs * rhs


def choose_int8_dot(
    target: Target, signed: bool, run: int, row_sums: bool = False, offset: bool = False
) -> Int8Dot:
    """The fastest exact dot product for rows that are read in runs of this length."""
    extra = int(row_sums)
    unsigned_dot, signed_dot = dot_u8s8(target), dot_s8s8(target)
    dot = signed_dot if signed and signed_dot else unsigned_dot or signed_dot
    if dot is not None:
        return Int8Dot4(signed, run % 4 != 0, extra, offset, dot, dot is signed_dot)
    pairs = pairs_s16s16(target)
    if pairs is not None:
        return Int8Dot2(signed, run % 4 != 0, extra, offset, pairs)
    return Int8Dot1(signed, False, extra, offset)


def int8_tile(target: Target, columns: int, dot: DotProduct) -> Tile:
    """The register tile for a known number of columns."""
    return int8_tiles(target, columns, dot)[0]


def int8_tiles(target: Target, columns: int, dot: DotProduct) -> list[Tile]:
    """Register tiles for a known number of columns, the static choice first."""
    return candidate_tiles(target, columns, isinstance(dot, Int8Dot4), dot.extra)


def pack_int8(w: Array, tile: Tile, group: int) -> Array:
    """Packs signed weights w[runs, run, n] in panels."""
    return pack_groups(w.astype(np.int8, copy=False), tile, group)


def pack_groups(w: Array, tile: Tile, group: int) -> Array:
    """Packs w[runs, run, n] as panels [n / columns][runs · run / group][columns][group]; runs are
    padded to whole groups."""
    runs, run, columns = w.shape
    panels = -(-columns // tile.columns)
    groups = -(-run // group)
    padded = np.zeros((runs, groups * group, panels * tile.columns), w.dtype)
    padded[:, :run, :columns] = w
    cut = padded.reshape(runs * groups, group, panels, tile.columns)
    return np.ascontiguousarray(cut.transpose(2, 0, 3, 1))
