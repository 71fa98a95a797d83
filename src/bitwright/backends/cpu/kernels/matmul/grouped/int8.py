"""Rows of 8-bit values, sorted by expert, times the panels of their expert.

    for each expert e:  rows start … start + counts[e] of a, times panels[e], into those rows of y

The number of rows per expert is data. Threads share the tiles of each expert. Experts write
different rows, so no barrier is needed between them. Counts that do not sum to the number of rows
are a fault; no row beyond the last is touched.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i64
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import DotProduct
from bitwright.backends.cpu.kernels.matmul.epilogue import Epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import Product
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.kernels.movement.fault import record_fault

GROUPED_SIZES = ("experts", "rows", "columns", "depth", "a_stride", "y_stride", "block", "node")


class GroupedProduct(Product):
    """`expert` and `first` are the current expert and its first row while tiles are emitted."""

    def __init__(self, f: Kernel, tile: Tile, epilogue: Epilogue, dot: DotProduct) -> None:
        super().__init__(f, tile, epilogue, dot)
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
            first, tall, _, panel, top = self.tile_position(at, height, panels, tiles)
            count = f.min(tall - top, end - at)
            self._run_panel(panel, (first + top) * tile.rows, count)
            after = at + count
            runs.next(after, again=f.lt(after, end))

    def panels(self) -> Value:
        return self.f.offset(self.f.args.pointer("w"), self.expert * self.matrix_bytes())

    def constant_offset(self, column: Value) -> Value:
        return self.expert * self.columns + column

    def row_address(self, row: Value) -> Value:
        return super().row_address(self.first + row)

    def result_offset(self, row: Value) -> Value:
        return super().result_offset(self.first + row)
