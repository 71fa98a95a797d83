"""Sums of products of packed weights, u8 in words of four, and activations, i8.

    dots.run(f, words, a, start)    start + Σ_groups Σ_4 u a, i32 per column

`words` are vectors of one word per column, prepared once for all rows. A word of four activations
is broadcast to all columns. All forms are exact.

    vpdpbusd              one instruction per group
    vpmaddubsw, vpmaddwd  pairs in 16 bits, which cannot overflow: values are small enough
    vpsignb, vpmaddubsw   the same for values around 128: signs move to the activations
    vpmaddwd              even and odd elements in 16 bits
    sdot                  values below 128, or shifted to signed ones
    others                one element at a time in 32 bits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i8, i16, i32
from bitwright.backends.cpu.codegen.instr import (
    Instr,
    dot_s8s8,
    dot_u8s8,
    pairs_s16s16,
    pairs_u8s8,
    with_signs,
)
from bitwright.target import Target

_LARGEST_PAIR = 127 * 2
"""The largest sum of two activations."""


@dataclass(frozen=True)
class Dots:
    """The form for one word per 32-bit lane; `largest` is the largest weight."""

    largest: int

    shift: int = 0
    """What is subtracted from weights before they are multiplied."""

    def prepare(self, f: Kernel, word: Value) -> tuple[Value, ...]:
        """A vector of words i8[4 lanes] in the form that `run` takes."""
        return (word,)

    def run(
        self, f: Kernel, words: Sequence[tuple[Value, ...]], a: Value, at: int, start: Value
    ) -> Value:
        """`start` plus the products with the activations from byte `at` behind a on."""
        raise NotImplementedError

    def word(self, f: Kernel, a: Value, at: int, lanes: int) -> Value:
        """Four activations in every lane."""
        word = f.load(i32, f.offset(a, at), align=1)
        return f.bitcast(f.splat(word, lanes), i8.vector(4 * lanes))


@dataclass(frozen=True)
class FourDots(Dots):
    """One instruction per four products."""

    instr: Instr | None = None

    def __repr__(self) -> str:
        assert self.instr is not None
        return f"FourDots({self.instr.llvm_name}, {self.shift})"

    def prepare(self, f: Kernel, word: Value) -> tuple[Value, ...]:
        return (f.xor(word, 0x80) if self.shift else word,)

    def run(
        self, f: Kernel, words: Sequence[tuple[Value, ...]], a: Value, at: int, start: Value
    ) -> Value:
        assert self.instr is not None
        for group, (word,) in enumerate(words):
            activations = self.word(f, a, at + 4 * group, start.type.lanes)
            start = self.instr(f, start, word, activations)
        return start


@dataclass(frozen=True)
class PairDots(Dots):
    """Pairs of products in 16 bits, several groups of them at a time."""

    narrow: Instr | None = None
    wide: Instr | None = None

    def __repr__(self) -> str:
        assert self.narrow is not None
        return f"PairDots({self.narrow.llvm_name}, {self.largest})"

    def run(
        self, f: Kernel, words: Sequence[tuple[Value, ...]], a: Value, at: int, start: Value
    ) -> Value:
        assert self.narrow is not None and self.wide is not None
        each = (2**15 - 1) // (_LARGEST_PAIR * self.largest)
        lanes = start.type.lanes
        ones = f.const(i16.vector(2 * lanes), 1)
        for first in range(0, len(words), each):
            total = None
            for group in range(first, min(first + each, len(words))):
                activations = self.word(f, a, at + 4 * group, lanes)
                pairs = self.narrow(f, words[group][0], activations)
                total = pairs if total is None else total + pairs
            assert total is not None
            start = start + self.wide(f, total, ones)
        return start


@dataclass(frozen=True)
class SignedDots(Dots):
    """Pairs of products of absolute weights and activations with the weights' signs.

    |w| <= 128 and |a| <= 127, so that two products fit in 16 bits.
    """

    sign: Instr | None = None
    narrow: Instr | None = None
    wide: Instr | None = None

    def __repr__(self) -> str:
        assert self.narrow is not None
        return f"SignedDots({self.narrow.llvm_name})"

    def prepare(self, f: Kernel, word: Value) -> tuple[Value, ...]:
        signed = f.xor(word, 0x80)
        return f.abs(signed), signed

    def run(
        self, f: Kernel, words: Sequence[tuple[Value, ...]], a: Value, at: int, start: Value
    ) -> Value:
        assert self.sign is not None and self.narrow is not None and self.wide is not None
        lanes = start.type.lanes
        ones = f.const(i16.vector(2 * lanes), 1)
        for group, (size, signed) in enumerate(words):
            activations = self.sign(f, self.word(f, a, at + 4 * group, lanes), signed)
            start = start + self.wide(f, self.narrow(f, size, activations), ones)
        return start


@dataclass(frozen=True)
class WideDots(Dots):
    """Even and odd elements of a word, extended to 16 bits."""

    instr: Instr | None = None

    def __repr__(self) -> str:
        assert self.instr is not None
        return f"WideDots({self.instr.llvm_name})"

    def prepare(self, f: Kernel, word: Value) -> tuple[Value, ...]:
        both = f.bitcast(word, i16.vector(word.type.lanes // 2))
        return f.and_(both, 0xFF), f.lshr(both, 8)

    def run(
        self, f: Kernel, words: Sequence[tuple[Value, ...]], a: Value, at: int, start: Value
    ) -> Value:
        assert self.instr is not None
        lanes = start.type.lanes
        for group, (even, odd) in enumerate(words):
            word = self.word(f, a, at + 4 * group, lanes)
            both = f.bitcast(word, i16.vector(2 * lanes))
            start = start + self.instr(f, even, f.ashr(f.shl(both, 8), 8))
            start = start + self.instr(f, odd, f.ashr(both, 8))
        return start


@dataclass(frozen=True)
class SingleDots(Dots):
    """One element of each word at a time."""

    def prepare(self, f: Kernel, word: Value) -> tuple[Value, ...]:
        whole = f.bitcast(word, i32.vector(word.type.lanes // 4))
        return tuple(f.and_(f.lshr(whole, 8 * place), 0xFF) for place in range(4))

    def run(
        self, f: Kernel, words: Sequence[tuple[Value, ...]], a: Value, at: int, start: Value
    ) -> Value:
        for group, parts in enumerate(words):
            for place, part in enumerate(parts):
                activation = f.convert(f.load(i8, f.offset(a, at + 4 * group + place)), i32)
                start = start + part * f.splat(activation, start.type.lanes)
        return start


def choose_dots(target: Target, largest: int, zero: int, lanes: int) -> Dots:
    """The fastest exact form for weights from 0 to `largest`, of which `zero` is subtracted."""
    unsigned, signed = dot_u8s8(target), dot_s8s8(target)
    if unsigned is not None and unsigned.result.lanes == lanes:
        return FourDots(largest, instr=unsigned)
    if signed is not None and signed.result.lanes == lanes:
        return FourDots(largest, 128 if largest > 127 else 0, instr=signed)
    narrow, wide = pairs_u8s8(target), pairs_s16s16(target)
    if wide is not None and wide.result.lanes == lanes:
        if narrow is not None and largest * _LARGEST_PAIR < 2**15:
            return PairDots(largest, narrow=narrow, wide=wide)
        sign = with_signs(target)
        fits = narrow is not None and narrow.result.lanes == 2 * lanes
        if zero == 128 and sign is not None and sign.result.lanes == 4 * lanes and fits:
            return SignedDots(largest, 128, sign=sign, narrow=narrow, wide=wide)
        return WideDots(largest, instr=wide)
    return SingleDots(largest)
