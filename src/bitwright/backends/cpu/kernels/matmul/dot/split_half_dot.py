"""Dot products of f16 by AMX, each value as a sum of two bf16 (`kernels.matmul.dot.amx`).

Each thread splits the rows of a block into three planes on its stack:

    y[0] = bf16(x)    y[1] = x - y[0], exactly    y[2] = y[0]

y[1] and y[2] hold 0 where x is not finite. bf16 has 8 of the 11 significant bits of f16 and a wider
exponent range, so y[1] needs at most 3 bits and no value is subnormal. Rows are padded with 0 to
whole steps.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Value, bf16, f16, f32, i1
from bitwright.backends.cpu.kernels.matmul.dot.amx import AmxSplitF16Dot
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import ROWS, SIZE, BlockRows
from bitwright.backends.cpu.kernels.matmul.matmul import Product

PLANE = 64 << 10
"""Elements of a plane."""
PLANES = 3
MOST_DEPTH = PLANE // SIZE


def blocks_in_plane(depth: int) -> int:
    """How many blocks of 32 rows fit in a plane."""
    return PLANE // (SIZE * max(1, -(-depth // AmxSplitF16Dot.group)) * AmxSplitF16Dot.group)


class SplitF16Product(Product):
    """A product whose rows are split into planes, one block of rows at a time."""

    def __init__(self, plain: Product) -> None:
        super().__init__(plain.f, plain.tile, plain.epilogue, plain.dot)
        f = self.f
        assert self.amx is not None
        self.amx.plane = f.index(PLANE * bf16.bytes)
        self.planes = f.scratch(bf16, PLANES * PLANE)
        self.pitch = self.depth * self.dot.group
        """Elements of a row, padded to whole steps."""
        self.first: Value = f.index(0)
        """The first row of the block."""

    def row_address(self, row: Value) -> Value:
        return self.f.gep(bf16, self.planes, (row - self.first) * self.pitch)

    def block_rows(self, row: Value) -> BlockRows:
        stride = self.pitch * bf16.bytes
        return BlockRows(
            self.row_address(row), stride, stride * ROWS, self.f.const(i1, 1), self.pitch
        )

    def add_products(
        self, rows: list[Value], w: Value, sums: list[Value], ahead: Value | None
    ) -> list[Value]:
        return self.add_run(rows, w, sums, self.pitch, ahead)[1]

    def begin_block(
        self, is_new: Value, first: Value, top: Value, tall: Value, left: Value
    ) -> None:
        """Splits the rows of a new block; only those of one panel's tiles if the thread has no
        more."""
        f, height, lanes = self.f, self.tile.rows, self.tile.lanes
        alone = f.le(top + left, tall)
        begin = (first + f.select(alone, top, 0)) * height
        count = f.select(alone, left, tall) * height
        end = f.select(is_new, f.min(begin + count, self.rows), begin)
        self.first = first * height
        depth = f.args.size("depth")
        with f.loop(begin, end) as loop:
            x = f.gep(f16, f.args.pointer("a"), loop.index * f.args.size("a_stride"))
            y = self.row_address(loop.index)
            with f.loop(0, self.pitch, lanes) as columns:
                inside = f.mask(depth - columns.index, lanes, 16)
                half = f.load(f16.vector(lanes), x, columns.index, mask=inside)
                for number, plane in enumerate(self._split(f.convert(half, f32))):
                    f.store(plane, y, columns.index + number * PLANE)

    def _split(self, x: Value) -> list[Value]:
        f = self.f
        high = f.convert(x, bf16)
        back = f.convert(high, f32)
        is_finite = f.lt(f.abs(x), float("inf"))
        rest = f.select(is_finite, x - back, 0.0)
        again = f.select(is_finite, back, 0.0)
        return [high, f.convert(rest, bf16), f.convert(again, bf16)]
