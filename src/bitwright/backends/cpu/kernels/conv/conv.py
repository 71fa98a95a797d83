"""A dense channels-last convolution as an implicit matrix product.

Rows are the result's pixels in the order of images, lines and columns; row r starts in a at

    (r // (oh·ow))·image + (r // ow mod oh)·line + (r mod ow)·pixel

and the sum over k covers `run` contiguous elements (the pixels of a filter line with all their
channels) within up to two window loops: k = (i, j, inner) reads at i·step1 + j·step2 + inner.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, i1, i32, i64
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import ROWS, BlockRows
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import F32_DOT, DotProduct
from bitwright.backends.cpu.kernels.matmul.epilogue import NO_EPILOGUE, Epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import Product
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, step_cycles
from bitwright.backends.cpu.kernels.matmul.upcast_product import emit_half_product
from bitwright.target import Target


@dataclass(frozen=True)
class Conv:
    """The compile-time parameters of the kernel."""

    tile: Tile
    levels: int = 0
    """Window loops around the inner run: 0, 1 or 2."""
    is_flat: bool = False
    """Whether all pixels have the constant stride `pixel`."""
    is_strided: bool = False
    """Whether lines and images of the result have strides of their own."""
    epilogue: Epilogue = NO_EPILOGUE
    dot: DotProduct = F32_DOT
    pixel: int = 0
    """The pixel stride, where each tile is part of one line and the stride is constant; else 0."""

    @property
    def signature(self) -> Signature:
        rows: tuple[str, ...] = ("pixel",) if self.is_flat else ("pixel", "line", "image")
        rows += ("y_line", "y_image") if self.is_strided else ()
        rows += () if self.is_flat and not self.is_strided else ("ow", "oh")
        levels = range(1, self.levels + 1)
        windows = tuple(f"{what}{n}" for n in levels for what in ("count", "step"))
        return Signature(
            ("a", "w", "y", *self.dot.pointers, *self.epilogue.pointers),
            ("rows", "columns", "run", "block", "y_stride", *rows, *windows, *self.epilogue.sizes),
        )


def emit_conv(module: Module, name: str, conv: Conv) -> Signature:
    """Emits the kernel; `block` is the number of row tiles whose part of a fits the cache."""
    with module.kernel(name, conv.signature) as f, f.subnormals_as_zeros():
        emit_half_product((_LineProduct if conv.pixel else _ImageProduct)(f, conv))
    return conv.signature


class _ImageProduct(Product):
    def __init__(self, f: Kernel, conv: Conv) -> None:
        self.levels, self.is_flat, self.is_strided = conv.levels, conv.is_flat, conv.is_strided
        super().__init__(f, conv.tile, conv.epilogue, conv.dot)

    def total_steps(self) -> Value:
        f = self.f
        depth = self.steps(f.args.size("run"))
        for level in range(1, self.levels + 1):
            depth = depth * f.args.size(f"count{level}")
        return depth

    def row_address(self, row: Value) -> Value:
        return self.row_addresses(row, 1)[0]

    def row_addresses(self, row: Value, count: int) -> list[Value]:
        """One division for all: the next pixel follows, or starts a line or an image."""
        f = self.f
        a, pixel, element = f.args.pointer("a"), f.args.size("pixel"), self.dot.element
        if self.is_flat:
            return [f.gep(element, a, (row + i) * pixel) for i in range(count)]
        width, height = f.args.size("ow"), f.args.size("oh")
        line = f.udiv(row, width)
        image = f.udiv(line, height)
        x, y = row - line * width, line - image * height
        start = y * f.args.size("line") + image * f.args.size("image")
        # strides from the end of a line, and from the end of an image
        to_line = f.args.size("line")
        to_image = f.args.size("image") - (height - 1) * f.args.size("line")
        found = [f.gep(element, a, start + x * pixel)]
        for _ in range(count - 1):
            x = x + 1
            ends = f.eq(x, width)
            below = y + 1
            is_last = f.eq(below, height)
            start = f.select(ends, start + f.select(is_last, to_image, to_line), start)
            y = f.select(ends, f.select(is_last, 0, below), y)
            x = f.select(ends, 0, x)
            found.append(f.gep(element, a, start + x * pixel))
        return found

    def block_rows(self, row: Value) -> BlockRows:
        """Pixels of one line have a constant stride."""
        f, run = self.f, self.f.args.size("run")
        stride = f.args.size("pixel") * self.dot.element.bytes
        if self.is_flat:
            return BlockRows(self.row_address(row), stride, stride * ROWS, f.const(i1, 1), run)
        lower, width = row + ROWS, f.args.size("ow")
        starts = [self.row_address(first) for first in (row, lower)]
        inside = [f.le(f.urem(first, width) + ROWS, width) for first in (row, lower)]
        return BlockRows(starts[0], stride, f.distance(*starts), f.combine(inside, f.and_), run)

    def group_offset(self, places: Value) -> Value:
        f = self.f
        *windows, inner = (
            f.convert(f.load(i32, places, level), i64) for level in range(self.levels + 1)
        )
        for level, window in enumerate(windows, 1):
            inner = inner + window * f.args.size(f"step{level}")
        return inner

    def result_offset(self, row: Value) -> Value:
        if not self.is_strided:
            return super().result_offset(row)
        f = self.f
        width, height = f.args.size("ow"), f.args.size("oh")
        line = f.udiv(row, width)
        image = f.udiv(line, height)
        down = (line - image * height) * f.args.size("y_line") + image * f.args.size("y_image")
        return (row - line * width) * self.y_stride + down

    def add_products(
        self, rows: list[Value], w: Value, sums: list[Value], ahead: Value | None
    ) -> list[Value]:
        f = self.f
        if self.levels == 0:
            return self.add_run(rows, w, sums, f.args.size("run"), ahead)[1]
        return self._add_windows(1, rows, w, sums)[1]

    def _add_windows(
        self, level: int, rows: list[Value], w: Value, sums: list[Value]
    ) -> tuple[Value, list[Value]]:
        """The address of the next weights, and the sums over the window loops from `level` on."""
        f = self.f
        if level > self.levels:
            return self.add_run(rows, w, sums, f.args.size("run"), None)
        step = f.args.size(f"step{level}")
        with f.loop(0, f.args.size(f"count{level}"), carry=(w, *sums)) as loop:
            moved = [f.gep(self.dot.element, pointer, loop.index * step) for pointer in rows]
            after, inner = self._add_windows(
                level + 1, moved, loop.carried[0], list(loop.carried[1:])
            )
            loop.next(after, *inner)
        return loop.results[0], list(loop.results[1:])


class _LineProduct(_ImageProduct):
    """A product whose tiles are full and part of one line: all rows of a tile are addressed from
    its first row by a constant stride."""

    def __init__(self, f: Kernel, conv: Conv) -> None:
        super().__init__(f, conv)
        self.pixel = conv.pixel

    def _tile(
        self, row: Value, bottom: Value, column: Value, w: Value, ahead: Value | None
    ) -> None:
        f, rows = self.f, self.tile.rows
        masks = self._masks(column)
        self.initial = self.dot.initial_sums(f, column, masks, self.tile.lanes)
        first = f.opaque(self.row_address(row))
        sums = self.add_products([first], w, self.initial * rows, ahead)
        if self.epilogue.is_light:
            for i in range(rows):
                part = sums[i * self.width : (i + 1) * self.width]
                self._finish_row(row + i, column, masks, part)
            return
        self._spill(sums)
        self._store_scratch(row, f.index(rows), column, masks)

    def _multiply(
        self, rows: list[Value], w: Value, step: Value, sums: list[Value], left: Value | None = None
    ) -> None:
        f, element = self.f, self.dot.element
        pixels = [f.gep(element, rows[0], i * self.pixel) for i in range(self.tile.rows)]
        super()._multiply(pixels, w, step, sums, left)


def line_tile(
    target: Target, columns: int, line: int, extra: int, steps: int, other: Tile, is_flat: bool
) -> Tile | None:
    """A tile whose rows divide a line; None where the `other` tile, whose rows have separate
    addresses, is faster.

    `extra` counts the vectors of sums that a row has besides those of its columns, `steps` the
    steps of a sum.
    """
    lanes, registers = target.lanes(32), target.vector_registers

    def cost(tile: Tile, overhead: float) -> float:
        cycles = steps * step_cycles(tile.rows, tile.vectors + extra) + overhead
        return -(-columns // tile.columns) * cycles / tile.rows

    best, least = None, cost(other, (_ADDRESS_FLAT if is_flat else _ADDRESS) * other.rows)
    for vectors in range(1, 5):
        width = vectors + extra
        for rows in range(1, min(line, registers) + 1):
            sums = rows * width
            if line % rows or sums + width + 4 > registers or sums < _FEWEST_SUMS:
                continue
            tile = Tile(rows, vectors, lanes)
            if (found := cost(tile, _ADDRESS)) < least:
                best, least = tile, found
    return best


_FEWEST_SUMS = 10
"""The fewest sums that hide the latency of two multipliers, five cycles each."""
_ADDRESS, _ADDRESS_FLAT = 20, 3
"""Measured cycles to compute the address of a row: any row, or the one after the last."""
