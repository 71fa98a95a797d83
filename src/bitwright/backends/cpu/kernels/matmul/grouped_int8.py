"""Rows of 8-bit codes, sorted by expert, times the panels of their expert.

    for each expert e:  rows start … start + counts[e] of a, times panels[e], into those rows of y

The number of rows of an expert is data. Threads share out the tiles of each expert; no two experts
write the same row, so that they do not wait for each other. Counts that do not add up to the rows
are a fault, and no row beyond the last is touched.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i64
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import Numbers
from bitwright.backends.cpu.kernels.matmul.matmul import Epilogue, Product, Tile
from bitwright.backends.cpu.kernels.movement.fault import record_fault

GROUPED_SIZES = ("experts", "rows", "columns", "depth", "a_stride", "y_stride", "block", "node")


class GroupedProduct(Product):
    """The expert at hand, and where its rows begin, are kept while tiles are emitted."""

    def __init__(self, f: Kernel, tile: Tile, epilogue: Epilogue, numbers: Numbers) -> None:
        super().__init__(f, tile, epilogue, numbers)
        self.all_rows = self.rows
        self.expert = self.first = f.index(0)

    def emit(self) -> None:
        f = self.f
        with f.loop(0, f.args.size("experts"), carry=(f.index(0),)) as loop:
            (start,) = loop.carried
            given = f.load(i64, f.args.pointer("counts"), loop.index)
            count = f.min(f.max(given, 0), self.all_rows - start)
            with f.if_(f.not_(f.eq(given, count))):
                record_fault(f, given)
            self.expert, self.first, self.rows = loop.index, start, count
            self._one_expert()
            loop.next(start + count)
        (end,) = loop.results
        with f.if_(f.not_(f.eq(end, self.all_rows))):
            record_fault(f, end)

    def _one_expert(self) -> None:
        f, tile = self.f, self.tile
        panels = f.udiv(self.columns + (tile.columns - 1), tile.columns)
        tiles = f.udiv(self.rows + (tile.rows - 1), tile.rows)
        height = f.max(f.min(f.args.size("block"), tiles), 1)
        begin, end = f.share(tiles * panels)
        with f.if_(f.lt(begin, end)), f.do_while(carry=(begin,)) as runs:
            (at,) = runs.carried
            first, tall, _, panel, top = self.in_order(at, height, panels, tiles)
            count = f.min(tall - top, end - at)
            self._run(panel, (first + top) * tile.rows, count)
            after = at + count
            runs.next(after, again=f.lt(after, end))

    def panels(self) -> Value:
        f, tile = self.f, self.tile
        count = f.udiv(self.columns + (tile.columns - 1), tile.columns)
        matrix_bytes = count * self.depth * (tile.columns * self.numbers.unit.total_bytes)
        return f.offset(f.args.pointer("w"), self.expert * matrix_bytes)

    def constants_at(self, column: Value) -> Value:
        return self.expert * self.columns + column

    def address(self, row: Value) -> Value:
        return super().address(self.first + row)

    def result_at(self, row: Value) -> Value:
        return super().result_at(self.first + row)
