"""Products of halves by f32 kernels: a block of rows and a panel become f32 once for many tiles.

A thread widens the rows of a block when it comes to it, and each panel before the tiles that it
serves; both lie in a room of its stack that the second-level cache holds:

    room = panel[k][columns], then rows[block][k]

What then runs is the f32 product, on half the bytes from beyond that cache. Few rows go the way of
`halves.Widened`: for them it is the weights that take time, and they are read once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bitwright.backends.cpu.codegen.emit import Value, f32
from bitwright.backends.cpu.kernels.matmul.dot.amx import SplitDots
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import REAL
from bitwright.backends.cpu.kernels.matmul.dot.half_dot import Widened
from bitwright.backends.cpu.kernels.matmul.dot.split_half_dot import SplitProduct
from bitwright.backends.cpu.kernels.matmul.matmul import Product
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, best_tile
from bitwright.target import Target

ROOM = 96 << 10
"""Numbers that a thread holds as f32."""
LEAST_TILES, MANY_TILES = 3, 12
"""Tiles below each other for which widening a panel pays, and those that a room must hold: panels
beyond it would be widened too often."""


def whole_way(
    target: Target, numbers: Any, depth: int, columns: int, rows: object
) -> tuple[Widened, Tile] | None:
    """The numbers and tile of a product that may go this way; None if it never does."""
    if not isinstance(numbers, Widened):
        return None
    tile = best_tile(target, columns)
    few = isinstance(rows, int) and rows < LEAST_TILES * tile.rows
    if few or not 0 < depth <= ROOM // (tile.columns + MANY_TILES * tile.rows):
        return None
    return replace(numbers, whole=True), tile


def tiles_in_room(tile: Tile, depth: int) -> int:
    """Tiles of rows for which there is room beside a panel."""
    return (ROOM // depth - tile.columns) // tile.rows


def emit_half(product: Product) -> None:
    """A product of any numbers: this way where they say so and there are rows enough, in planes
    where they are `SplitDots`, else its own way."""
    f, numbers = product.f, product.numbers
    if isinstance(numbers, SplitDots):
        SplitProduct(product).emit()
        return
    if not (isinstance(numbers, Widened) and numbers.whole):
        product.emit()
        return
    with f.if_(f.ge(product.rows, LEAST_TILES * product.tile.rows)) as branch:
        _WideProduct(product, numbers).emit()
    with branch.else_():
        product.emit()


class _WideProduct(Product):
    def __init__(self, narrow: Product, halves: Widened) -> None:
        self.narrow, self.halves = narrow, halves
        super().__init__(narrow.f, narrow.tile, narrow.epilogue, REAL)
        self.panel = self.f.scratch(f32, ROOM)
        self.block = self.f.gep(f32, self.panel, self.depth * self.tile.columns)
        self.first: Value = self.f.index(0)
        """The first row of the block."""

    def whole_depth(self) -> Value:
        return self.narrow.depth

    def result_at(self, row: Value) -> Value:
        return self.narrow.result_at(row)

    def address(self, row: Value) -> Value:
        return self.f.gep(f32, self.block, (row - self.first) * self.depth)

    def add_products(
        self, rows: list[Value], w: Value, sums: list[Value], ahead: Value | None
    ) -> list[Value]:
        return self.add_run(rows, w, sums, self.depth, ahead)[1]

    def in_block(self, is_new: Value, first: Value, top: Value, tall: Value, left: Value) -> None:
        """The rows of a new block as f32: those of one panel's tiles if the thread has no more."""
        f, height, lanes = self.f, self.tile.rows, self.tile.lanes
        alone = f.le(top + left, tall)
        begin = (first + f.select(alone, top, 0)) * height
        count = f.select(alone, left, tall) * height
        half = self.halves.element.vector(lanes)
        self.first = first * height
        end = f.select(is_new, f.min(begin + count, self.rows), begin)
        with f.loop(begin, end) as loop:
            row, to = self.narrow.address(loop.index), self.address(loop.index)

            def widen(at: Value, mask: Value | None, row: Value = row, to: Value = to) -> None:
                f.store(f.convert(f.load(half, row, at, mask=mask), f32), to, at, mask=mask)

            f.vectors(0, self.depth, lanes, widen)

    def _run(self, panel: Value, top: Value, count: Value) -> None:
        f, tile = self.f, self.tile
        line = tile.columns * self.halves.unit.total_bytes
        w = f.offset(self.panels(), panel * (self.depth * line))
        with f.loop(0, self.depth, nonempty=True) as loop:
            parts = self.halves.panel(f, f.offset(w, loop.index * line), tile.vectors, tile.lanes)
            for v, part in enumerate(parts):
                at = loop.index * tile.columns + v * tile.lanes
                f.store(part, self.panel, at, align=self.vector.total_bytes)
        bottom = f.min(top + count * tile.rows, self.rows)
        size = self.depth * line
        self.run_tiles(panel, top, bottom, self.panel, f.offset(w, size), size)
