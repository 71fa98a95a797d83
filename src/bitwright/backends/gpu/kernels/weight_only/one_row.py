"""One row times packed weights in a single kernel, as Triton text.

The sum is in f32. A weight costs two instructions: a mask cuts its bits out of the word, and the
result, read as an f32, is a denormal number, q * 2**(bit - 149) exactly; one multiply-add takes it
times the row's element, which has been multiplied by the inverse power of two. (Numbers up to bit
23 are q * 2**(bit - 149) too: the lowest exponent has the unit of denormal numbers.)

What computes the row can be part of the kernel (`RowSource`): a norm, whose sum every program
computes again.

`is_paired` products compute columns n and n + N/2 in one program; the epilogue combines the two
(gate and value of a gated layer).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import indent

from bitwright.backends.gpu.codegen.source import WAIT, Config, Grid, cdiv
from bitwright.backends.gpu.kernels.weight_only.few_rows import PackedProduct
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.ir.dim import Size
from bitwright.lir.buffer import View

EXPONENT = 56
"""The row is multiplied by 2**EXPONENT: numbers below 2**70 do not overflow."""
UNIT = 2.0 ** (149 - EXPONENT)
"""The value of a sum's unit."""
UNITS = {bit: 2.0 ** (EXPONENT - (bit if bit < 24 else bit - 24)) for bit in range(0, 32, 4)}
"""What an element is multiplied by, by the bit where its weight begins."""
LINE_WORDS = 32
"""Of a line of the L2 cache."""
SIGNS = -2139062144
"""0x80808080: makes signed bytes unsigned ones, 128 more."""


@dataclass(frozen=True)
class RowSource:
    """How a program computes elements of the row."""

    views: Mapping[str, View]
    values: Mapping[str, Size] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    """Statements before the elements: sums of the whole row. They use the size K."""
    element: tuple[str, ...] = ()
    """Statements that compute `v` (f32) from `at`, an index tile, where `here` is true."""


def plain(x: View) -> RowSource:
    """A row in memory."""
    return RowSource({"x": x}, element=("v = tl.load(x + at, here, other=0.0).to(tl.float32)",))


def renamed(lines: Sequence[str], suffix: str, kept: Collection[str]) -> list[str]:
    """Statements whose variables have other names, but for `kept`: two copies do not meet."""
    text = "\n".join(lines)
    names = set(re.findall(r"^(\w+) =", text, re.MULTILINE)) - set(kept)
    for name in names:
        text = re.sub(rf"\b{name}\b", f"{name}{suffix}", text)
    return text.split("\n")


