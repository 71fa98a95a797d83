"""A block of 32 × 32 sums in AMX tile registers (`kernels.matmul.dot.amx`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i1, i32, i64
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import DotProduct

ROWS, BYTES = 16, 64
"""Rows of a tile, and bytes of a row."""
SIZE = 2 * ROWS
"""Rows and columns of a block."""
_LINE = SIZE * i32.bytes
"""Bytes of a row of sums."""
_PANEL = ROWS * 2 * BYTES
"""Bytes of a panel that a step takes."""


class Tiles(Protocol):
    """Operations on tile registers."""

    def zeros(self, f: Kernel) -> list[Value]:
        """A tile of zeros."""

    def sums(self, f: Kernel, pointer: Value, stride: Value) -> list[Value]:
        """A tile of sums loaded from memory; `stride` is in bytes."""

    def read(self, f: Kernel, pointer: Value, stride: Value) -> Any:
        """A tile of operands loaded from memory."""

    def dot(self, f: Kernel, total: list[Value], a: Any, b: Any) -> list[Value]:
        """The sums plus the product of two operand tiles."""

    def write(self, f: Kernel, total: list[Value], pointer: Value, stride: Value) -> None: ...


@dataclass(frozen=True)
class BlockRows:
    """The addresses of a block's rows, if both of its halves have a constant `stride` in bytes."""

    start: Value
    stride: Value
    lower: Value
    """Bytes from the first row to the first row of the second half."""
    is_even: Value
    run: Value
    """Contiguous elements of a row."""


class AmxBlock:
    """The sums of one block of a product in tile registers, and the rows that it reads."""

    def __init__(self, f: Kernel, dot: DotProduct, sums: Value) -> None:
        element = dot.element
        assert dot.tiles is not None
        self.tiles: Tiles = dot.tiles
        self.f, self.element, self.sums, self.plane_pairs = f, element, sums, dot.plane_pairs
        self.plane: Value = f.index(0)
        """Bytes between planes of the rows, where there are several."""
        self.step = BYTES // element.bytes
        """Elements of a row per instruction."""
        self.copies = f.scratch(element, SIZE * self.step)
        self.row_offsets = f.scratch(i64, SIZE)
        """Byte offsets of the rows from the first row."""
        self.rows: Value = f.index(0)
        self.stride = self.lower = self.rows
        self.is_even: Value = f.const(i1, 1)

    def start(
        self, rows: BlockRows, others: Callable[[], list[Value]], left: Value, begin: list[Value]
    ) -> list[Value]:
        """The initial sums of a block of `left` rows; every row starts with the vectors `begin`.

        `others` returns the addresses of all rows, which are needed where rows are copied.
        """
        f = self.f
        self.rows, self.stride, self.lower = left, rows.stride, rows.lower
        self.is_even = f.and_(f.eq(left, SIZE), rows.is_even)
        has_tail = f.ne(f.urem(rows.run, self.step), 0)
        with f.if_(f.or_(f.not_(self.is_even), has_tail)):
            for i, row in enumerate(others()):
                f.store(f.distance(rows.start, row), self.row_offsets, i)
        for v, value in enumerate(begin):
            f.store(value, self.sums, v * ROWS)
        halves = [f.offset(self.sums, right * BYTES) for right in (0, 1)] * 2
        return [part for at in halves for part in self.tiles.sums(f, at, f.index(0))]

    def add(
        self, row: Value, w: Value, sums: list[Value], count: Value
    ) -> tuple[Value, list[Value]]:
        """The address of the next weights, and the sums after `count` elements from `row` on."""
        f = self.f
        steps = f.udiv(count, self.step)
        whole = f.select(self.is_even, steps, 0)
        with f.loop(0, whole, carry=(w, *sums)) as loop:
            loop.next(*self._dots(self._in_place, f.offset(row, loop.index * BYTES), loop.carried))
        with f.loop(whole, steps, carry=loop.results) as loop:
            loop.next(*self._dots(self._copied, f.offset(row, loop.index * BYTES), loop.carried))
        with f.if_(f.lt(steps * self.step, count), loop.results) as branch:
            rest = f.mask(count - steps * self.step, self.step, self.element.bits)
            copied = partial(self._copied, mask=rest)
            branch.next(*self._dots(copied, f.offset(row, steps * BYTES), loop.results))
        return branch.results[0], list(branch.results[1:])

    def _in_place(self, start: Value) -> list[Any]:
        """The tiles of both halves of the block, loaded in place."""
        f = self.f
        return [self.tiles.read(f, f.offset(start, at), self.stride) for at in (0, self.lower)]

    def _copied(self, start: Value, mask: Value | None = None) -> list[Any]:
        """The tiles of both halves of the block, from rows copied to a scratch."""
        f = self.f
        with f.loop(0, self.rows, nonempty=True) as loop:
            there = f.offset(start, f.load(i64, self.row_offsets, loop.index))
            values = f.load(self.element.vector(self.step), there, mask=mask)
            f.store(values, self.copies, loop.index * self.step)
        starts = [f.offset(self.copies, half * ROWS * BYTES) for half in (0, 1)]
        return [self.tiles.read(f, start, f.index(BYTES)) for start in starts]

    def _dots(
        self, read: Callable[[Value], list[Any]], row: Value, carried: tuple[Value, ...]
    ) -> list[Value]:
        """One step of all four tiles, for each plane of the rows."""
        f, (w, *sums) = self.f, carried
        size, line, b, last = len(sums) // 4, f.index(2 * BYTES), [], -1
        tiles = [list(sums[n * size : (n + 1) * size]) for n in range(4)]
        for plane, part in self.plane_pairs:
            if part != last:
                starts = [f.offset(w, part * _PANEL + half * BYTES) for half in (0, 1)]
                b, last = [self.tiles.read(f, start, line) for start in starts], part
            a = read(f.offset(row, self.plane * plane) if plane else row)
            tiles = [
                self.tiles.dot(f, tiles[2 * i + j], a[i], b[j]) for i in (0, 1) for j in (0, 1)
            ]
        after = f.offset(w, (last + 1) * _PANEL)
        return [after, *(value for tile in tiles for value in tile)]

    def _places(self) -> list[Value]:
        """The addresses of the four tiles in the scratch [32][32]."""
        f = self.f
        corners = [(down, right) for down in (0, 1) for right in (0, 1)]
        return [f.offset(self.sums, down * ROWS * _LINE + right * BYTES) for down, right in corners]

    def finish(self, sums: list[Value]) -> None:
        """Stores the sums to the scratch."""
        f, size = self.f, len(sums) // 4
        for n, place in enumerate(self._places()):
            self.tiles.write(f, sums[n * size : (n + 1) * size], place, f.index(_LINE))
