"""A dense convolution with channels innermost, as a product of matrices that never exist.

Rows are the result's pixels, image after image and line after line; row r begins in a at

    (r // (oh·ow))·image + (r // ow mod oh)·line + (r mod ow)·pixel

and the sum over k runs through `run` neighbouring numbers (a filter line's pixels with all their
channels) within up to two levels of windows: k = (i, j, inner) reads at i·step1 + j·step2 + inner.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, i1, i32, i64
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import ROWS, BlockRows
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import REAL, Numbers
from bitwright.backends.cpu.kernels.matmul.matmul import (
    NO_EPILOGUE,
    Epilogue,
    Product,
    Tile,
)
from bitwright.backends.cpu.kernels.matmul.register_tile import step_cycles
from bitwright.backends.cpu.kernels.matmul.upcast_product import emit_half
from bitwright.target import Target


@dataclass(frozen=True)
class Conv:
    """What shapes the code."""

    tile: Tile
    levels: int = 0
    """Levels of windows around the inner run: 0, 1 or 2."""
    is_flat: bool = False
    """Whether the pixels lie `pixel` apart from the first to the last."""
    is_apart: bool = False
    """Whether the result's lines do not lie behind each other, as its pixels do."""
    epilogue: Epilogue = NO_EPILOGUE
    numbers: Numbers = REAL
    pixel: int = 0
    """How far the pixels of a tile lie apart, where each tile is part of one line; else 0."""

    @property
    def signature(self) -> Signature:
        rows = ("pixel",) if self.is_flat else ("pixel", "line", "image")
        rows += ("y_line", "y_image") if self.is_apart else ()
        rows += () if self.is_flat and not self.is_apart else ("ow", "oh")
        levels = range(1, self.levels + 1)
        windows = tuple(f"{what}{n}" for n in levels for what in ("count", "step"))
        return Signature(
            ("a", "w", "y", *self.numbers.pointers, *self.epilogue.pointers),
            ("rows", "columns", "run", "block", "y_stride", *rows, *windows, *self.epilogue.sizes),
        )


def emit_conv(module: Module, name: str, conv: Conv) -> Signature:
    """The kernel; `block` is the number of tile rows whose part of a stays in the cache."""
    with module.kernel(name, conv.signature) as f, f.subnormals_as_zeros():
        emit_half((_LineProduct if conv.pixel else _ImageProduct)(f, conv))
    return conv.signature


