"""y[m, n] = epilogue(Σ_k x[m, k] w[n, k] + bias[n]) with weights in packed panels.

A register tile holds the sums of some rows for one vector of columns, or for all columns of a panel
where rows are few. Each chunk of 32 elements is unpacked once and multiplied by every row:

    t += scale (scale_x (Σ qx qw - zero Σ qx)) - minimum scale_x Σ qx

in this order for any number of rows, so a row's bits do not depend on the others. Products of the
second level of activations, which few runs have, are added by themselves and to t at the end.
Threads divide panels. Rows are taken in groups whose activations stay in the second-level cache,
and weights in panels, which stay in the first.

The exact form sums x (qw - zero) of a run in f32 before it multiplies by the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.backends.cpu.codegen.emit import (
    Kernel,
    Module,
    Signature,
    Type,
    Value,
    bf16,
    f16,
    f32,
    i1,
    i32,
    i64,
)
from bitwright.backends.cpu.kernels.blocks import quantize
from bitwright.backends.cpu.kernels.blocks.dots import Dots, choose_dots
from bitwright.backends.cpu.kernels.blocks.panels import COLUMNS, PanelLayout
from bitwright.backends.cpu.kernels.blocks.reader import Reader
from bitwright.backends.cpu.kernels.matmul.epilogue import Epilogue
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, record_fault
from bitwright.backends.cpu.lowering.region import store
from bitwright.ops.quant.block_formats import RUN, BlockFormat
from bitwright.target import Target

_FLOATS: dict[str, Type] = {"F32": f32, "F16": f16, "BF16": bf16}
FEW_ROWS = 2
"""Up to as many rows, a tile holds all columns of a panel."""
LINE = 64
PREFETCHED = 12 << 10
"""How far ahead panels are prefetched: what a core reads in about the latency of memory.

