"""A block of 32 × 32 sums in tiles, while a product goes through k (`kernels.tiles`)."""

from __future__ import annotations

from typing import Any, Protocol

from bitwright.backends.cpu.emit import Kernel, Value, bf16, f32, i64

ROWS, STEP = 16, 32
"""Rows of a tile, and numbers of a step."""
SIZE = 2 * ROWS
"""Rows and columns of a block."""
BYTES = 64
"""Of a row of a tile."""


class Tiles(Protocol):
    """How tiles are held and multiplied."""

    def zero(self, f: Kernel) -> list[Value]:
        """A tile of sums, all 0."""

    def read(self, f: Kernel, pointer: Value, stride: Value) -> Any:
        """A tile of numbers; `stride` counts bytes between its rows."""

    def dot(self, f: Kernel, total: list[Value], a: Any, b: Any) -> list[Value]:
        """The sums with the products of two tiles of numbers."""

    def write(self, f: Kernel, total: list[Value], pointer: Value, stride: Value) -> None: ...


class TileRun:
    """The sums of one block of a product, in tiles, and the rows that they read."""

    def __init__(self, f: Kernel, tiles: Tiles, sums: Value) -> None:
        self.f, self.tiles, self.sums = f, tiles, sums
        self.copies = f.scratch(bf16, SIZE * STEP)
        self.apart = f.scratch(i64, SIZE)
        """How many bytes behind the first row each row begins."""
        self.rows: Value = f.index(0)
        self.stride: Value | None = None

    def start(self, rows: list[Value], left: Value, stride: Value | None) -> list[Value]:
        """Sums of 0 for a block of `left` rows; `stride` is None where it differs."""
        f = self.f
        self.rows, self.stride = left, stride
        for i, row in enumerate(rows):
            f.store(f.distance(rows[0], row), self.apart, i)
        zero = f.const(bf16.vector(STEP), 0.0)
        for i in range(SIZE):
            f.store(zero, self.copies, i * STEP)
        return [part for _ in range(4) for part in self.tiles.zero(f)]

    def add(
        self, row: Value, w: Value, sums: list[Value], count: Value
    ) -> tuple[Value, list[Value]]:
        """The sums after `count` numbers from `row` on, and where the weights go on."""
        f = self.f
        steps = f.udiv(count, STEP)
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
        with f.if_(f.lt(steps * STEP, count), loop.results) as branch:
            rest = f.mask(count - steps * STEP, STEP, 16)
            self._copy(f.offset(row, steps * BYTES), rest)
            branch.next(*self._dots(self._copied(), loop.results))
        return branch.results[0], list(branch.results[1:])

    def _copy(self, start: Value, mask: Value | None) -> None:
        f = self.f
        with f.loop(0, self.rows, nonempty=True) as loop:
            there = f.offset(start, f.load(i64, self.apart, loop.index))
            numbers = f.load(bf16.vector(STEP), there, mask=mask)
            f.store(numbers, self.copies, loop.index * STEP)

    def _copied(self) -> list[Any]:
        f = self.f
        starts = [f.gep(bf16, self.copies, half * ROWS * STEP) for half in (0, 1)]
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

    def finish(self, sums: list[Value]) -> None:
        """The sums to the scratch, [32][32]."""
        f = self.f
        size, line = len(sums) // 4, SIZE * f32.bytes
        for n in range(4):
            down, right = divmod(n, 2)
            place = f.offset(self.sums, down * ROWS * line + right * BYTES)
            self.tiles.write(f, sums[n * size : (n + 1) * size], place, f.index(line))
