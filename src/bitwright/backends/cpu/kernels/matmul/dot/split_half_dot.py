"""Products of f16 in tiles, as sums of two bf16 (`kernels.matmul.dot.amx.SplitDots`).

A thread lays the rows of a block out in three planes of its stack when it comes to it:

    y[0] = bf16(x)    y[1] = x - y[0], exactly    y[2] = y[0]

where 0 stands in y[1] and y[2] for what is not finite. A bf16 has 8 bits of an f16's 11 and a wider
range, so the rest has 3 at most and no result is subnormal. Rows are filled up with 0 to whole
steps.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Value, bf16, f16, f32, i1
from bitwright.backends.cpu.kernels.matmul.dot.amx import SplitDots
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import ROWS, SIZE, BlockRows
from bitwright.backends.cpu.kernels.matmul.matmul import Product

PLANE = 64 << 10
"""Numbers of a plane."""
PLANES = 3
MOST_DEPTH = PLANE // SIZE


def blocks_in_plane(depth: int) -> int:
    """Blocks of 32 rows for which there is room."""
    return PLANE // (SIZE * max(1, -(-depth // SplitDots.group)) * SplitDots.group)


class SplitProduct(Product):
    def __init__(self, plain: Product) -> None:
        super().__init__(plain.f, plain.tile, plain.epilogue, plain.numbers)
        f = self.f
        assert self.run is not None
        self.run.plane = f.index(PLANE * bf16.bytes)
        self.planes = f.scratch(bf16, PLANES * PLANE)
        self.pitch = self.depth * self.numbers.group
        """Numbers of a row, filled up."""
        self.first: Value = f.index(0)
        """The first row of the block."""

    def address(self, row: Value) -> Value:
        return self.f.gep(bf16, self.planes, (row - self.first) * self.pitch)

    def block_rows(self, row: Value) -> BlockRows:
        stride = self.pitch * bf16.bytes
        return BlockRows(self.address(row), stride, stride * ROWS, self.f.const(i1, 1), self.pitch)

    def add_products(
        self, rows: list[Value], w: Value, sums: list[Value], ahead: Value | None
    ) -> list[Value]:
        return self.add_run(rows, w, sums, self.pitch, ahead)[1]

    def in_block(self, is_new: Value, first: Value, top: Value, tall: Value, left: Value) -> None:
        """The rows of a new block in planes: those of one panel if the thread has no more."""
        f, height, lanes = self.f, self.tile.rows, self.tile.lanes
        alone = f.le(top + left, tall)
        begin = (first + f.select(alone, top, 0)) * height
        count = f.select(alone, left, tall) * height
        end = f.select(is_new, f.min(begin + count, self.rows), begin)
        self.first = first * height
        depth = f.args.size("depth")
        with f.loop(begin, end) as loop:
            x = f.gep(f16, f.args.pointer("a"), loop.index * f.args.size("a_stride"))
            y = self.address(loop.index)
            with f.loop(0, self.pitch, lanes) as columns:
                inside = f.mask(depth - columns.index, lanes, 16)
                half = f.load(f16.vector(lanes), x, columns.index, mask=inside)
                for number, plane in enumerate(self._planes(f.convert(half, f32))):
                    f.store(plane, y, columns.index + number * PLANE)

    def _planes(self, x: Value) -> list[Value]:
        f = self.f
        high = f.convert(x, bf16)
        back = f.convert(high, f32)
        is_finite = f.lt(f.abs(x), float("inf"))
        rest = f.select(is_finite, x - back, 0.0)
        again = f.select(is_finite, back, 0.0)
        return [high, f.convert(rest, bf16), f.convert(again, bf16)]