Processors do not recognize panels with several planes and steps as one stream. On Zen 5, Q6_K is
read at 19 GB/s without this, 36 with 4 KB, 49 with 8 and 12 KB."""


@dataclass(frozen=True)
class BlockProduct:
    """What determines the code of a product."""

    form: BlockFormat
    exact: bool
    has_bias: bool
    has_tail: bool
    """Whether the last panel has fewer than 16 columns."""
    grouped: bool

    def __repr__(self) -> str:
        facts = (self.form.name, self.exact, self.has_bias, self.has_tail, self.grouped)
        return f"BlockProduct{facts}"

    @property
    def is_integer(self) -> bool:
        return not self.exact and not self.form.is_float


def lanes_of(target: Target) -> int:
    """Columns per vector."""
    return min(target.lanes(32), COLUMNS)


def emit_block_product(
    module: Module, name: str, kernel: BlockProduct, epilogue: Epilogue
) -> Signature:
    """Slots: a (units of `quantize`, or rows of x), panels w, y; sizes of the product.

    `depth` counts chunks, or elements of K for float weights. A grouped product has the number of
    rows of each expert in `counts`, and as many sets of panels; counts that do not divide the rows
    are a fault.
    """
    pointers = ["a", "w", "y"]
    sizes = ["rows", "columns", "depth", "a_stride", "y_stride", "group", "panel_bytes"]
    if kernel.has_bias:
        pointers.append("bias")
    if kernel.grouped:
        pointers += ["counts", "fault"]
        sizes += ["experts", *FAULT_SLOTS]
    signature = Signature((*pointers, *epilogue.pointers), (*sizes, *epilogue.sizes))
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        _Product(f, kernel, epilogue).emit()
    return signature


@dataclass(frozen=True)
class _Sums:
    """What a loop over chunks carries."""

    levels: Value
    """Which rows have a second level in any chunk so far."""
    totals: Sequence[Value]

    def values(self) -> list[Value]:
        return [self.levels, *self.totals]

    @staticmethod
    def of(values: Sequence[Value]) -> _Sums:
        return _Sums(values[0], list(values[1:]))


class _Product:
    def __init__(self, f: Kernel, kernel: BlockProduct, epilogue: Epilogue) -> None:
        self.f, self.kernel, self.epilogue = f, kernel, epilogue
        self.lanes = lanes_of(f.target)
        self.vectors = COLUMNS // self.lanes
        self.vector = f32.vector(self.lanes)
        wide = f.target.vector_registers >= 32
        if kernel.is_integer:
            self.heights = (1, 2, 4, 8, 16) if wide else (1, 2, 4)
        else:
            self.heights = (1, 2, 4)
        sizes = ("rows", "columns", "depth", "panel_bytes")
        self.rows, self.columns, self.depth, self.panel_bytes = (f.args.size(s) for s in sizes)
        self.scratch, self.low_sums = (
            f.scratch(self.vector, self.heights[-1] * self.vectors) for _ in range(2)
        )
        self.step = quantize.run_step(f, self.rows)
        self.low = quantize.low_distance(f, self.rows, self.depth)
        self.dots: Dots | None = None
        if not kernel.form.is_float:
            self.reader = Reader(f, PanelLayout(kernel.form), self.lanes)
            form = kernel.form
            largest = max(form.table or (2**form.bits - 1,))
            self.dots = choose_dots(f.target, largest, form.zero, self.lanes)

    def emit(self) -> None:
        f = self.f
        panels = f.udiv(self.columns + (COLUMNS - 1), COLUMNS)
        begin, end = f.share(panels)
        if not self.kernel.grouped:
            self._expert(f.args.pointer("w"), f.const(i64, 0), self.rows, begin, end)
            return
        zero = f.const(i64, 0)
        with f.loop(0, f.args.size("experts"), carry=(zero,)) as experts:
            (first,) = experts.carried
            given = f.load(i64, f.args.pointer("counts"), experts.index)
            count = f.min(f.max(given, 0), self.rows - first)
            with f.if_(f.not_(f.eq(given, count))):
                record_fault(f, given)
            w = f.offset(f.args.pointer("w"), experts.index * panels * self.panel_bytes)
            self._expert(w, first, first + count, begin, end)
            experts.next(first + count)
        (found,) = experts.results
        with f.if_(f.not_(f.eq(found, self.rows))):
            record_fault(f, found)

    def _expert(self, w: Value, first: Value, last: Value, begin: Value, end: Value) -> None:
        """The rows from `first` to `last` with the panels from `begin` to `end`."""
        f = self.f
        group = f.args.size("group")
        start = f.mul(f.udiv(first, quantize.TILE), quantize.TILE)
        with f.loop(start, last, group) as groups:
            bottom = f.min(groups.index + group, last)
            with f.loop(begin, end) as panels:
                panel = f.offset(w, panels.index * self.panel_bytes)
                with f.loop(groups.index, bottom, quantize.TILE) as tiles:
                    top = f.max(tiles.index, first)
                    below = f.min(tiles.index + quantize.TILE, bottom)
                    with f.loop(top, below, self.heights[-1]) as rows:
                        self._by_height(
                            self.heights, below - rows.index, rows.index, panels.index, panel
                        )

    def _by_height(
        self, heights: Sequence[int], left: Value, row: Value, number: Value, panel: Value
    ) -> None:
        f = self.f
        if len(heights) == 1:
            self._tile(heights[0], left, row, number, panel)
            return
        with f.if_(f.gt(left, heights[-2])) as branch:
            self._tile(heights[-1], left, row, number, panel)
        with branch.else_():
            self._by_height(heights[:-1], left, row, number, panel)

    def _tile(self, height: int, left: Value, row: Value, number: Value, panel: Value) -> None:
        """The sums of some rows for the columns of a panel, stored with the epilogue."""
        f = self.f
        column = number * COLUMNS
        if height <= FEW_ROWS:
            self._vectors(range(self.vectors), height, left, row, column, panel)
            return
        with f.loop(0, self.vectors) as loop:
            self._vectors([loop.index], height, left, row, column, panel)

    def _vectors(
        self,
        vectors: Sequence[int | Value],
        height: int,
        left: Value,
        row: Value,
        column: Value,
        panel: Value,
    ) -> None:
        if self.kernel.form.is_float:
            totals = self._float_sums(vectors, height, row, panel)
        else:
            totals = self._block_sums(vectors, height, row, panel)
        self._store(vectors, height, left, row, column, totals)

    # sums

    def _x_rows(self, row: Value, height: int) -> list[Value]:
        """The addresses of rows of x; rows behind the last one are the last one."""
        f = self.f
        stride = f.args.size("a_stride")
        return [
            f.gep(f32, f.args.pointer("a"), f.min(row + i, self.rows - 1) * stride)
            for i in range(height)
        ]

    def _float_sums(
        self, vectors: Sequence[int | Value], height: int, row: Value, panel: Value
    ) -> list[Value]:
        f = self.f
        element = _FLOATS[self.kernel.form.name]
        rows = self._x_rows(row, height)
        zeros = [f.const(self.vector, 0.0)] * (height * len(vectors))
        starts = [f.offset(panel, f.mul(f.index(v), self.lanes * element.bytes)) for v in vectors]
        with f.loop(0, self.depth, carry=zeros) as loop:
            totals = list(loop.carried)
            for n, start in enumerate(starts):
                address = f.offset(start, loop.index * (COLUMNS * element.bytes))
                w = f.convert(f.load(element.vector(self.lanes), address), f32)
                for i, x in enumerate(rows):
                    at = i * len(vectors) + n
                    a = f.splat(f.load(f32, x, loop.index), self.lanes)
                    totals[at] = f.fma(a, w, totals[at])
            loop.next(*totals)
        return list(loop.results)

    def _block_sums(
        self, vectors: Sequence[int | Value], height: int, row: Value, panel: Value
    ) -> list[Value]:
        f, layout = self.f, self.reader.layout
        if self.kernel.exact:
            rows = self._x_rows(row, height)
            steps: list[Value | int] = [RUN * f32.bytes] * height
        else:
            a = f.args.pointer("a")
            rows = [quantize.tile_address(f, a, row, self.rows, self.depth)]
            steps = [self.step]
        zeros = [f.const(self.vector, 0.0)] * (height * len(vectors))
        sums = _Sums(f.const(i32, 0), zeros)
        count = f.udiv(self.depth, layout.chunks)

        def moved(addresses: Sequence[Value]) -> list[Value]:
            return [f.offset(p, s) for p, s in zip(addresses, steps, strict=True)]

        with f.loop(0, count, carry=(panel, *rows, *sums.values())) as blocks:
            block, *rest = blocks.carried
            here, sums = rest[: len(rows)], _Sums.of(rest[len(rows) :])
            self._prefetch(block, layout.chunks_at, height)
            numbers = [self.reader.block_scales(block, v) for v in vectors]
            chunk = f.offset(block, layout.chunks_at)
            if layout.chunks == 1:
                sums = self._chunk(vectors, height, block, numbers, chunk, here, None, sums)
                here = moved(here)
            else:
                with f.loop(0, layout.chunks, carry=(chunk, *here, *sums.values())) as chunks:
                    chunk, *rest = chunks.carried
                    here, sums = rest[: len(rows)], _Sums.of(rest[len(rows) :])
                    sums = self._chunk(
                        vectors, height, block, numbers, chunk, here, chunks.index, sums
                    )
                    chunks.next(f.offset(chunk, layout.chunk_bytes), *moved(here), *sums.values())
                here = list(chunks.results[1 : 1 + len(rows)])
                sums = _Sums.of(chunks.results[1 + len(rows) :])
            blocks.next(f.offset(block, layout.block_bytes), *here, *sums.values())
        sums = _Sums.of(blocks.results[1 + len(rows) :])
        if self.kernel.exact:
            return list(sums.totals)
        with f.if_(f.ne(sums.levels, 0), carry=sums.totals) as branch:
            branch.next(*self._with_second_level(vectors, height, rows[0], panel, sums.totals))
        return list(branch.results)

    def _chunk(
        self,
        vectors: Sequence[int | Value],
        height: int,
        block: Value,
        numbers: list[tuple[Value, Value | None]],
        chunk: Value,
        rows: list[Value],
        place: Value | None,
        sums: _Sums,
    ) -> _Sums:
        """The sums with the products of one chunk, the `place`-th of its block."""
        f, levels, totals = self.f, sums.levels, list(sums.totals)
        self._prefetch(chunk, self.reader.layout.chunk_bytes, height)
        add: Any = self._exact_run if self.kernel.exact else self._run
        for n, v in enumerate(vectors):
            for part, used, scale, minimum in self._parts(chunk, v, block, numbers[n], place):
                for i in range(height):
                    at = i * len(vectors) + n
                    totals[at] = add(rows, i, part, used, scale, minimum, totals[at])
        if not self.kernel.exact:
            levels = f.or_(levels, f.load(i32, f.offset(rows[0], quantize.LEVELS_AT)))
        return _Sums(levels, totals)

    def _parts(
        self,
        chunk: Value,
        v: int | Value,
        block: Value,
        numbers: tuple[Value, Value | None],
        place: Value | None,
    ) -> list[tuple[int, Sequence[Any], Value, Value | None]]:
        """The runs of a chunk for one vector: number, unpacked values, scale and minimum."""
        f, form = self.f, self.kernel.form
        words = self.reader.load_words(chunk, v)
        assert self.dots is not None
        values: Any = (
            self.reader.elements(words)
            if self.kernel.exact
            else [self.dots.prepare(f, word) for word in words]
        )
        each = RUN // form.run
        size = len(values) // each
        found = []
        for part in range(each):
            run = f.const(i64, part) if place is None else place * each + part
            scale, minimum = self.reader.of_run(block, numbers, run, v)
            found.append((part, values[part * size : (part + 1) * size], scale, minimum))
        return found

    def _with_second_level(
        self,
        vectors: Sequence[int | Value],
        height: int,
        unit: Value,
        panel: Value,
        totals: Sequence[Value],
    ) -> list[Value]:
        """The totals plus the products of the second level: another pass over the few chunks that
        have one, which keeps the registers of the first pass free.

        Its sums begin with -0, so that rows without a second level keep their bits.
        """
        f, layout, align = self.f, self.reader.layout, self.vector.total_bytes
        places = range(0, len(totals) * self.lanes, self.lanes)
        for at in places:
            f.store(f.const(self.vector, -0.0), self.low_sums, at, align=align)
        with f.loop(0, self.depth, carry=(unit,)) as loop:
            (here,) = loop.carried
            mask = f.load(i32, f.offset(here, quantize.LEVELS_AT))
            if height < quantize.TILE:
                mask = f.and_(mask, (1 << height) - 1)
            with f.if_(f.ne(mask, 0)):
                number, place = f.udiv(loop.index, layout.chunks), f.urem(loop.index, layout.chunks)
                block = f.offset(panel, number * layout.block_bytes)
                chunk = f.offset(block, layout.chunks_at + place * layout.chunk_bytes)
                parts = [
                    self._parts(chunk, v, block, self.reader.block_scales(block, v), place)
                    for v in vectors
                ]
                self._second_level(parts, mask, here)
            loop.next(f.offset(here, self.step))
        lows = (f.load(self.vector, self.low_sums, at, align=align) for at in places)
        return [f.add(total, low) for total, low in zip(totals, lows, strict=True)]

    def _second_level(self, parts: Sequence[Any], mask: Value, unit: Value) -> None:
        """Adds the products of a chunk for the rows in a mask to the sums in memory."""
        f = self.f
        with f.do_while(carry=(mask,)) as loop:
            (mask,) = loop.carried
            row = f.convert(f.intrinsic("llvm.cttz.i32", i32, mask, f.const(i1, 1)), i64)
            low = f.offset(unit, self.low + row * quantize.UNIT)
            for n, of_vector in enumerate(parts):
                place = f.gep(f32, self.low_sums, (row * len(parts) + n) * self.lanes)
                total = f.load(self.vector, place, align=self.vector.total_bytes)
                for part, used, scale, minimum in of_vector:
                    total = self._run([low], 0, part, used, scale, minimum, total)
                f.store(total, place, align=self.vector.total_bytes)
            rest = f.and_(mask, f.sub(mask, 1))
            loop.next(rest, again=f.ne(rest, 0))

    def _prefetch(self, start: Value, nbytes: int, height: int) -> None:
        """Asks for what follows some kilobytes later, if few rows leave no time to wait for it."""
        f = self.f
        if height > self.heights[-1] // 2:
            return
        for at in range(0, nbytes, LINE):
            f.prefetch(f.offset(start, PREFETCHED + at))

    def _run(
        self,
        rows: list[Value],
        i: int,
        part: int,
        words: Sequence[tuple[Value, ...]],
        scale: Value,
        minimum: Value | None,
        total: Value,
    ) -> Value:
        f, form = self.f, self.kernel.form
        assert self.dots is not None
        unit = f.offset(rows[0], i * quantize.UNIT)
        which = part if form.run < RUN else quantize.WHOLE
        start = f.const(i32.vector(self.lanes), 0)
        zero = form.zero - self.dots.shift
        if zero:
            sums = f.load(i32, f.offset(unit, quantize.SUMS_AT + 4 * which))
            start = f.shl(f.splat(sums, self.lanes), zero.bit_length() - 1)
        products = self.dots.run(f, words, unit, part * form.run, start)
        a = f.splat(f.load(f32, f.offset(unit, quantize.SCALE_AT)), self.lanes)
        total = f.fma(f.convert(products, f32) * a, scale, total)
        if minimum is None:
            return total
        sums = f.load(f32, f.offset(unit, quantize.PRODUCTS_AT + 4 * which))
        return f.fma(minimum, f.splat(sums, self.lanes), total)

    def _exact_run(
        self,
        rows: list[Value],
        i: int,
        part: int,
        values: Sequence[Value],
        scale: Value,
        minimum: Value | None,
        total: Value,
    ) -> Value:
        f, lanes = self.f, self.lanes
        first = part * len(values)
        sums: list[Value | None] = [None, None]
        parts = [f.load(f32, rows[i], first + k) for k in range(len(values))]
        for k, value in enumerate(values):
            a, old = f.splat(parts[k], lanes), sums[k % 2]
            sums[k % 2] = a * value if old is None else f.fma(a, value, old)
        even, odd = sums
        assert even is not None and odd is not None
        total = f.fma(even + odd, scale, total)
        if minimum is None:
            return total
        whole = f.combine(parts, f.add)
        return f.fma(minimum, f.splat(f.sub(f.const(f32, 0.0), whole), lanes), total)

    # results

    def _store(
        self,
        vectors: Sequence[int | Value],
        height: int,
        left: Value,
        row: Value,
        column: Value,
        totals: list[Value],
    ) -> None:
        f = self.f
        if height == 1:
            for n, v in enumerate(vectors):
                self._store_vector(totals[n], row, column + f.mul(f.index(v), self.lanes))
            return
        for at, total in enumerate(totals):
            f.store(total, self.scratch, at * self.lanes, align=self.vector.total_bytes)
        with f.loop(0, f.min(left, height)) as rows:
            for n, v in enumerate(vectors):
                place = f.gep(f32, self.scratch, (rows.index * len(vectors) + n) * self.lanes)
                total = f.load(self.vector, place, align=self.vector.total_bytes)
                self._store_vector(total, row + rows.index, column + f.mul(f.index(v), self.lanes))

    def _store_vector(self, total: Value, row: Value, column: Value) -> None:
        f = self.f
        mask = f.mask(self.columns - column, self.lanes) if self.kernel.has_tail else None
        if self.kernel.has_bias:
            total = total + f.load(
                self.vector, f.gep(f32, f.args.pointer("bias"), column), mask=mask
            )
        value = self.epilogue.emit(f, total, row, column, mask)
        place = row * f.args.size("y_stride") + column
        store(f, value, self.epilogue.result, f.args.pointer("y"), place, mask)
