"""y[m, n] = epilogue(Σ_k a[m, k] w[k, n]), with w packed for the register tile.

Numbers are f32, or what `kernels.matmul.dot.dot_product` says: 8-bit codes go through k several at a time.

Packing lays w out in panels [n / columns][k][columns], the last one padded with zeros, so that a
tile reads it front to back; while the tiles of one panel run, the next comes into the cache a line
at a time. A tile holds rows × columns sums in registers through the whole of k:
per k it loads the panel's vectors once and one number of a for each row, which it broadcasts. The
sums then go to a small scratch tile, and the epilogue runs from there row by row, masked at the
right edge: it is emitted once however many tile heights there are, and costs a few cycles beside
the thousands of the tile.

Threads share out tiles. Each sum is formed in the order of k by one thread, so results do not
depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import (
    Kernel,
    Module,
    Signature,
    Value,
    i1,
    i32,
    i64,
    stored,
)
from bitwright.backends.cpu.codegen.expression import Expression, to_stored
from bitwright.backends.cpu.kernels.elementwise.narrow import MOST, narrowed
from bitwright.backends.cpu.kernels.elementwise.streaming import is_streamed, settle
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import ROWS, BlockRows, TileRun
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import REAL, Numbers
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, best_tile
from bitwright.backends.cpu.kernels.matmul.upcast_rows import STEP_BYTES, WideRows
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import f32 as real
from bitwright.target import Target

Array = np.ndarray[Any, Any]
LINE = 64
"""Bytes of a cache line."""
UNROLL = LINE // STEP_BYTES
"""Steps of k per turn of the inner loop of a full tile, in which a line is prefetched: a line in
every step costs a twentieth of the time."""
FEW_TILES = 4
"""A thread that has fewer may have a good part more to do than another."""
_TALL = 2
"""As many times its rows a product has columns at most to be shared out by rows, as measured: its
threads read the same weights then, and their own part of a."""


def pack(w: Array, tile: Tile) -> Array:
    """w[k, n] as panels [n / columns][k][columns]."""
    depth, columns = w.shape
    panels = -(-columns // tile.columns)
    padded = np.zeros((depth, panels * tile.columns), np.float32)
    padded[:, :columns] = w
    return np.ascontiguousarray(padded.reshape(depth, panels, tile.columns).transpose(1, 0, 2))


@dataclass(frozen=True)
class Epilogue:
    """What happens to a sum on its way to memory.

    `emit(f, value, row, column, mask)` gives the value to store; it stands for a vector of columns
    from `column` on (mask is None away from the right edge). It reads its own slots from f.args.
    """

    emit: Callable[[Kernel, Value, Value, Value, Value], Value]
    pointers: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    is_light: bool = True
    """Whether it is short enough to be written out for every vector of a full tile."""
    result: DType = real
    """The type of what is stored."""
    narrowest: int = 32
    """Bits of the narrowest element that it reads or that is stored."""
    wide: Callable[[Kernel, Value, Value, Value, Value], Value] | None = None
    """As `emit`, for 8-bit results: in i32, to be saturated (`kernels.elementwise.narrow`)."""
    streams: int = 0
    """Bytes from which on a result goes past the caches; 0 for never (`kernels.elementwise.streaming`)."""


LIGHT_STEPS = 6
_SIMPLE = frozenset(
    {"add", "sub", "mul", "relu", "clip", "maximum", "minimum", "neg", "abs", "hard_swish"}
)


def is_light(expression: Expression) -> bool:
    """A few additions, products and comparisons, without a function that is a polynomial."""
    steps = [step for step in expression.steps if step.op not in ("cast", "requantize")]
    return len(steps) <= LIGHT_STEPS and all(step.op in _SIMPLE for step in steps)


def keep(_f: Kernel, value: Value, _row: Value, _column: Value, _mask: Value) -> Value:
    return value


NO_EPILOGUE = Epilogue(keep)


def row_tiles_in_cache(target: Target, tile: Tile, row_bytes: int) -> int:
    """Tiles whose rows of a stay in half of the second-level cache while the panels pass by."""
    return max(1, target.l2_bytes // 2 // (tile.rows * max(1, row_bytes)))


def emit_matmul(
    module: Module,
    name: str,
    tile: Tile | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
    numbers: Numbers = REAL,
    how: Callable[[Product], None] = lambda product: product.emit(),
) -> Signature:
    """The kernel. Strides count elements between rows; `block` is `row_tiles_in_cache`, and `how`
    another way to emit a product."""
    tile = tile or best_tile(module.target)
    signature = Signature(
        ("a", "w", "y", *numbers.pointers, *epilogue.pointers),
        ("rows", "columns", "depth", "a_stride", "y_stride", "block", *epilogue.sizes),
    )
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        how(Product(f, tile, epilogue, numbers))
        settle(f, epilogue.streams)
    return signature


class Product:
    """Emits a product; `kernels.conv.conv` changes where rows lie and how k runs."""

    def __init__(self, f: Kernel, tile: Tile, epilogue: Epilogue, numbers: Numbers = REAL) -> None:
        self.f, self.tile, self.epilogue, self.numbers = f, tile, epilogue, numbers
        self.rows, self.columns, self.y_stride = (
            f.args.size(name) for name in ("rows", "columns", "y_stride")
        )
        self.depth = self.whole_depth()
        self.vector = numbers.sum.vector(tile.lanes)
        self.width = tile.vectors + numbers.extra
        self.scratch = f.scratch(self.vector, tile.rows * self.width)
        self.wide = WideRows(f, numbers.element, tile.rows, tile.lanes) if numbers.widens else None
        self.run = TileRun(f, numbers, self.scratch) if numbers.tiles else None
        self.start: list[Value] = []
        """What the sums of a row of the tile begin with."""

    def emit(self) -> None:
        """Blocks of rows, within them panels of columns, within them tiles.

        A thread takes a run of tiles in this order: every thread has as many as the next, give or
        take one, and reads few panels more than it must.
        """
        f, tile = self.f, self.tile
        panels = f.udiv(self.columns + (tile.columns - 1), tile.columns)
        tiles = f.udiv(self.rows + (tile.rows - 1), tile.rows)
        height = self._block_height(tiles)
        begin, end = f.share(tiles * panels)
        with f.if_(f.lt(begin, end)), f.do_while(carry=(begin,)) as runs:
            (at,) = runs.carried
            first, tall, place, panel, top = self.in_order(at, height, panels, tiles)
            count = f.min(tall - top, end - at)
            is_new = f.or_(f.eq(at, begin), f.eq(place, 0))
            self.in_block(is_new, first, top, tall, end - at)
            self._run(panel, (first + top) * tile.rows, count)
            after = at + count
            runs.next(after, again=f.lt(after, end))

    def in_order(
        self, at: Value, height: Value, panels: Value, tiles: Value
    ) -> tuple[Value, Value, Value, Value, Value]:
        """Of the tile that is number `at`: the first row of tiles and the height of its block, its
        place there, its panel, and its row of tiles in the block."""
        f = self.f
        block = f.udiv(at, height * panels)
        first = block * height
        place = at - first * panels
        tall = f.min(height, tiles - first)
        panel = f.udiv(place, tall)
        return first, tall, place, panel, place - panel * tall

    def _run(self, panel: Value, top: Value, count: Value) -> None:
        """Tiles below each other in one panel, while the next panel comes into the cache."""
        f, tile = self.f, self.tile
        panel_bytes = self.depth * (tile.columns * self.numbers.unit.total_bytes)
        w = f.offset(self.panels(), panel * panel_bytes)
        bottom = f.min(top + count * tile.rows, self.rows)
        self.run_tiles(panel, top, bottom, w, f.offset(w, panel_bytes), panel_bytes)

    def run_tiles(
        self, panel: Value, top: Value, bottom: Value, w: Value, ahead: Value, size: Value
    ) -> None:
        """The tiles of a panel whose weights lie at `w`; each asks for a part of what lies `ahead`,
        the next panel of `size` bytes."""
        f, tile = self.f, self.tile
        asked = f.udiv(self.depth, UNROLL) * LINE
        with f.loop(top, bottom, tile.rows, carry=(f.index(0),)) as loop:
            (past,) = loop.carried
            self._tile(loop.index, bottom, panel * tile.columns, w, f.offset(ahead, past))
            loop.next(f.min(past + asked, size))

    def _block_height(self, tiles: Value) -> Value:
        """Tiles of a block: the fewest blocks that fit the cache, all of about one height.

        Where there are rows enough, every thread has blocks of its own: the next kernel then finds
        most of what it reads in the cache of the thread that wrote it.
        """
        f = self.f
        most = f.args.size("block")
        fair = f.udiv(tiles + (f.threads - 1), f.threads)
        is_tall = f.and_(f.ge(fair, FEW_TILES), f.ge(self.rows * _TALL, self.columns))
        most = f.select(is_tall, f.min(most, fair), most)
        blocks = f.max(f.udiv(tiles + (most - 1), most), 1)
        return f.max(f.udiv(tiles + (blocks - 1), blocks), 1)

    # what another kind of product changes

    def in_block(self, is_new: Value, first: Value, top: Value, tall: Value, left: Value) -> None:
        """Before tiles of a block of `tall` that begins with tile `first`: the thread goes on with
        tile `top` of it, has `left` tiles in all, and none of the block before if it `is_new`."""

    def whole_depth(self) -> Value:
        """How many steps of k there are."""
        return self.steps(self.f.args.size("depth"))

    def steps(self, run: Value) -> Value:
        """Steps that a run of neighbouring numbers takes."""
        group = self.numbers.group
        return run if group == 1 else self.f.udiv(run + (group - 1), group)

    def panels(self) -> Value:
        """Where the packed weights begin."""
        return self.f.args.pointer("w")

    def constants_at(self, column: Value) -> Value:
        """Where the numbers of a column are kept that `Numbers.start` and `finished` read."""
        return column

    def address(self, row: Value) -> Value:
        """Where a row of a begins."""
        f = self.f
        return f.gep(self.numbers.element, f.args.pointer("a"), row * f.args.size("a_stride"))

    def addresses(self, row: Value, count: int) -> list[Value]:
        """Where `count` rows of a begin, the first of them `row`."""
        return [self.address(row + i) for i in range(count)]

    def result_at(self, row: Value) -> Value:
        """Where a row of the result begins, in elements of y."""
        return row * self.y_stride

    def add_products(
        self, rows: list[Value], w: Value, sums: list[Value], ahead: Value | None
    ) -> list[Value]:
        """The sums after all of k."""
        return self.add_run(rows, w, sums, self.f.args.size("depth"), ahead)[1]

    def place_in_row(self, places: Value) -> Value:
        """Bytes from the start of a row to the group that lies at this place (`split_pairs`)."""
        return self.f.convert(self.f.load(i32, places), i64)

    def block_rows(self, row: Value) -> BlockRows:
        """How the rows of a block of tiles lie in a."""
        f = self.f
        stride, run = f.args.size("a_stride") * self.numbers.element.bytes, f.args.size("depth")
        return BlockRows(self.address(row), stride, stride * ROWS, f.const(i1, 1), run)

    def _tile(
        self, row: Value, bottom: Value, column: Value, w: Value, ahead: Value | None
    ) -> None:
        """Sums of one tile by the lowest height that holds its rows, then the epilogue."""
        f, tile = self.f, self.tile
        left = f.min(bottom - row, tile.rows)
        masks = self._masks(column)
        if self.run is not None:
            begin = self.numbers.start(f, self.constants_at(column), masks, tile.lanes)
            block, others = self.block_rows(row), partial(self.addresses, row, tile.rows)
            sums = self.run.start(block, others, left, begin)
            self.run.finish(self.add_products([block.start], w, sums, ahead))
            self._store(row, left, column, masks)
            return
        self.start = self.numbers.start(f, self.constants_at(column), masks, tile.lanes)
        heights = list(tile.heights)
        if not self.epilogue.is_light:
            self._choose(heights, left, row, column, w, ahead)
            self._store(row, left, column, masks)
            return
        # the full height first, straight from registers: it is what nearly every tile takes
        lower = heights[:-1]
        is_whole = f.eq(left, tile.rows)
        with f.if_(f.gt(left, lower[-1] if lower else 0)) as branch:
            rows = self._existing(self.addresses(row, tile.rows), left, is_whole)
            sums = self.add_products(rows, w, self.start * tile.rows, ahead)
            sums = self.numbers.corrected(self, rows, column, sums)
            with f.if_(is_whole) as whole:
                for i in range(tile.rows):
                    part = sums[i * self.width : (i + 1) * self.width]
                    self._finish_row(row + i, column, masks, part)
            with whole.else_():
                self._hold(sums)
        if lower:
            with branch.else_():
                self._choose(lower, left, row, column, w, ahead)
            with f.if_(f.not_(is_whole)):
                self._store(row, left, column, masks)

    def _existing(self, rows: list[Value], left: Value, is_whole: Value) -> list[Value]:
        """Addresses of a tile's rows; those beyond the last repeat the first: computed, never
        stored."""
        f = self.f
        with f.if_(f.not_(is_whole), rows) as branch:
            branch.next(*[f.select(f.gt(left, i), at, rows[0]) for i, at in enumerate(rows)])
        return [f.opaque(start) for start in branch.results]

    def _masks(self, column: Value) -> list[Value]:
        """Which columns of a tile there are, vector by vector."""
        f, lanes = self.f, self.tile.lanes
        return [f.mask(self.columns - column - v * lanes, lanes) for v in range(self.tile.vectors)]

    def _finish_row(self, row: Value, column: Value, masks: list[Value], sums: list[Value]) -> None:
        """The epilogue of one row of a tile, and its store."""
        f, tile, streams = self.f, self.tile, self.epilogue.streams
        if not (self._masks_scatter or streams):
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
    def _masks_scatter(self) -> bool:  # element by element: worth a way around it
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
        self.numbers.finished(f, totals, self.constants_at(column), masks)
        y = f.gep(stored(element), f.args.pointer("y"), self.result_at(row) + column)
        if self.epilogue.wide and (masks[0] is None or not self._masks_scatter):
            for first in range(0, tile.vectors, MOST):
                self._write_qvalues(row, column, masks, totals, first, y)
            return
        for v, mask in enumerate(masks):
            value = self.epilogue.emit(f, totals[v], row, column + v * tile.lanes, mask)
            align = self.vector.total_bytes if stream else 0
            at, value = v * tile.lanes, to_stored(f, value, element)
            f.store(value, y, at, mask=mask, align=align, stream=stream)

    def _write_qvalues(
        self,
        row: Value,
        column: Value,
        masks: Sequence[Value | None],
        totals: Sequence[Value],
        first: int,
        y: Value,
    ) -> None:
        """Up to `MOST` neighbouring vectors of 8-bit results by one store."""
        f, lanes, epilogue = self.f, self.tile.lanes, self.epilogue
        assert epilogue.wide is not None
        some = range(first, min(first + MOST, self.tile.vectors))
        wide = [epilogue.wide(f, totals[v], row, column + v * lanes, masks[v]) for v in some]
        at = first * lanes
        for qvalues in narrowed(f, wide, epilogue.result):
            here = min(qvalues.type.lanes, len(wide) * lanes)
            if masks[first] is not None:
                left = f.min(self.columns - column - at, here)
                f.store(qvalues, y, at, mask=f.mask(left, qvalues.type.lanes))
            elif here == qvalues.type.lanes:
                f.store(qvalues, y, at)
            else:  # three of four
                f.store(f.part(qvalues, 0, 2 * lanes), y, at)
                f.store(f.part(qvalues, 2 * lanes, lanes), y, at + 2 * lanes)
            at += here

    def _choose(
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
            self._sums(heights[0], left, row, column, w, ahead)
            return
        with f.if_(f.gt(left, heights[-2])) as branch:
            self._sums(heights[-1], left, row, column, w, ahead)
        with branch.else_():
            self._choose(heights[:-1], left, row, column, w, ahead)

    def _sums(
        self, height: int, left: Value, row: Value, column: Value, w: Value, ahead: Value | None
    ) -> None:
        f = self.f
        # rows beyond the last repeat it: computed, never stored
        rows = [self.address(f.min(row + i, row + (left - 1))) for i in range(height)]
        sums = self.add_products(rows, w, self.start * height, ahead)
        self._hold(self.numbers.corrected(self, rows, column, sums))

    def _hold(self, sums: list[Value]) -> None:
        """Puts the sums of a tile into the scratch tile, for `_store`."""
        f, align = self.f, self.vector.total_bytes
        for number, total in enumerate(sums):
            f.store(total, self.scratch, number * self.tile.lanes, align=align)

    def add_run(
        self, rows: list[Value], w: Value, sums: list[Value], count: Value, ahead: Value | None
    ) -> tuple[Value, list[Value]]:
        """The sums after `count` neighbouring numbers of every row, and where the weights go on."""
        if self.run is not None:
            return self.run.add(rows[0], w, sums, count)
        if self.wide is not None:
            return self.wide.add(rows, w, sums, count, ahead, self._add_run)
        return self._add_run(rows, w, sums, count, ahead)

    def _add_run(
        self, rows: list[Value], w: Value, sums: list[Value], count: Value, ahead: Value | None
    ) -> tuple[Value, list[Value]]:
        f, tile = self.f, self.tile
        steps = f.udiv(count, self.numbers.group) if self.numbers.group > 1 else count
        unroll = self.unroll(len(rows))
        whole = steps - f.urem(steps, unroll)
        step_bytes = tile.columns * self.numbers.unit.total_bytes
        carry: tuple[Value, ...] = (w, *sums)
        turns = ((0, whole, unroll), (whole, steps, 1)) if unroll > 1 else ((0, steps, 1),)
        for start, stop, turn in turns:
            with f.loop(start, stop, turn, carry) as loop:
                w, *totals = loop.carried
                if turn > 1 and ahead is not None:  # one line of the next panel a turn
                    f.prefetch(f.offset(ahead, loop.index * STEP_BYTES), locality=2)
                for step in range(turn):
                    self._multiply(rows, w, loop.index + step, totals)
                    w = f.offset(w, step_bytes)
                loop.next(w, *totals)
            carry = loop.results
        if self.numbers.has_rest:
            left = count - steps * self.numbers.group
            with f.if_(f.gt(left, 0), carry) as branch:
                totals = list(carry[1:])
                self._multiply(rows, carry[0], steps, totals, left)
                branch.next(f.offset(carry[0], step_bytes), *totals)
            carry = branch.results
        return carry[0], list(carry[1:])

    def unroll(self, height: int) -> int:
        """Steps per turn of the inner loop. Lower tiles are few, or wait for their weights."""
        return UNROLL if height == self.tile.rows else 1

    def _multiply(
        self,
        rows: list[Value],
        w: Value,
        step: Value,
        sums: list[Value],
        left: Value | None = None,
    ) -> None:
        """One step of k into all sums; `left` numbers where a run ends within a group."""
        f, tile, numbers = self.f, self.tile, self.numbers
        panel = numbers.panel(f, w, tile.vectors, tile.lanes)
        for i, pointer in enumerate(rows):
            if left is None:
                number = numbers.number(f, pointer, step, tile.lanes)
            else:
                number = numbers.rest(f, pointer, step, left, tile.lanes)
            for v, part in enumerate(panel):
                at = i * self.width + v
                sums[at] = numbers.multiply(f, number, part, sums[at])

    def _store(self, row: Value, left: Value, column: Value, masks: list[Value]) -> None:
        """The epilogue from the scratch tile: emitted once for every height."""
        f, tile = self.f, self.tile
        with f.loop(0, left, nonempty=True) as loop:
            at = loop.index * (self.width * tile.lanes)
            align = self.vector.total_bytes
            sums = [
                f.load(self.vector, self.scratch, at + v * tile.lanes, align=align)
                for v in range(self.width)
            ]
            self._finish_row(row + loop.index, column, masks, sums)