class _ImageProduct(Product):
    def __init__(self, f: Kernel, conv: Conv) -> None:
        self.levels, self.is_flat, self.is_apart = conv.levels, conv.is_flat, conv.is_apart
        super().__init__(f, conv.tile, conv.epilogue, conv.numbers)

    def whole_depth(self) -> Value:
        f = self.f
        depth = self.steps(f.args.size("run"))
        for level in range(1, self.levels + 1):
            depth = depth * f.args.size(f"count{level}")
        return depth

    def address(self, row: Value) -> Value:
        return self.addresses(row, 1)[0]

    def addresses(self, row: Value, count: int) -> list[Value]:
        """One division for all of them: the next pixel follows, or begins a line or an image."""
        f = self.f
        a, pixel, element = f.args.pointer("a"), f.args.size("pixel"), self.numbers.element
        if self.is_flat:
            return [f.gep(element, a, (row + i) * pixel) for i in range(count)]
        width, height = f.args.size("ow"), f.args.size("oh")
        line = f.udiv(row, width)
        image = f.udiv(line, height)
        x, y = row - line * width, line - image * height
        start = y * f.args.size("line") + image * f.args.size("image")
        # from the end of a line to the next, and from the end of an image
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
        """Pixels of one line lie equally far apart."""
        f, run = self.f, self.f.args.size("run")
        stride = f.args.size("pixel") * self.numbers.element.bytes
        if self.is_flat:
            return BlockRows(self.address(row), stride, stride * ROWS, f.const(i1, 1), run)
        lower, width = row + ROWS, f.args.size("ow")
        starts = [self.address(first) for first in (row, lower)]
        inside = [f.le(f.urem(first, width) + ROWS, width) for first in (row, lower)]
        return BlockRows(starts[0], stride, f.distance(*starts), f.combine(inside, f.and_), run)

    def place_in_row(self, places: Value) -> Value:
        f = self.f
        *windows, inner = (
            f.convert(f.load(i32, places, level), i64) for level in range(self.levels + 1)
        )
        for level, window in enumerate(windows, 1):
            inner = inner + window * f.args.size(f"step{level}")
        return inner

    def result_at(self, row: Value) -> Value:
        if not self.is_apart:
            return super().result_at(row)
        f = self.f
        width, height = f.args.size("ow"), f.args.size("oh")
        line = f.udiv(row, width)
        image = f.udiv(line, height)
        down = (line - image * height) * f.args.size("y_line") + image * f.args.size("y_image")
        return (row - line * width) * self.y_stride + down

    def add_products(
        self, rows: list[Value], w: Value, sums: list[Value], ahead: Value
    ) -> list[Value]:
        f = self.f
        if self.levels == 0:
            return self.add_run(rows, w, sums, f.args.size("run"), ahead)[1]
        return self._level(1, rows, w, sums)[1]

    def _level(
        self, level: int, rows: list[Value], w: Value, sums: list[Value]
    ) -> tuple[Value, list[Value]]:
        """The sums over the windows from this level on, and where the weights go on."""
        f = self.f
        if level > self.levels:
            return self.add_run(rows, w, sums, f.args.size("run"), None)
        step = f.args.size(f"step{level}")
        with f.loop(0, f.args.size(f"count{level}"), carry=(w, *sums)) as loop:
            moved = [f.gep(self.numbers.element, pointer, loop.index * step) for pointer in rows]
            after, inner = self._level(level + 1, moved, loop.carried[0], list(loop.carried[1:]))
            loop.next(after, *inner)
        return loop.results[0], list(loop.results[1:])


class _LineProduct(_ImageProduct):
    """Tiles that are whole and part of one line: one address serves all their rows, which lie a
    known distance apart."""

    def __init__(self, f: Kernel, conv: Conv) -> None:
        super().__init__(f, conv)
        self.pixel = conv.pixel

    def _tile(
        self, row: Value, bottom: Value, column: Value, w: Value, ahead: Value | None
    ) -> None:
        f, rows = self.f, self.tile.rows
        masks = self._masks(column)
        self.start = self.numbers.start(f, column, masks, self.tile.lanes)
        first = f.opaque(self.address(row))
        sums = self.add_products([first], w, self.start * rows, ahead)
        if self.epilogue.is_light:
            for i in range(rows):
                part = sums[i * self.width : (i + 1) * self.width]
                self._finish_row(row + i, column, masks, part)
            return
        self._hold(sums)
        self._store(row, f.index(rows), column, masks)

    def _multiply(
        self,
        rows: list[Value],
        w: Value,
        step: Value,
        sums: list[Value],
        left: Value | None = None,
    ) -> None:
        f, element = self.f, self.numbers.element
        apart = [f.gep(element, rows[0], i * self.pixel) for i in range(self.tile.rows)]
        super()._multiply(apart, w, step, sums, left)


def line_tile(
    target: Target, columns: int, line: int, extra: int, steps: int, other: Tile, is_flat: bool
) -> Tile | None:
    """A tile whose rows divide a line, for products by one instruction; None if the `other` one,
    whose rows have addresses of their own, takes less time.

    `extra` is how many vectors of sums a row has beside those of its columns, `steps` how many
    there are to a sum.
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
"""Sums that keep two multipliers busy, each of which takes five cycles."""
_ADDRESS, _ADDRESS_FLAT = 20, 3
"""Cycles to find where a row of a tile begins, as measured: anywhere, or behind the one before."""
