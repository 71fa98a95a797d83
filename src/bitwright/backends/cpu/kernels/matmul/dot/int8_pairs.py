"""Exact u8 · s8 dot products by `vpmaddubsw`, which saturates.

The instruction multiplies 8-bit integers and adds neighbours with saturation to 16 bits. A pair of
weights whose positive parts sum to at most 128, and whose negative parts do, cannot saturate
against any u8 (255 · 128 < 2^15). Weights are split at compile time:

    w = main + rest        no pair of `main` can saturate; `rest` is 0 for most groups of four

    Σ x w = Σ x main + Σ x rest

`main` covers all of k with three instructions per four products in each lane: the pairs in 16 bits,
the sum of two pairs in 32 bits (`vpmaddwd` with ones), the accumulation. `rest` covers the groups
of k that have a rest, per vector of columns; each entry holds the place of its group in a row.

    rest_begins[columns / lanes]    the first entry of a vector of columns, and the end of the last
    rest_places[entry][levels + 1]  window indices of a convolution, and the place in a run
    rest[entry][lanes][4]           weights

16-bit products (`kernels.matmul.dot.int16_dot`) take four instructions, so the split is faster
where few groups have a rest. That depends on which weights are neighbours: `kernels.matmul.reorder`
permutes each block of k to reduce the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i8, i16, i32, i64
from bitwright.backends.cpu.codegen.instr import Instr, dot_s8s8, dot_u8s8, pairs_s16s16, pairs_u8s8
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import ProductContext
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.target import Target

Array = np.ndarray[Any, Any]
GROUP = 4
LARGEST = 128
"""The largest sum of the weights of one sign in a pair."""
MOST_REST = 0.22
"""The largest fraction of steps, counted by vectors of columns, with a rest: 16-bit products take
4 / 3 of the instructions (1.27 of the time, measured)."""


@dataclass(frozen=True)
class Int8PairDot(Int8Dot):
    """Three instructions per four products and their sum."""

    madd_s16: Instr | None = None
    madd_u8s8: Instr | None = None
    levels: int = 0
    """Window loops around the runs of a row."""
    group, name = GROUP, "u8s8s32_pmaddubsw"

    def __repr__(self) -> str:
        assert self.madd_u8s8 is not None
        return f"Int8PairDot({self.madd_u8s8.llvm_name}, {self.form}, {self.levels})"

    @property
    def shift(self) -> int:
        """The reorder kernel flips the top bit of signed values."""
        return -128 if self.signed else 0

    @property
    def pointers(self) -> tuple[str, ...]:
        return (*super().pointers, "rest", "rest_places", "rest_begins")

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return self._broadcast_at(f, f.offset(row, step * GROUP), lanes)

    def _broadcast_at(self, f: Kernel, place: Value, lanes: int) -> Value:
        word = f.load(i32, place, align=1)
        return f.bitcast(f.splat(word, lanes), i8.vector(GROUP * lanes))

    def multiply_add(self, f: Kernel, lhs: Value, rhs: Value, total: Value) -> Value:
        assert self.madd_s16 is not None and self.madd_u8s8 is not None
        sums = self.madd_u8s8(f, lhs, rhs)
        return total + self.madd_s16(f, sums, f.const(i16.vector(sums.type.lanes), 1))

    def add_corrections(
        self, product: ProductContext, rows: Sequence[Value], column: Value, sums: list[Value]
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
                place = product.group_offset(at)
                width = GROUP * lanes
                rhs = f.load(
                    i8.vector(width), f.args.pointer("rest"), loop.index * width, align=width
                )
                totals = [
                    self.multiply_add(
                        f, self._broadcast_at(f, f.offset(row, place), lanes), rhs, total
                    )
                    for row, total in zip(rows, loop.carried, strict=True)
                ]
                loop.next(*totals)
            found[v :: tile.vectors] = loop.results
        return found


@dataclass(frozen=True, eq=False)
class SplitWeights:
    """Signed weights w[runs, run, n] split in two parts; `run` is a multiple of the group size.

    `counts` are the sizes of the window loops that `runs` enumerates.
    """

    whole: Array
    lanes: int
    counts: tuple[int, ...] = ()

    @cached_property
    def main(self) -> Array:
        """The weights, with the second of each pair clipped so that no pair saturates."""
        pairs = self.whole.astype(np.int16).reshape(len(self.whole), -1, 2, self.whole.shape[-1])
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        high = LARGEST - np.maximum(first, 0)
        low = -LARGEST - np.minimum(first, 0)
        clipped = np.stack([first, np.clip(second, low, high)], axis=2)
        return clipped.reshape(self.whole.shape).astype(np.int8)

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
        vector, step = np.nonzero(self._rest.any(axis=(2, 3)).T)
        return vector, step

    @property
    def rest_fraction(self) -> float:
        """The fraction of steps, counted by vectors of columns, that have a rest."""
        steps, vectors = self._rest.shape[:2]
        return len(self._entries[0]) / max(int(steps * vectors), 1)

    def arrays(self, tile: Tile) -> dict[str, Array]:
        """The arrays that the kernel reads, for a register tile."""
        vector, step = self._entries
        _, run, columns = self.whole.shape
        vectors = -(-columns // tile.columns) * tile.vectors
        begins = np.searchsorted(vector, np.arange(vectors + 1)).astype(np.int32)
        window, inner = np.divmod(step, run // GROUP)
        levels = np.unravel_index(window, self.counts) if self.counts else ()
        places = np.stack([*levels, inner * GROUP], axis=1).astype(np.int32)
        return {
            "rest": _not_empty(np.ascontiguousarray(self._rest[step, vector])),
            "rest_places": _not_empty(places),
            "rest_begins": begins,
        }


def _not_empty(array: Array) -> Array:
    """The array, or one unused entry where it is empty."""
    return array if array.size else np.zeros((1, *array.shape[1:]), array.dtype)


def int8_pair_dot(
    target: Target, signed: bool, offset: bool = False, levels: int = 0
) -> Int8PairDot | None:
    """The dot product for rows that are read in whole groups; None where the target has a faster
    one or lacks the instructions."""
    madd_s16, madd_u8s8 = pairs_s16s16(target), pairs_u8s8(target)
    if madd_s16 is None or madd_u8s8 is None or dot_u8s8(target) or dot_s8s8(target):
        return None
    return Int8PairDot(signed, False, 0, offset, madd_s16, madd_u8s8, levels)
