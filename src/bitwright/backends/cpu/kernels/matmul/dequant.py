"""y[m, n] = epilogue(Σ_k a[m, k] w[k, n]) with f32 rows and quantized weights.

A product with few rows is bound by the bandwidth of the weights: weights are dequantized in
registers, the products of a block are summed, and the sum is scaled once,

    y += scale (Σ a q - zero Σ a)          over the k of a block

With more rows, a thread dequantizes a segment of a panel to f32 on its stack, where many tiles of
the f32 product read it. The number of rows alone decides between the two, and one thread forms each
sum in the order of k, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32, i64
from bitwright.backends.cpu.kernels.matmul.epilogue import Epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import LINE, UNROLL, Product
from bitwright.backends.cpu.kernels.matmul.quantized_weights import QuantizedWeights, Reader
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile

FEW_ROWS = 8
"""Up to as many rows, weights are dequantized in registers; at most the rows of a tile."""
HELD_TILES = 16
"""Tiles that share a segment of dequantized weights."""
SEGMENT_BYTES = 256 << 10
"""Bytes of f32 weights on a thread's stack, which stay in its L2 cache."""
_AHEAD = 1024
"""The prefetch distance for quantized weights, in bytes."""


def emit_dequant_matmul(
    module: Module,
    name: str,
    tile: Tile,
    epilogue: Epilogue,
    form: QuantizedWeights,
    is_short: bool,
) -> Signature:
    """Emits the kernel; its slots are those of `emit_matmul`, scales and zero points.

    `is_short` says that one segment holds all of k.
    """
    signature = Signature(
        ("a", "w", "y", *form.pointers, *epilogue.pointers),
        ("rows", "columns", "depth", "a_stride", "y_stride", "block", *epilogue.sizes),
    )
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        QuantizedProduct(f, tile, epilogue, form, is_short).emit()
    return signature


