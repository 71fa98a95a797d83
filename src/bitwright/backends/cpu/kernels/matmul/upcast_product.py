"""Half-precision products by the f32 kernel, with rows and panels converted once for many tiles.

Each thread converts the rows of a block when it starts the block, and each panel before its tiles.
Both are in a buffer on the thread's stack that fits the L2 cache:

    buffer = panel[k][columns], then rows[block][k]

The f32 product then runs with half the memory traffic. Products with few rows are bound by the
weights, which are read once: they use `dot.half_dot.UpcastDot` directly.
"""

from __future__ import annotations

from dataclasses import replace

from bitwright.backends.cpu.codegen.emit import Value, f32
from bitwright.backends.cpu.kernels.matmul.dot.amx import AmxSplitF16Dot
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import F32_DOT, DotProduct
from bitwright.backends.cpu.kernels.matmul.dot.half_dot import UpcastDot
from bitwright.backends.cpu.kernels.matmul.dot.split_half_dot import SplitF16Product
from bitwright.backends.cpu.kernels.matmul.matmul import Product
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, best_tile
from bitwright.target import Target

BUFFER_FLOATS = 96 << 10
"""f32 elements in a thread's buffer."""
LEAST_TILES, MANY_TILES = 3, 12
"""The fewest tiles of rows for which converting a panel is faster, and the fewest that the buffer
must hold: with fewer, panels would be converted too often."""


def choose_upcast(
    target: Target, dot: DotProduct, depth: int, columns: int, rows: object
) -> tuple[UpcastDot, Tile] | None:
    """The dot product and tile of an upcast product; None where it does not apply."""
    if not isinstance(dot, UpcastDot):
        return None
    tile = best_tile(target, columns)
    few = isinstance(rows, int) and rows < LEAST_TILES * tile.rows
    if few or not 0 < depth <= BUFFER_FLOATS // (tile.columns + MANY_TILES * tile.rows):
        return None
    return replace(dot, whole=True), tile


def tiles_in_buffer(tile: Tile, depth: int) -> int:
    """How many tiles of rows fit in the buffer besides a panel."""
    return (BUFFER_FLOATS // depth - tile.columns) // tile.rows


def emit_half_product(product: Product) -> None:
    """Emits a product of any element type: upcast where its dot product says so and there are
    enough rows, split into planes for `AmxSplitF16Dot`."""
    f, dot = product.f, product.dot
    if isinstance(dot, AmxSplitF16Dot):
        SplitF16Product(product).emit()
        return
    if not (isinstance(dot, UpcastDot) and dot.whole):
        product.emit()
        return
    with f.if_(f.ge(product.rows, LEAST_TILES * product.tile.rows)) as branch:
        _UpcastProduct(product, dot).emit()
    with branch.else_():
        product.emit()


class _UpcastProduct(Product):
    def __init__(self, narrow: Product, half: UpcastDot) -> None:
        self.narrow, self.half = narrow, half
        super().__init__(narrow.f, narrow.tile, narrow.epilogue, F32_DOT)
        self.panel = self.f.scratch(f32, BUFFER_FLOATS)
        self.block = self.f.gep(f32, self.panel, self.depth * self.tile.columns)
        self.first: Value = self.f.index(0)
        """The first row of the block."""

    def total_steps(self) -> Value:
        return self.narrow.depth

    def result_offset(self, row: Value) -> Value:
        return self.narrow.result_offset(row)

    def row_address(self, row: Value) -> Value:
        return self.f.gep(f32, self.block, (row - self.first) * self.depth)

    def add_products(
        self, rows: list[Value], w: Value, sums: list[Value], ahead: Value | None
    ) -> list[Value]:
        return self.add_run(rows, w, sums, self.depth, ahead)[1]

    def begin_block(
        self, is_new: Value, first: Value, top: Value, tall: Value, left: Value
    ) -> None:
        """Converts the rows of a new block; only those of one panel's tiles if the thread has no
        more."""
        f, height, lanes = self.f, self.tile.rows, self.tile.lanes
        alone = f.le(top + left, tall)
        begin = (first + f.select(alone, top, 0)) * height
        count = f.select(alone, left, tall) * height
        half = self.half.element.vector(lanes)
        self.first = first * height
        end = f.select(is_new, f.min(begin + count, self.rows), begin)
        with f.loop(begin, end) as loop:
            row, to = self.narrow.row_address(loop.index), self.row_address(loop.index)

            def widen(at: Value, mask: Value | None, row: Value = row, to: Value = to) -> None:
                f.store(f.convert(f.load(half, row, at, mask=mask), f32), to, at, mask=mask)

            f.vectors(0, self.depth, lanes, widen)

    def _run_panel(self, panel: Value, top: Value, count: Value) -> None:
        f, tile = self.f, self.tile
        line = tile.columns * self.half.unit.total_bytes
        w = f.offset(self.panels(), panel * (self.depth * line))
        with f.loop(0, self.depth, nonempty=True) as loop:
            parts = self.half.load_rhs(f, f.offset(w, loop.index * line), tile.vectors, tile.lanes)
            for v, part in enumerate(parts):
                at = loop.index * tile.columns + v * tile.lanes
                f.store(part, self.panel, at, align=self.vector.total_bytes)
        bottom = f.min(top + count * tile.rows, self.rows)
        size = self.depth * line
        self.run_tiles(panel, top, bottom, self.panel, f.offset(w, size), size)
