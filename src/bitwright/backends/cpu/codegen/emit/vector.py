"""Lanes: masks, shuffles, subvectors, and reductions in a fixed order.

A reduction halves the vector repeatedly (lane i with lane i + n/2) on every target, so the same
number of lanes always gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bitwright.backends.cpu.codegen.emit.arithmetic import Arithmetic
from bitwright.backends.cpu.codegen.emit.core import Operand, Value
from bitwright.backends.cpu.codegen.emit.types import Type, i1, i8, i16, i32, i64

_WORDS = {8: i8, 16: i16, 32: i32, 64: i64}


class Vectors(Arithmetic):
    def iota(self, scalar: Type, lanes: int) -> Value:
        """0, 1, 2, … as a constant."""
        return self.const_vector(scalar, range(lanes))

    def lane(self, vector: Value, index: Operand) -> Value:
        """One lane as a scalar."""
        if vector.type.lanes == 1:
            return vector
        index = self.index(index)
        return self.emit(vector.type.scalar, f"extractelement {self.listed((vector, index))}")

    def with_lane(self, vector: Value, index: Operand, scalar: Operand) -> Value:
        """The vector with one lane replaced."""
        scalar = self.as_value(scalar, vector.type.scalar)
        index = self.index(index)
        if vector.type.lanes == 1:
            return scalar
        return self.emit(vector.type, f"insertelement {self.listed((vector, scalar, index))}")

    def shuffle(self, a: Value, order: Sequence[int], b: Value | None = None) -> Value:
        """Lanes of a (from 0) and b (following those of a) in the given order; -1 is undefined."""
        lanes = ", ".join(f"i32 {i}" if i >= 0 else "i32 poison" for i in order)
        other = b.text if b is not None else "poison"
        if len(order) == 1:
            if b is None or order[0] < a.type.lanes:
                return self.lane(a, order[0])
            return self.lane(b, order[0] - a.type.lanes)
        return self.emit(
            a.type.vector(len(order)),
            f"shufflevector {a.type.text} {a.text}, {a.type.text} {other}, "
            f"<{len(order)} x i32> <{lanes}>",
        )

    def part(self, vector: Value, start: int, lanes: int) -> Value:
        """The subvector of lanes start … start + lanes - 1."""
        if lanes == vector.type.lanes:
            return vector
        return self.shuffle(vector, range(start, start + lanes))

    def join(self, *vectors: Value) -> Value:
        """The vectors concatenated; their number is a power of two."""
        parts = list(vectors)
        while len(parts) > 1:
            parts = [self._join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _join(self, a: Value, b: Value) -> Value:
        if a.type.lanes == 1:
            pair = self.with_lane(self.undefined(a.type.vector(2)), 0, a)
            return self.with_lane(pair, 1, b)
        return self.shuffle(a, range(2 * a.type.lanes), b)

    def interleave(self, a: Value, b: Value) -> Value:
        """a0, b0, a1, b1, …"""
        lanes = a.type.lanes
        return self.shuffle(a, [i // 2 + (i % 2) * lanes for i in range(2 * lanes)], b)

    # masks

    def mask(self, count: Value, lanes: int, bits: int = 32) -> Value:
        """True in the first `count` lanes (none if negative); `bits` is the width of the data."""
        if lanes == 1:
            return self.gt(count, 0)
        if count.text == "1":  # LLVM 22 stores four bytes for a mask known to select one i8
            count = self.opaque(count)
        inside = self.min(self.max(count, 0), lanes)
        if self.target.has("avx512f") and self.target.has("bmi2") and lanes in _WORDS:
            ones = self.intrinsic("llvm.x86.bmi.bzhi.64", i64, self.const(i64, -1), inside)
            word = _WORDS[lanes]
            small = ones if lanes == 64 else self.emit(word, f"trunc i64 {ones.text} to {word}")
            return self.emit(i1.vector(lanes), f"bitcast {word} {small.text} to <{lanes} x i1>")
        scalar = _WORDS.get(bits, i32)
        if scalar is not i64:
            inside = self.emit(scalar, f"trunc i64 {inside.text} to {scalar}")
        return self.lt(self.iota(scalar, lanes), self.splat(inside, lanes))

    def any(self, mask: Value) -> Value:
        """Whether the mask is true in some lane."""
        return self.ne(self._mask_bits(mask), 0) if mask.type.lanes > 1 else mask

    def all(self, mask: Value) -> Value:
        """Whether the mask is true in every lane."""
        return self.eq(self._mask_bits(mask), -1) if mask.type.lanes > 1 else mask

    def _mask_bits(self, mask: Value) -> Value:
        lanes = mask.type.lanes
        word = _WORDS.get(lanes) or Type(f"i{lanes}", f"i{lanes}", lanes, True, False)
        return self.emit(word, f"bitcast {mask.type.text} {mask.text} to {word}")

    # reductions

    def reduce(self, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes combined by repeated halving; lanes are a power of two."""
        while vector.type.lanes > 1:
            half = vector.type.lanes // 2
            vector = combine(self.part(vector, 0, half), self.part(vector, half, half))
        return vector

    def reduce_add(self, vector: Value) -> Value:
        return self.reduce(vector, self.add)

    def reduce_max(self, vector: Value, signed: bool = True) -> Value:
        """The largest lane; NaN if one is NaN."""
        return self.reduce(vector, lambda a, b: self.max(a, b, signed))

    def reduce_min(self, vector: Value, signed: bool = True) -> Value:
        """The smallest lane; NaN if one is NaN."""
        return self.reduce(vector, lambda a, b: self.min(a, b, signed))

    def combine(self, values: Sequence[Value], operation: Callable[[Value, Value], Value]) -> Value:
        """Accumulators combined pairwise: first with second, third with fourth, …"""
        values = list(values)
        while len(values) > 1:
            paired = [operation(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
            values = paired + values[len(values) & ~1 :]
        return values[0]

    def halve(self, values: Sequence[Value], operation: Callable[[Value, Value], Value]) -> Value:
        """A power of two of accumulators combined by halving, in the order of `reduce`."""
        while len(values) > 1:
            half = len(values) // 2
            values = [operation(a, b) for a, b in zip(values[:half], values[half:], strict=True)]
        return values[0]
