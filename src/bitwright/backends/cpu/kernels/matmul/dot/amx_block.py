"""A block of 32 × 32 sums in tiles, while a product goes through k (`kernels.matmul.dot.amx`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i1, i32, i64
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import Numbers

ROWS, BYTES = 16, 64
"""Rows of a tile, and bytes of a row."""
SIZE = 2 * ROWS
"""Rows and columns of a block."""
_LINE = SIZE * i32.bytes
"""Bytes of a row of sums."""
_PANEL = ROWS * 2 * BYTES
"""Bytes of a panel that a step takes."""


class Tiles(Protocol):
    """How tiles are held and multiplied."""

    def zeros(self, f: Kernel) -> list[Value]:
        """A tile of sums that are 0."""

    def sums(self, f: Kernel, pointer: Value, stride: Value) -> list[Value]:
        """A tile of sums from memory; `stride` counts bytes between its rows."""

    def read(self, f: Kernel, pointer: Value, stride: Value) -> Any:
        """A tile of numbers."""

    def dot(self, f: Kernel, total: list[Value], a: Any, b: Any) -> list[Value]:
        """The sums with the products of two tiles of numbers."""

    def write(self, f: Kernel, total: list[Value], pointer: Value, stride: Value) -> None: ...


@dataclass(frozen=True)
class BlockRows:
    """Where the rows of a block begin, if they lie `stride` bytes apart in both of its halves."""

    start: Value
    stride: Value
    lower: Value
    """Bytes from the first row to the first of the second half."""
    is_even: Value
    run: Value
    """Neighbouring numbers of a row."""


class TileRun:
    """The sums of one block of a product, in tiles, and the rows that they read."""

    def __init__(self, f: Kernel, numbers: Numbers, sums: Value) -> None:
        element = numbers.element
        self.tiles: Tiles = numbers.tiles
        self.f, self.element, self.sums, self.parts = f, element, sums, numbers.parts
        self.plane: Value = f.index(0)
        """Bytes from one plane of the rows to the next, where there are several."""
        self.step = BYTES // element.bytes
        """Numbers of a row that one instruction takes."""
        self.copies = f.scratch(element, SIZE * self.step)
        self.apart = f.scratch(i64, SIZE)
        """How many bytes behind the first row each row begins."""
        self.rows: Value = f.index(0)
        self.stride = self.lower = self.rows
        self.is_even: Value = f.const(i1, 1)

    def start(
        self, rows: BlockRows, others: Callable[[], list[Value]], left: Value, begin: list[Value]
    ) -> list[Value]:
        """The sums of a block of `left` rows, every row of which begins with these vectors.

        `others` finds where each row begins, which is asked where rows are copied.
        """
        f = self.f
        self.rows, self.stride, self.lower = left, rows.stride, rows.lower
        self.is_even = f.and_(f.eq(left, SIZE), rows.is_even)
        has_rest = f.ne(f.urem(rows.run, self.step), 0)
        with f.if_(f.or_(f.not_(self.is_even), has_rest)):
            for i, row in enumerate(others()):
                f.store(f.distance(rows.start, row), self.apart, i)
        for v, value in enumerate(begin):
            f.store(value, self.sums, v * ROWS)
        halves = [f.offset(self.sums, right * BYTES) for right in (0, 1)] * 2
        return [part for at in halves for part in self.tiles.sums(f, at, f.index(0))]

    def add(
        self, row: Value, w: Value, sums: list[Value], count: Value
    ) -> tuple[Value, list[Value]]:
        """The sums after `count` numbers from `row` on, and where the weights go on."""
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
        """The tiles of both halves of the block, from where their rows lie."""
        f = self.f
        return [self.tiles.read(f, f.offset(start, at), self.stride) for at in (0, self.lower)]

    def _copied(self, start: Value, mask: Value | None = None) -> list[Any]:
        """The same, from rows that are copied side by side first."""
        f = self.f
        with f.loop(0, self.rows, nonempty=True) as loop:
            there = f.offset(start, f.load(i64, self.apart, loop.index))
            numbers = f.load(self.element.vector(self.step), there, mask=mask)
            f.store(numbers, self.copies, loop.index * self.step)
        starts = [f.offset(self.copies, half * ROWS * BYTES) for half in (0, 1)]
        return [self.tiles.read(f, start, f.index(BYTES)) for start in starts]

    def _dots(
        self, read: Callable[[Value], list[Any]], row: Value, carried: tuple[Value, ...]
    ) -> list[Value]:
        """One step of four tiles, for each plane of the rows."""
        f, (w, *sums) = self.f, carried
        size, line, b, last = len(sums) // 4, f.index(2 * BYTES), [], -1
        tiles = [list(sums[n * size : (n + 1) * size]) for n in range(4)]
        for plane, part in self.parts:
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
        """Where the four tiles of sums lie in the scratch, [32][32]."""
        f = self.f
        corners = [(down, right) for down in (0, 1) for right in (0, 1)]
        return [f.offset(self.sums, down * ROWS * _LINE + right * BYTES) for down, right in corners]

    def finish(self, sums: list[Value]) -> None:
        """The sums to the scratch."""
        f, size = self.f, len(sums) // 4
        for n, place in enumerate(self._places()):
            self.tiles.write(f, sums[n * size : (n + 1) * size], place, f.index(_LINE))
