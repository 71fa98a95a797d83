"""A block of 32 × 32 sums in tiles, while a product goes through k (`kernels.tiles`)."""

from __future__ import annotations

from typing import Any, Protocol

from bitwright.backends.cpu.emit import Kernel, Type, Value, i32, i64

ROWS, BYTES = 16, 64
"""Rows of a tile, and bytes of a row."""
SIZE = 2 * ROWS
"""Rows and columns of a block."""
_LINE = SIZE * i32.bytes
"""Bytes of a row of sums."""


class Tiles(Protocol):
    """How tiles are held and multiplied."""

    def sums(self, f: Kernel, pointer: Value, stride: Value) -> list[Value]:
        """A tile of sums from memory; `stride` counts bytes between its rows."""

    def read(self, f: Kernel, pointer: Value, stride: Value) -> Any:
        """A tile of numbers."""

    def dot(self, f: Kernel, total: list[Value], a: Any, b: Any) -> list[Value]:
        """The sums with the products of two tiles of numbers."""

    def write(self, f: Kernel, total: list[Value], pointer: Value, stride: Value) -> None: ...


class TileRun:
    """The sums of one block of a product, in tiles, and the rows that they read."""

    def __init__(self, f: Kernel, tiles: Tiles, element: Type, sums: Value) -> None:
        self.f, self.tiles, self.element, self.sums = f, tiles, element, sums
        self.step = BYTES // element.bytes
        """Numbers of a row that one instruction takes."""
        self.copies = f.scratch(element, SIZE * self.step)
        self.apart = f.scratch(i64, SIZE)
        """How many bytes behind the first row each row begins."""
        self.rows: Value = f.index(0)
        self.stride: Value | None = None

    def start(
        self, rows: list[Value], left: Value, stride: Value | None, begin: list[Value]
    ) -> list[Value]:
        """The sums of a block of `left` rows, every row of which begins with these vectors;
        `stride` is None where it differs."""
        f = self.f
        self.rows, self.stride = left, stride
        for i, row in enumerate(rows):
            f.store(f.distance(rows[0], row), self.apart, i)
        zero = f.const(self.element.vector(self.step), 0)
        for i in range(SIZE):
            f.store(zero, self.copies, i * self.step)
            for v, value in enumerate(begin):
                f.store(value, self.sums, i * SIZE + v * ROWS)
        places = self._places()
        return [part for at in places for part in self.tiles.sums(f, at, f.index(_LINE))]

    def add(
        self, row: Value, w: Value, sums: list[Value], count: Value
    ) -> tuple[Value, list[Value]]:
        """The sums after `count` numbers from `row` on, and where the weights go on."""
        f = self.f
        steps = f.udiv(count, self.step)
        whole = f.index(0)
        if self.stride is not None:
            whole = f.select(f.eq(self.rows, SIZE), steps, 0)
        carry: tuple[Value, ...] = (w, *sums)
        if self.stride is not None:
            lower = self.stride * ROWS
            with f.loop(0, whole, carry=carry) as loop:
                here = f.offset(row, loop.index * BYTES)
                a = [self.tiles.read(f, f.offset(here, at), self.stride) for at in (0, lower)]
                loop.next(*self._dots(a, loop.carried))
            carry = loop.results
        with f.loop(whole, steps, carry=carry) as loop:
            self._copy(f.offset(row, loop.index * BYTES), None)
            loop.next(*self._dots(self._copied(), loop.carried))
        with f.if_(f.lt(steps * self.step, count), loop.results) as branch:
            rest = f.mask(count - steps * self.step, self.step, self.element.bits)
            self._copy(f.offset(row, steps * BYTES), rest)
            branch.next(*self._dots(self._copied(), loop.results))
        return branch.results[0], list(branch.results[1:])

    def _copy(self, start: Value, mask: Value | None) -> None:
        f = self.f
        with f.loop(0, self.rows, nonempty=True) as loop:
            there = f.offset(start, f.load(i64, self.apart, loop.index))
            numbers = f.load(self.element.vector(self.step), there, mask=mask)
            f.store(numbers, self.copies, loop.index * self.step)

    def _copied(self) -> list[Any]:
        f = self.f
        starts = [f.offset(self.copies, half * ROWS * BYTES) for half in (0, 1)]
        return [self.tiles.read(f, start, f.index(BYTES)) for start in starts]

    def _dots(self, a: list[Any], carried: tuple[Value, ...]) -> list[Value]:
        """One step of four tiles."""
        f, (w, *sums) = self.f, carried
        line = f.index(2 * BYTES)
        b = [self.tiles.read(f, f.offset(w, half * BYTES), line) for half in (0, 1)]
        size = len(sums) // 4
        parts = [sums[n * size : (n + 1) * size] for n in range(4)]
        found = [self.tiles.dot(f, parts[2 * i + j], a[i], b[j]) for i in (0, 1) for j in (0, 1)]
        return [f.offset(w, ROWS * 2 * BYTES), *(part for tile in found for part in tile)]

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