@dataclass(frozen=True)
class OneRow:
    facts: PackedProduct
    source: RowSource
    parts: int
    is_paired: bool = False

    @property
    def columns(self) -> int:
        """Columns of the grid."""
        return self.facts.columns // 2 if self.is_paired else self.facts.columns

    @property
    def _copies(self) -> tuple[str, ...]:
        return ("", "_1") if self.is_paired else ("",)

    @property
    def _has_one_scale(self) -> bool:
        """Whether a column has one scale, which is applied after the sum."""
        return self.facts.block >= self.facts.depth

    def body(self, tail: str) -> str:
        """`tail` runs on `acc` [1, BN], and on `acc_1` if paired."""
        facts = self.facts
        lines = [
            f"N: tl.constexpr = {facts.columns}",
            f"WIDTH: tl.constexpr = {self.columns}",
            f"K: tl.constexpr = {facts.depth}",
            f"WORDS: tl.constexpr = {facts.groups * facts.per_group}",
            f"BLOCK: tl.constexpr = {facts.block}",
            "BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK",
            "M: tl.constexpr = 1",
            f"PER: tl.constexpr = (WORDS // {facts.per_group} + PARTS - 1) // PARTS "
            f"* {facts.per_group}",
            "STEPS: tl.constexpr = (PER + BW - 1) // BW",
            "columns = tl.program_id(0) * BN + tl.arange(0, BN)",
            "part = tl.program_id(1)",
            "i = tl.arange(0, 4)",
            *(f"sums{c} = tl.zeros((BN, BW), tl.float32)" for c in self._copies),
            "row_sums = tl.zeros((BW,), tl.float32)",
            "if STEPS == 1:",  # weights first: they arrive while the row is computed
            *_inside(["step = 0", *self._weights(), WAIT, *self.source.before]),
            *_inside([*self._row(), *self._products()]),
            "else:",
            *_inside([*self._prefetch(), WAIT, *self.source.before]),
            "    for step in tl.range(STEPS, num_stages=STAGES):",
            *_inside(_inside([*self._weights(), *self._row(), *self._products()])),
        ]
        for c in self._copies:
            lines.append(f"acc{c} = tl.sum(sums{c}, 1)")
            if self._has_one_scale:
                where = f"(columns + {self._offset(c)}) * BLOCKS"
                lines.append(
                    f"acc{c} = acc{c} * {UNIT!r} - ({self._zero(where, c)}) * tl.sum(row_sums, 0)"
                )
                load = f"tl.load(scale + {where}, columns < WIDTH, other=0.0)"
                lines.append(f"acc{c} = acc{c} * {load}.to(tl.float32)")
            lines.append(f"acc{c} = acc{c}[None, :]")
        lines += ["row = tl.zeros((1, 1), tl.int64)", "column = columns[None, :]"]
        if self.parts > 1:
            for c in self._copies:
                where = f"partial + part * N + column + {self._offset(c)}"
                lines.append(f"tl.store({where}, acc{c}, mask=column < WIDTH)")
        else:
            lines.append(tail)
        return "\n".join(lines) + "\n"

    def _offset(self, copy: str) -> str:
        return "WIDTH" if copy else "0"

    def _zero(self, where: str, copy: str) -> str:
        """What is subtracted from the unsigned numbers of a column that has one scale."""
        if not self.facts.has_zero:
            return f"{float(self.shift)}"
        load = f"tl.load(zero + {where}, columns < WIDTH, other=0)"
        return f"{load}.to(tl.float32) + {float(self.shift)}"

    @property
    def shift(self) -> int:
        """The unsigned number that stands for a stored zero, besides the zero point."""
        return self.facts.offset + (0 if self.facts.is_narrow else 128)

    def _weights(self) -> list[str]:
        lines = [
            "at_word = part * PER + step * BW + tl.arange(0, BW)",
            "known = (at_word < (part + 1) * PER) & (at_word < WORDS)",
            "inside = (columns < WIDTH)[:, None] & known[None, :]",
        ]
        per_word = 8 if self.facts.is_narrow else 4
        for c in self._copies:
            column = f"(columns + {self._offset(c)})"
            where = f"q + {column}[:, None].to(tl.int64) * WORDS + at_word[None, :]"
            lines.append(f"word{c} = tl.load({where}, mask=inside, other=0)")
            if self._has_one_scale:
                continue
            where = f"{column}[:, None] * BLOCKS + (at_word * {per_word} // BLOCK)[None, :]"
            load = f"tl.load(scale + {where}, mask=inside, other=0.0)"
            lines.append(f"s{c} = {load}.to(tl.float32)")
            if self.facts.has_zero:
                load = f"tl.load(zero + {where}, mask=inside, other=0)"
                lines.append(f"z{c} = {load}.to(tl.float32)")
        return lines

    def _prefetch(self) -> list[str]:
        """Statements that bring the program's weights to the L2 cache."""
        words = cdiv(self.facts.groups, self.parts) * self.facts.per_group
        lines = 1 << max(cdiv(words, LINE_WORDS) - 1, 0).bit_length()
        found = [
            f"at_line = part * PER + tl.arange(0, {lines}) * {LINE_WORDS}",
            "at_line = tl.minimum(at_line, WORDS - 1)",
        ]
        for c in self._copies:
            column = f"tl.minimum(columns, WIDTH - 1) + {self._offset(c)}"
            row = f"({column})[:, None].to(tl.int64) * WORDS"
            found.append(f"bw_prefetch(q + {row} + at_line[None, :])")
        return found

    def _row(self) -> list[str]:
        """place0, place1, ...: the row's elements at each place of a word, times its unit; and
        `row_sum`, the sum of a word's elements."""
        lines: list[str] = []
        width = 8 if self.facts.is_narrow else 4
        for half in range(width // 4):
            units = [UNITS[b] for b in self._bits[4 * half : 4 * half + 4]]
            unit = " + ".join(f"tl.where(i == {n}, {u!r}, 0.0)" for n, u in enumerate(units))
            first = 4 * half
            lines += [
                f"at = at_word[:, None] * {width} + {first} + i[None, :]",
                "here = known[:, None] & (at < K)",
                *self.source.element,
                f"row_sum{half} = tl.sum(v, 1)",
                f"v = v * ({unit})[None, :]",
                "v_even, v_odd = tl.split(tl.reshape(v, (BW, 2, 2)))",
                f"place{first}, place{first + 2} = tl.split(v_even)",
                f"place{first + 1}, place{first + 3} = tl.split(v_odd)",
            ]
        sums = " + ".join(f"row_sum{half}" for half in range(width // 4))
        return [*lines, f"row_sum = {sums}"]

    @property
    def _bits(self) -> tuple[int, ...]:
        """The bit of a word where the number of each element begins, 24 or more for a shift."""
        return (0, 8, 16, 24, 4, 12, 20, 28) if self.facts.is_narrow else (0, 8, 16, 24)

    def _products(self) -> list[str]:
        facts = self.facts
        ones = 15 if facts.is_narrow else 255
        lines = []
        for c in self._copies:
            word = f"word{c}"
            if not facts.is_narrow:
                lines.append(f"{word} = {word} ^ {SIGNS}")
            lines.append(f"last = ({word} >> 24) & 255")
            terms = []
            for number, bit in enumerate(self._bits):
                source = (
                    f"(last & {ones << (bit - 24)})" if bit >= 24 else (f"({word} & {ones << bit})")
                )
                terms.append(f"{source}.to(tl.float32, bitcast=True) * place{number}[None, :]")
            lines.append(f"term = {terms[0]}")
            lines += [f"term += {term}" for term in terms[1:]]
            if self._has_one_scale:
                lines.append(f"sums{c} += term")
                continue
            zero = f"{float(self.shift)} + z{c}" if facts.has_zero else f"{float(self.shift)}"
            if self.shift or facts.has_zero:
                lines.append(f"term = term * {UNIT!r} - ({zero}) * row_sum[None, :]")
            else:
                lines.append(f"term = term * {UNIT!r}")
            lines.append(f"sums{c} += term * s{c}")
        if self._has_one_scale:
            lines.append("row_sums += row_sum")
        return lines


def _inside(lines: Sequence[str]) -> list[str]:
    return [indent(line, "    ") for line in lines]


CANDIDATES = (
    # columns, words of a column, warps, stages
    (8, 128, 4, 1),
    (16, 64, 4, 1),
    (4, 128, 4, 1),
    (8, 256, 8, 1),
    (4, 512, 8, 1),
    (4, 256, 4, 1),
    (2, 256, 4, 1),
    (16, 128, 8, 1),
    (8, 128, 4, 3),
)


def configs(machine: Machine, one: OneRow) -> tuple[Config, ...]:
    """Candidates; first those that give every multiprocessor work and waste few words."""
    words = cdiv(one.facts.groups, one.parts) * one.facts.per_group

    def block(wanted: int) -> int:
        return min(wanted, 1 << max(words - 1, 0).bit_length())

    def cost(candidate: Sequence[int]) -> tuple[float, int]:
        columns, wanted, _warps, _stages = candidate
        programs = cdiv(one.columns, columns) * one.parts
        waste = cdiv(words, block(wanted)) * block(wanted) / words
        waves = cdiv(programs, 2 * machine.multiprocessors) * 2 * machine.multiprocessors / programs
        return waste * max(waves, 1.0), CANDIDATES.index(tuple(candidate))

    found: dict[str, Config] = {}
    for columns, wanted, warps, stages in sorted(CANDIDATES, key=cost):
        constants = {"BN": columns, "BW": block(wanted), "PARTS": one.parts, "STAGES": stages}
        config = Config(constants, warps, stages)
        found.setdefault(config.name, config)
    return tuple(found.values())


def parts_of(machine: Machine, one_columns: int, groups: int) -> int:
    """Into how many parts the groups are split: 1 where the columns alone fill the device."""
    programs = cdiv(one_columns, 8)
    return max(min(cdiv(machine.multiprocessors, programs), groups // 32, 16), 1)


def grid(one: OneRow) -> Grid:
    def programs(size: Mapping[str, int]) -> Sequence[int]:
        return cdiv(one.columns, size["BN"]), size["PARTS"]

    return programs