def segment_of(tile: Tile, form: QuantizedWeights) -> int:
    """How many k a segment of f32 weights holds: whole blocks."""
    return max(1, SEGMENT_BYTES // (form.block * tile.columns * f32.bytes)) * form.block


@dataclass(frozen=True)
class Panel:
    """The addresses of a panel's quantized weights, scales and zero points."""

    qvalues: Value
    scale: Value
    zero: Value | None


class QuantizedProduct(Product):
    def __init__(
        self, f: Kernel, tile: Tile, epilogue: Epilogue, form: QuantizedWeights, is_short: bool
    ) -> None:
        super().__init__(f, tile, epilogue)
        self.is_short = is_short
        self.form, self.reader = form, Reader(f, form, tile)
        self.few_heights = [height for height in tile.heights if height <= FEW_ROWS]
        self.few = self.few_heights[-1]
        self.segment = segment_of(tile, form)
        if not is_short:
            self.scratch = f.scratch(self.vector, HELD_TILES * tile.rows * self.width)
        self.weights = f.scratch(self.vector, self.segment * tile.vectors)

    def emit(self) -> None:
        f = self.f
        with f.if_(f.le(self.rows, self.few)) as branch, f.if_(f.gt(self.rows, 0)):
            self._sum_few_rows()
        with branch.else_():
            super().emit()

    def _panel(self, panel: Value, k: Value | int = 0) -> Panel:
        """A panel from its k-th row on, the first of a block."""
        f, form, columns = self.f, self.form, self.tile.columns
        groups = f.udiv(self.depth + (form.group - 1), form.group)
        blocks = f.udiv(self.depth + (form.block - 1), form.block)
        row = panel * groups + f.udiv(f.index(k), form.group)
        block = (panel * blocks + f.udiv(f.index(k), form.block)) * columns
        return Panel(
            f.offset(f.args.pointer("w"), row * (columns * form.unit_bytes)),
            f.gep(form.scale, f.args.pointer("scale"), block),
            None if form.zero is None else f.gep(form.zero, f.args.pointer("zero"), block),
        )

    def _next_block(self, panel: Panel) -> Panel:
        """The panel with scales and zero points of the next block."""
        f, form, columns = self.f, self.form, self.tile.columns
        zero = None
        if panel.zero is not None and form.zero is not None:
            zero = f.gep(form.zero, panel.zero, columns)
        return Panel(panel.qvalues, f.gep(form.scale, panel.scale, columns), zero)

    def _by_height(self, heights: Sequence[int], left: Value, body: Callable[[int], None]) -> None:
        """Emits the body for the lowest of these heights that holds the remaining rows."""
        f = self.f
        if len(heights) == 1:
            body(heights[0])
            return
        with f.if_(f.gt(left, heights[-2])) as branch:
            body(heights[-1])
        with branch.else_():
            self._by_height(heights[:-1], left, body)

    # few rows

    def _sum_few_rows(self) -> None:
        f, tile = self.f, self.tile
        begin, end = f.share(f.udiv(self.columns + (tile.columns - 1), tile.columns))
        with f.loop(begin, end) as loop:
            column = loop.index * tile.columns
            panel = self._panel(loop.index)
            self._by_height(
                self.few_heights, self.rows, lambda height: self._sum_blocks(height, panel)
            )
            masks = self._masks(column)
            self._store_scratch(f.const(i64, 0), self.rows, column, masks)

    def _sum_blocks(self, height: int, panel: Panel) -> None:
        """Computes the sums of the first rows over all of k and stores them in the scratch tile."""
        f, form, tile = self.f, self.form, self.tile
        rows = [self.row_address(f.min(self.rows - 1, i)) for i in range(height)]
        nothing = f.const(self.vector, 0.0)
        has_zero = panel.zero is not None
        moving = [panel.qvalues, panel.scale, *([panel.zero] if panel.zero is not None else [])]
        totals = [nothing] * (height * tile.vectors)
        with f.loop(0, self.depth, form.block, carry=(*moving, *totals)) as blocks:
            qvalues, scale, *more = blocks.carried
            here = Panel(qvalues, scale, more[0] if has_zero else None)
            totals = list(more[1:] if has_zero else more)
            qvalues, sums, row_sums = self._sum_block(rows, here.qvalues, blocks.index)
            for v in range(tile.vectors):
                factor = self.reader.scale(here.scale, v)
                for i in range(height):
                    at = i * tile.vectors + v
                    total = sums[at]
                    if here.zero is not None:
                        zero = self.reader.zero(here.zero, v)
                        if self.reader.factor != 1:
                            zero = zero * (1 / self.reader.factor)
                        total = total - zero * row_sums[i]
                    totals[at] = f.fma(total, factor, totals[at])
            after = self._next_block(here)
            zeros = [] if after.zero is None else [after.zero]
            blocks.next(qvalues, after.scale, *zeros, *totals)
        results = blocks.results[len(moving) :]
        for number, total in enumerate(results):
            f.store(total, self.scratch, number * tile.lanes, align=self.vector.total_bytes)

    def _sum_block(
        self, rows: list[Value], qvalues: Value, start: Value
    ) -> tuple[Value, list[Value], list[Value]]:
        """The next address of the weights, Σ a q of all columns, and Σ a of every row if needed."""
        f, form, tile = self.f, self.form, self.tile
        inside = f.min(self.depth - start, form.block)
        rest = f.urem(inside, form.group) if form.has_tail else f.const(i64, 0)
        # a single row is bound by the latency of the sum: even and odd k have separate sums
        ways = 2 if len(rows) == 1 else 1
        count = len(rows) * tile.vectors
        sums = [f.const(self.vector, 0.0)] * (count * ways)
        of_a = f32.vector(form.group)
        row_sums = [f.const(of_a, 0.0)] * (len(rows) if form.zero is not None else 0)
        with f.loop(0, inside - rest, form.group, carry=(qvalues, *sums, *row_sums)) as groups:
            qvalues, *totals = groups.carried
            at = start + groups.index
            for line in range(-(-tile.columns * form.unit_bytes // LINE)):
                f.prefetch(f.offset(qvalues, _AHEAD + line * LINE))
            lhs = [[f.load(f32, row, at + k) for k in range(form.group)] for row in rows]
            whole = [f.load(of_a, row, at) for row in rows] if row_sums else []
            qvalues, totals = self._add_group(qvalues, lhs, whole, totals)
            groups.next(qvalues, *totals)
        carried = groups.results
        if form.has_tail:
            with f.if_(f.gt(rest, 0), carried) as branch:
                qvalues, *totals = carried
                at = start + (inside - rest)
                whole = [f.load(of_a, row, at, mask=f.mask(rest, form.group)) for row in rows]
                lhs = [[f.lane(row, k) for k in range(form.group)] for row in whole]
                qvalues, totals = self._add_group(qvalues, lhs, whole if row_sums else [], totals)
                branch.next(qvalues, *totals)
            carried = branch.results
        qvalues, *totals = carried
        found = [f.combine(totals[i : count * ways : count], f.add) for i in range(count)]
        row_totals = [f.splat(f.reduce_add(row), tile.lanes) for row in totals[count * ways :]]
        return qvalues, found, row_totals

    def _add_group(
        self, qvalues: Value, lhs: list[list[Value]], whole: list[Value], totals: list[Value]
    ) -> tuple[Value, list[Value]]:
        """Adds one group of k to the sums of columns, then to those of rows."""
        f, form, tile = self.f, self.form, self.tile
        totals = list(totals)
        count = len(lhs) * tile.vectors
        ways = (len(totals) - len(whole)) // count
        for k, values in enumerate(self.reader.group(qvalues)):
            for i, row in enumerate(lhs):
                a = f.splat(row[k], tile.lanes)
                for v, value in enumerate(values):
                    at = k % ways * count + i * tile.vectors + v
                    totals[at] = f.fma(a, value, totals[at])
        for i, part in enumerate(whole):
            totals[count * ways + i] = totals[count * ways + i] + part
        return f.offset(qvalues, tile.columns * form.unit_bytes), totals

    # many rows

    def _run_panel(self, panel: Value, top: Value, count: Value) -> None:
        f, tile = self.f, self.tile
        column = panel * tile.columns
        bottom = f.min(top + count * tile.rows, self.rows)
        if not self.is_short:
            self._run_segments(panel, top, bottom, column)
            return
        after = self._dequantize(self._panel(panel), self.depth)
        with f.loop(top, bottom, tile.rows) as loop:
            ahead = self._ahead(after, loop.index - top, self.depth)
            self._tile(loop.index, bottom, column, self.weights, ahead)

    def _run_segments(self, panel: Value, top: Value, bottom: Value, column: Value) -> None:
        """Computes some tiles at a time; their sums stay in memory between segments."""
        f, tile = self.f, self.tile
        masks = self._masks(column)
        with f.loop(top, bottom, HELD_TILES * tile.rows) as parts:
            first = parts.index
            last = f.min(first + HELD_TILES * tile.rows, bottom)
            with f.loop(0, (last - first) * self.width) as sums:
                nothing = f.const(self.vector, 0.0)
                f.store(nothing, self.scratch, sums.index * tile.lanes)
            with f.loop(0, self.depth, self.segment) as segments:
                start = segments.index
                length = f.min(self.depth - start, self.segment)
                after = self._dequantize(self._panel(panel, start), length)
                with f.loop(first, last, tile.rows) as tiles:
                    ahead = self._ahead(after, tiles.index - first, length)
                    self._add_tile(tiles.index, first, last, start, length, ahead)
            self._store_scratch(first, last - first, column, masks)

    def _ahead(self, qvalues: Value, row: Value, length: Value) -> Value:
        """The address that the tile in this row prefetches: a part of the next quantized weights.

        A tile prefetches a line every few k; the first tiles together prefetch all weights.
        """
        f, form, tile = self.f, self.form, self.tile
        asked = f.udiv(length, UNROLL) * LINE
        most = f.udiv(length, form.group) * (tile.columns * form.unit_bytes)
        return f.offset(qvalues, f.min(f.udiv(row, tile.rows) * asked, most))

    def _add_tile(
        self, row: Value, first: Value, last: Value, start: Value, length: Value, ahead: Value
    ) -> None:
        """Adds the products of a segment of k to a tile's sums."""
        f, tile = self.f, self.tile
        held = (row - first) * (self.width * tile.lanes)
        align = self.vector.total_bytes

        def add(height: int) -> None:
            # missing rows repeat the last one and are never stored
            rows = [self.row_address(f.min(row + i, last - 1)) for i in range(height)]
            rows = [f.opaque(f.gep(f32, pointer, start)) for pointer in rows]
            places = [held + number * tile.lanes for number in range(height * self.width)]
            sums = [f.load(self.vector, self.scratch, at, align=align) for at in places]
            sums = self.add_run(rows, self.weights, sums, length, ahead)[1]
            for at, total in zip(places, sums, strict=True):
                f.store(total, self.scratch, at, align=align)

        self._by_height(tile.heights, last - row, add)

    def _dequantize(self, panel: Panel, length: Value) -> Value:
        """Dequantizes a segment of a panel to f32; returns the address behind its weights."""
        f, form, tile = self.f, self.form, self.tile
        moving = [panel.qvalues, panel.scale, *([panel.zero] if panel.zero is not None else [])]
        with f.loop(0, length, form.block, carry=moving) as blocks:
            qvalues, scale, *more = blocks.carried
            here = Panel(qvalues, scale, more[0] if more else None)
            inside = f.min(length - blocks.index, form.block)
            scales = [self.reader.scale(scale, v) for v in range(tile.vectors)]
            zeros: list[Value] = []
            if here.zero is not None:
                zeros = [self.reader.zero(here.zero, v) for v in range(tile.vectors)]
                zeros = [zero * (1 / self.reader.factor) for zero in zeros]
            with f.loop(0, inside, form.group, carry=(qvalues,)) as groups:
                (qvalues,) = groups.carried
                at = (blocks.index + groups.index) * tile.columns
                for k, values in enumerate(self.reader.group(qvalues)):
                    for v, value in enumerate(values):
                        weight = (value - zeros[v] if zeros else value) * scales[v]
                        place = at + (k * tile.columns + v * tile.lanes)
                        f.store(weight, self.weights, place, align=self.vector.total_bytes)
                groups.next(f.offset(qvalues, tile.columns * form.unit_bytes))
            after = self._next_block(here)
            more = [] if after.zero is None else [after.zero]
            blocks.next(groups.results[0], after.scale, *more)
        return blocks.results[0]
