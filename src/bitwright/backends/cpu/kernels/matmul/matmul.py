"""y[m, n] = epilogue(Σ_k a[m, k] w[k, n]), with w packed for the register tile.

`kernels.matmul.dot` defines the element types and how a step of k is multiplied.

Packing lays w out in panels [n / columns][k][columns], the last one padded with zeros, so that a
tile reads it sequentially. While the tiles of one panel run, the next panel is prefetched. A tile
holds rows × columns sums in registers over all of k: per k it loads the vectors of the panel once
and broadcasts one element of a for each row. The sums are then stored to a scratch tile, and the
epilogue runs row by row from there, masked at the right edge, so that it is emitted once for all
tile heights.

Threads share tiles. One thread forms each sum in the order of k, so results do not depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import i1, i32, i64, storage_type
from bitwright.backends.cpu.codegen.expression import to_stored
from bitwright.backends.cpu.kernels.elementwise.narrow import MOST, narrowed
from bitwright.backends.cpu.kernels.elementwise.streaming import is_streamed, settle
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import ROWS, AmxBlock, BlockRows
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import F32_DOT, DotProduct
from bitwright.backends.cpu.kernels.matmul.epilogue import NO_EPILOGUE, Epilogue
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, best_tile
from bitwright.backends.cpu.kernels.matmul.upcast_rows import STEP_BYTES, UpcastRows
from bitwright.ir.dim import Size
from bitwright.target import Target

Array = np.ndarray[Any, Any]
Sizes = dict[str, Size]
LINE = 64
"""Bytes of a cache line."""
UNROLL = LINE // STEP_BYTES
"""Steps of k per iteration of the inner loop of a full tile. Each iteration prefetches one cache
line; one prefetch per step would cost 5% of the time."""
FEW_TILES = 4
"""With fewer tiles per thread, threads have unequal shares."""
_TALL = 2
"""The largest ratio of columns to rows for which threads share a product by rows, as measured:
threads then read the same weights and different rows of a."""


def pack(w: Array, tile: Tile, dtype: Any = np.float32) -> Array:
    """Packs w[k, n] as panels [n / columns][k][columns], padded with zeros."""
    depth, columns = w.shape
    panels = -(-columns // tile.columns)
    padded = np.zeros((depth, panels * tile.columns), dtype)
    padded[:, :columns] = w
    return np.ascontiguousarray(padded.reshape(depth, panels, tile.columns).transpose(1, 0, 2))


def row_tiles_in_cache(target: Target, tile: Tile, row_bytes: int) -> int:
    """How many tiles of rows of a fit in half of the L2 cache while the panels stream through."""
    return max(1, target.l2_bytes // 2 // (tile.rows * max(1, row_bytes)))


def matmul_sizes(rows: Size, columns: Size, depth: Size, a_stride: Size, block: int) -> Sizes:
    """The sizes of a product whose result is row-major."""
    names = ("rows", "columns", "depth", "a_stride", "y_stride", "block")
    return dict(zip(names, (rows, columns, depth, a_stride, columns, block), strict=True))


def emit_matmul(
    module: Module,
    name: str,
    tile: Tile | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
    dot: DotProduct = F32_DOT,
    how: Callable[[Product], None] = lambda product: product.emit(),
) -> Signature:
    """Emits the kernel. Strides are in elements, `block` is `row_tiles_in_cache`, and `how` emits
    the product."""
    tile = tile or best_tile(module.target)
    signature = Signature(
        ("a", "w", "y", *dot.pointers, *epilogue.pointers),
        ("rows", "columns", "depth", "a_stride", "y_stride", "block", *epilogue.sizes),
    )
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        how(Product(f, tile, epilogue, dot))
        settle(f, epilogue.streams)
    return signature


class Product:
    """Emits a product. Subclasses change the addresses of rows and the loops over k."""

    def __init__(
        self, f: Kernel, tile: Tile, epilogue: Epilogue, dot: DotProduct = F32_DOT
    ) -> None:
        self.f, self.tile, self.epilogue, self.dot = f, tile, epilogue, dot
        self.rows, self.columns, self.y_stride = (
            f.args.size(name) for name in ("rows", "columns", "y_stride")
        )
        self.depth = self.total_steps()
        self.vector = dot.sum_type.vector(tile.lanes)
        self.width = tile.vectors + dot.extra
        self.scratch = f.scratch(self.vector, tile.rows * self.width)
        self.wide = UpcastRows(f, dot.element, tile.rows, tile.lanes) if dot.upcasts_rows else None
        self.amx = AmxBlock(f, dot, self.scratch) if dot.tiles else None
        self.initial: list[Value] = []
        """The initial sums of a row of the tile."""

    def emit(self) -> None:
        """Loops over blocks of rows, panels of columns and tiles, from the outermost to the
        innermost.

        Each thread gets a contiguous range of tiles in this order. The numbers of tiles per thread
        differ by at most one, and few panels are read by two threads.
        """
        f, tile = self.f, self.tile
        panels = f.udiv(self.columns + (tile.columns - 1), tile.columns)
        tiles = f.udiv(self.rows + (tile.rows - 1), tile.rows)
        height = self._block_height(tiles)
        begin, end = f.share(tiles * panels)
        with f.if_(f.lt(begin, end)), f.do_while(carry=(begin,)) as runs:
            (at,) = runs.carried
            first, tall, place, panel, top = self.tile_position(at, height, panels, tiles)
            count = f.min(tall - top, end - at)
            is_new = f.or_(f.eq(at, begin), f.eq(place, 0))
            self.begin_block(is_new, first, top, tall, end - at)
            self._run_panel(panel, (first + top) * tile.rows, count)
            after = at + count
            runs.next(after, again=f.lt(after, end))

    def tile_position(
        self, at: Value, height: Value, panels: Value, tiles: Value
    ) -> tuple[Value, Value, Value, Value, Value]:
        """The position of tile number `at`: the first row of tiles and the height of its block, its
        index in the block, its panel, and its row of tiles in the block."""
        f = self.f
        block = f.udiv(at, height * panels)
        first = block * height
        place = at - first * panels
        tall = f.min(height, tiles - first)
        panel = f.udiv(place, tall)
        return first, tall, place, panel, place - panel * tall

    def _run_panel(self, panel: Value, top: Value, count: Value) -> None:
        """Computes consecutive tiles of one panel and prefetches the next panel."""
        f, tile = self.f, self.tile
        panel_bytes = self.depth * (tile.columns * self.dot.unit.total_bytes)
        w = f.offset(self.panels(), panel * panel_bytes)
        bottom = f.min(top + count * tile.rows, self.rows)
        self.run_tiles(panel, top, bottom, w, f.offset(w, panel_bytes), panel_bytes)

    def run_tiles(
        self, panel: Value, top: Value, bottom: Value, w: Value, ahead: Value, size: Value
    ) -> None:
        """Computes the tiles of a panel with weights at `w`; each prefetches a part of the next
        panel, `size` bytes at `ahead`."""
        f, tile = self.f, self.tile
        asked = f.udiv(self.depth, UNROLL) * LINE
        with f.loop(top, bottom, tile.rows, carry=(f.index(0),)) as loop:
            (past,) = loop.carried
            self._tile(loop.index, bottom, panel * tile.columns, w, f.offset(ahead, past))
            loop.next(f.min(past + asked, size))

    def _block_height(self, tiles: Value) -> Value:
        """Tiles per block: the fewest blocks that fit the cache, of about equal height.

        With enough rows, every thread has its own blocks, so that the next kernel finds most of its
        input in the cache of the thread that wrote it.
        """
        f = self.f
        most = f.args.size("block")
        fair = f.udiv(tiles + (f.threads - 1), f.threads)
        is_tall = f.and_(f.ge(fair, FEW_TILES), f.ge(self.rows * _TALL, self.columns))
        most = f.select(is_tall, f.min(most, fair), most)
        blocks = f.max(f.udiv(tiles + (most - 1), most), 1)
        return f.max(f.udiv(tiles + (blocks - 1), blocks), 1)

    # overridden by other kinds of product

    def begin_block(
        self, is_new: Value, first: Value, top: Value, tall: Value, left: Value
    ) -> None:
        """Runs before the tiles of a block of height `tall` from tile `first` on. The thread
        continues with tile `top`, has `left` tiles left, and starts the block here if it
        `is_new`."""

    def total_steps(self) -> Value:
        """The number of steps over all of k."""
        return self.steps(self.f.args.size("depth"))

    def steps(self, run: Value) -> Value:
        """The number of steps of a run of contiguous elements."""
        group = self.dot.group
        return run if group == 1 else self.f.udiv(run + (group - 1), group)

    def matrix_bytes(self) -> Value:
        """The bytes of one packed matrix."""
        f, tile = self.f, self.tile
        count = f.udiv(self.columns + (tile.columns - 1), tile.columns)
        return count * self.depth * (tile.columns * self.dot.unit.total_bytes)

    def panels(self) -> Value:
        """The address of the packed weights."""
        return self.f.args.pointer("w")

    def constant_offset(self, column: Value) -> Value:
        """The index of a column in the per-column constants that the dot product reads."""
        return column

    def row_address(self, row: Value) -> Value:
        """The address of a row of a."""
        f = self.f
        return f.gep(self.dot.element, f.args.pointer("a"), row * f.args.size("a_stride"))

    def row_addresses(self, row: Value, count: int) -> list[Value]:
        """The addresses of `count` rows of a from `row` on."""
        return [self.row_address(row + i) for i in range(count)]

    def result_offset(self, row: Value) -> Value:
        """The offset of a row of the result, in elements of y."""
        return row * self.y_stride

    def add_products(
        self, rows: list[Value], w: Value, sums: list[Value], ahead: Value | None
    ) -> list[Value]:
        """The sums after all of k."""
        return self.add_run(rows, w, sums, self.f.args.size("depth"), ahead)[1]

    def group_offset(self, places: Value) -> Value:
        """The byte offset in a row of the group that `places` names (`dot.int8_pairs`)."""
        return self.f.convert(self.f.load(i32, places), i64)

    def block_rows(self, row: Value) -> BlockRows:
        """The layout of the rows of an AMX block."""
        f = self.f
        stride, run = f.args.size("a_stride") * self.dot.element.bytes, f.args.size("depth")
        return BlockRows(self.row_address(row), stride, stride * ROWS, f.const(i1, 1), run)

    def _tile(
        self, row: Value, bottom: Value, column: Value, w: Value, ahead: Value | None
    ) -> None:
        """Computes one tile by the lowest height that holds its rows, then applies the epilogue."""
        f, tile = self.f, self.tile
        left = f.min(bottom - row, tile.rows)
        masks = self._masks(column)
        if self.amx is not None:
            begin = self.dot.initial_sums(f, self.constant_offset(column), masks, tile.lanes)
            block, others = self.block_rows(row), partial(self.row_addresses, row, tile.rows)
            sums = self.amx.start(block, others, left, begin)
            self.amx.finish(self.add_products([block.start], w, sums, ahead))
            self._store_scratch(row, left, column, masks)
            return
        self.initial = self.dot.initial_sums(f, self.constant_offset(column), masks, tile.lanes)
        heights = list(tile.heights)
        if not self.epilogue.is_light:
            self._sum_by_height(heights, left, row, column, w, ahead)
            self._store_scratch(row, left, column, masks)
            return
        # the full height first, stored from registers: nearly every tile has it
        lower = heights[:-1]
        is_whole = f.eq(left, tile.rows)
        with f.if_(f.gt(left, lower[-1] if lower else 0)) as branch:
            rows = self._clamp_rows(self.row_addresses(row, tile.rows), left, is_whole)
            sums = self.add_products(rows, w, self.initial * tile.rows, ahead)
            sums = self.dot.add_corrections(self, rows, column, sums)
            with f.if_(is_whole) as whole:
                for i in range(tile.rows):
                    part = sums[i * self.width : (i + 1) * self.width]
                    self._finish_row(row + i, column, masks, part)
            with whole.else_():
                self._spill(sums)
        if lower:
            with branch.else_():
                self._sum_by_height(lower, left, row, column, w, ahead)
            with f.if_(f.not_(is_whole)):
                self._store_scratch(row, left, column, masks)

    def _clamp_rows(self, rows: list[Value], left: Value, is_whole: Value) -> list[Value]:
        """The addresses of a tile's rows; missing rows repeat the first and are never stored."""
        f = self.f
        with f.if_(f.not_(is_whole), rows) as branch:
            branch.next(*[f.select(f.gt(left, i), at, rows[0]) for i, at in enumerate(rows)])
        return [f.opaque(start) for start in branch.results]

    def _masks(self, column: Value) -> list[Value]:
        """The masks of a tile's existing columns, one per vector."""
        f, lanes = self.f, self.tile.lanes
        return [f.mask(self.columns - column - v * lanes, lanes) for v in range(self.tile.vectors)]

    def _finish_row(self, row: Value, column: Value, masks: list[Value], sums: list[Value]) -> None:
        """Applies the epilogue to one row of a tile and stores it."""
        f, tile, streams = self.f, self.tile, self.epilogue.streams
        if not (self._masked_stores_are_slow or streams):
            self._write_row(row, column, masks, sums)
            return
        whole = f.le(column + tile.columns, self.columns)
        if streams:
            whole = f.and_(whole, is_streamed(f, streams))
        with f.if_(whole) as branch:
            self._write_row(row, column, [None] * tile.vectors, sums, bool(streams))
        with branch.else_():
            self._write_row(row, column, masks, sums)

    @property
    def _masked_stores_are_slow(self) -> bool:
        """Whether the target lowers masked stores to one store per element."""
        return not self.f.target.has("avx512bw" if self.epilogue.narrowest < 32 else "avx512f")

    def _write_row(
        self,
        row: Value,
        column: Value,
        masks: Sequence[Value | None],
        sums: list[Value],
        stream: bool = False,
    ) -> None:
        f, tile, element = self.f, self.tile, self.epilogue.result
        totals = list(sums)
        self.dot.subtract_zero_points(f, totals, self.constant_offset(column), masks)
        y = f.gep(storage_type(element), f.args.pointer("y"), self.result_offset(row) + column)
        if self.epilogue.wide and (masks[0] is None or not self._masked_stores_are_slow):
            for first in range(0, tile.vectors, MOST):
                self._write_int8(row, column, masks, totals, first, y)
            return
        for v, mask in enumerate(masks):
            value = self.epilogue.emit(f, totals[v], row, column + v * tile.lanes, mask)
            align = self.vector.total_bytes if stream else 0
            at, value = v * tile.lanes, to_stored(f, value, element)
            f.store(value, y, at, mask=mask, align=align, stream=stream)

    def _write_int8(
        self,
        row: Value,
        column: Value,
        masks: Sequence[Value | None],
        totals: Sequence[Value],
        first: int,
        y: Value,
    ) -> None:
        """Stores up to `MOST` neighbouring vectors of 8-bit results at once."""
        f, lanes, epilogue = self.f, self.tile.lanes, self.epilogue
        assert epilogue.wide is not None
        some = range(first, min(first + MOST, self.tile.vectors))
        wide = [epilogue.wide(f, totals[v], row, column + v * lanes, masks[v]) for v in some]
        at = first * lanes
        for values in narrowed(f, wide, epilogue.result):
            here = min(values.type.lanes, len(wide) * lanes)
            if masks[first] is not None:
                left = f.min(self.columns - column - at, here)
                f.store(values, y, at, mask=f.mask(left, values.type.lanes))
            elif here == values.type.lanes:
                f.store(values, y, at)
            else:  # three of four vectors
                f.store(f.part(values, 0, 2 * lanes), y, at)
                f.store(f.part(values, 2 * lanes, lanes), y, at + 2 * lanes)
            at += here

    def _sum_by_height(
        self,
        heights: list[int],
        left: Value,
        row: Value,
        column: Value,
        w: Value,
        ahead: Value | None,
    ) -> None:
        f = self.f
        if len(heights) == 1:
            self._sum_rows(heights[0], left, row, column, w, ahead)
            return
        with f.if_(f.gt(left, heights[-2])) as branch:
            self._sum_rows(heights[-1], left, row, column, w, ahead)
        with branch.else_():
            self._sum_by_height(heights[:-1], left, row, column, w, ahead)

    def _sum_rows(
        self, height: int, left: Value, row: Value, column: Value, w: Value, ahead: Value | None
    ) -> None:
        f = self.f
        # missing rows repeat the last one and are never stored
        rows = [self.row_address(f.min(row + i, row + (left - 1))) for i in range(height)]
        sums = self.add_products(rows, w, self.initial * height, ahead)
        self._spill(self.dot.add_corrections(self, rows, column, sums))

    def _spill(self, sums: list[Value]) -> None:
        """Stores the sums of a tile to the scratch tile, for `_store_scratch`."""
        f, align = self.f, self.vector.total_bytes
        for number, total in enumerate(sums):
            f.store(total, self.scratch, number * self.tile.lanes, align=align)

    def add_run(
        self, rows: list[Value], w: Value, sums: list[Value], count: Value, ahead: Value | None
    ) -> tuple[Value, list[Value]]:
        """The address of the next weights, and the sums after `count` contiguous elements of every
        row."""
        if self.amx is not None:
            return self.amx.add(rows[0], w, sums, count)
        if self.wide is not None:
            return self.wide.add(rows, w, sums, count, ahead, self._add_run)
        return self._add_run(rows, w, sums, count, ahead)

    def _add_run(
        self, rows: list[Value], w: Value, sums: list[Value], count: Value, ahead: Value | None
    ) -> tuple[Value, list[Value]]:
        f, tile = self.f, self.tile
        steps = f.udiv(count, self.dot.group) if self.dot.group > 1 else count
        unroll = self.unroll(len(rows))
        whole = steps - f.urem(steps, unroll)
        step_bytes = tile.columns * self.dot.unit.total_bytes
        carry: tuple[Value, ...] = (w, *sums)
        loops = ((0, whole, unroll), (whole, steps, 1)) if unroll > 1 else ((0, steps, 1),)
        for start, stop, width in loops:
            with f.loop(start, stop, width, carry) as loop:
                w, *totals = loop.carried
                if width > 1 and ahead is not None:  # one line of the next panel per iteration
                    f.prefetch(f.offset(ahead, loop.index * STEP_BYTES), locality=2)
                for step in range(width):
                    self._multiply(rows, w, loop.index + step, totals)
                    w = f.offset(w, step_bytes)
                loop.next(w, *totals)
            carry = loop.results
        if self.dot.has_tail:
            left = count - steps * self.dot.group
            with f.if_(f.gt(left, 0), carry) as branch:
                totals = list(carry[1:])
                self._multiply(rows, carry[0], steps, totals, left)
                branch.next(f.offset(carry[0], step_bytes), *totals)
            carry = branch.results
        return carry[0], list(carry[1:])

    def unroll(self, height: int) -> int:
        """Steps per iteration of the inner loop. Lower tiles are rare or bound by memory."""
        return UNROLL if height == self.tile.rows else 1

    def _multiply(
        self, rows: list[Value], w: Value, step: Value, sums: list[Value], left: Value | None = None
    ) -> None:
        """Adds one step of k to all sums; `left` counts the elements of an incomplete group."""
        f, tile, dot = self.f, self.tile, self.dot
        panel = dot.load_rhs(f, w, tile.vectors, tile.lanes)
        for i, pointer in enumerate(rows):
            if left is None:
                lhs = dot.load_lhs(f, pointer, step, tile.lanes)
            else:
                lhs = dot.load_lhs_tail(f, pointer, step, left, tile.lanes)
            for v, rhs in enumerate(panel):
                at = i * self.width + v
                sums[at] = dot.multiply_add(f, lhs, rhs, sums[at])

    def _store_scratch(self, row: Value, left: Value, column: Value, masks: list[Value]) -> None:
        """Applies the epilogue to the scratch tile; emitted once for all heights."""
        f, tile = self.f, self.tile
        with f.loop(0, left, nonempty=True) as loop:
            at = loop.index * (self.width * tile.lanes)
            align = self.vector.total_bytes
            sums = [
                f.load(self.vector, self.scratch, at + v * tile.lanes, align=align)
                for v in range(self.width)
            ]
            self._finish_row(row + loop.index, column, masks, sums)
