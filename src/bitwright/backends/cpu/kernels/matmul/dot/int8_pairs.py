"""Products of u8 by s8 with `vpmaddubsw`, made exact.

The instruction multiplies 8-bit integers and adds neighbours in 16 bits, where a sum saturates. A
pair of weights whose positive parts add up to at most 128, and whose negative parts do, cannot
saturate against any u8 (255 · 128 < 2^15). Weights are split when the program is made:

    w = main + rest        no pair of `main` can saturate, `rest` is 0 for most groups of four

    Σ x w = Σ x main + Σ x rest

`main` goes through all of k, three instructions for four products in each lane: the pairs in 16
bits, two of them added to 32 bits (`vpmaddwd` with ones), the sum. `rest` goes through those groups
of k that have any, vector by vector of columns: each entry says where its group lies in a row.

    rest_begins[columns / lanes]    the first entry of a vector of columns, and the end behind it
    rest_places[entry][levels + 1]  windows of a convolution, and the place in a run
    rest[entry][lanes][4]           weights

The 16-bit products of `kernels.matmul.dot.int16_dot` take four instructions for the same, so this pays where few
groups have a rest. How many do depends on which weights are neighbours: `kernels.matmul.reorder` brings
rows, block by block, into an order of k that has few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i8, i16, i32, i64
from bitwright.backends.cpu.codegen.instr import (
    Instr,
    dot_s8s8,
    dot_u8s8,
    pairs_s16s16,
    pairs_u8s8,
)
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.target import Target

Array = np.ndarray[Any, Any]
GROUP = 4
LARGEST = 128
"""What the weights of one sign in a pair may add up to."""
MOST_REST = 0.22
"""The part of all steps, counted by vectors of columns, that may have a rest: 16-bit products take
4 / 3 of the instructions, and reach a little less of their peak (1.27 of the time, measured)."""


class Product(Protocol):
    """What `corrected` asks of the product that it is part of."""

    f: Kernel
    tile: Tile

    def place_in_row(self, places: Value) -> Value:
        """Bytes from the start of a row to the group that `rest_places` names here."""


@dataclass(frozen=True)
class SplitPairs(Int8Dot):
    """Four products and their sum are three instructions."""

    pairs: Instr | None = None
    narrow: Instr | None = None
    levels: int = 0
    """Levels of windows around the runs of a row."""
    group = GROUP

    def __repr__(self) -> str:
        assert self.narrow is not None
        return f"SplitPairs({self.narrow.llvm_name}, {self.form}, {self.levels})"

    @property
    def shift(self) -> int:
        """Signed values have their top bit flipped when they are brought into order."""
        return -128 if self.signed else 0

    @property
    def pointers(self) -> tuple[str, ...]:
        return (*super().pointers, "rest", "rest_places", "rest_begins")

    def number(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return self._at(f, f.offset(row, step * GROUP), lanes)

    def _at(self, f: Kernel, place: Value, lanes: int) -> Value:
        word = f.load(i32, place, align=1)
        return f.bitcast(f.splat(word, lanes), i8.vector(GROUP * lanes))

    def multiply(self, f: Kernel, number: Value, part: Value, total: Value) -> Value:
        assert self.pairs is not None and self.narrow is not None
        sums = self.narrow(f, number, part)
        return total + self.pairs(f, sums, f.const(i16.vector(sums.type.lanes), 1))

    def corrected(
        self, product: Product, rows: Sequence[Value], column: Value, sums: list[Value]
    ) -> list[Value]:
        f, tile = product.f, product.tile
        found, lanes = list(sums), tile.lanes
        vector = f.udiv(column, lanes)
        for v in range(tile.vectors):
            begin, end = (
                f.convert(f.load(i32, f.args.pointer("rest_begins"), vector + v + i), i64)
                for i in (0, 1)
            )
            with f.loop(begin, end, carry=found[v :: tile.vectors]) as loop:
                at = f.gep(i32, f.args.pointer("rest_places"), loop.index * (self.levels + 1))
                place = product.place_in_row(at)
                width = GROUP * lanes
                part = f.load(
                    i8.vector(width), f.args.pointer("rest"), loop.index * width, align=width
                )
                totals = [
                    self.multiply(f, self._at(f, f.offset(row, place), lanes), part, total)
                    for row, total in zip(rows, loop.carried, strict=True)
                ]
                loop.next(*totals)
            found[v :: tile.vectors] = loop.results
        return found


@dataclass(frozen=True, eq=False)
class SplitWeights:
    """Signed weights w[runs, run, n] in two parts; `run` is a number of whole groups.

    `counts` are the sizes of the levels of windows that `runs` counts through.
    """

    whole: Array
    lanes: int
    counts: tuple[int, ...] = ()

    @cached_property
    def main(self) -> Array:
        """The weights, less what could make a pair saturate: the second weight gives way."""
        pairs = self.whole.astype(np.int16).reshape(len(self.whole), -1, 2, self.whole.shape[-1])
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        high = LARGEST - np.maximum(first, 0)
        low = -LARGEST - np.minimum(first, 0)
        kept = np.stack([first, np.clip(second, low, high)], axis=2)
        return kept.reshape(self.whole.shape).astype(np.int8)

    @cached_property
    def _rest(self) -> Array:
        """rest[steps, vectors, lanes, 4]."""
        runs, run, columns = self.whole.shape
        vectors = -(-columns // self.lanes)
        padded = np.zeros((runs * run, vectors * self.lanes), np.int8)
        padded[:, :columns] = (self.whole - self.main).reshape(-1, columns)
        return padded.reshape(-1, GROUP, vectors, self.lanes).transpose(0, 2, 3, 1)

    @cached_property
    def _entries(self) -> tuple[Array, Array]:
        """The vector and the step of every entry, ordered by vector."""
        return np.nonzero(self._rest.any(axis=(2, 3)).T)  # type: ignore[return-value]

    @property
    def part(self) -> float:
        """The part of all steps and vectors that have a rest."""
        steps, vectors = self._rest.shape[:2]
        return len(self._entries[0]) / max(steps * vectors, 1)

    def arrays(self, tile: Tile) -> dict[str, Array]:
        """What the kernel reads for tiles of so many vectors."""
        vector, step = self._entries
        _, run, columns = self.whole.shape
        vectors = -(-columns // tile.columns) * tile.vectors
        begins = np.searchsorted(vector, np.arange(vectors + 1)).astype(np.int32)
        window, inner = np.divmod(step, run // GROUP)
        levels = np.unravel_index(window, self.counts) if self.counts else ()
        places = np.stack([*levels, inner * GROUP], axis=1).astype(np.int32)
        return {
            "rest": _some(np.ascontiguousarray(self._rest[step, vector])),
            "rest_places": _some(places),
            "rest_begins": begins,
        }


def _some(array: Array) -> Array:
    """The array, or one entry that nothing reads where there is none."""
    return array if array.size else np.zeros((1, *array.shape[1:]), array.dtype)


def split_pairs(
    target: Target, signed: bool, offset: bool = False, levels: int = 0
) -> SplitPairs | None:
    """For rows that are read in runs of whole groups; None where another instruction is better."""
    pairs, narrow = pairs_s16s16(target), pairs_u8s8(target)
    if pairs is None or narrow is None or dot_u8s8(target) or dot_s8s8(target):
        return None
    return SplitPairs(signed, False, 0, offset, pairs, narrow, levels)
