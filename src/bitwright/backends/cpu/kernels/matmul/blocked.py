"""y[…, m, n] = epilogue(Σ_k a[…, m, k] w[…, k, n]) of two operands that are known at run time.

Either operand may be transposed, and each is f32, bf16 or f16; sums are f32. Each thread has a
range of rows or of columns, and packs what it multiplies in buffers on its stack that fit the L2
cache:

    for each block of k                 at most DEPTH elements, about equal
        for each block of panels        packed:  panel[k][columns], padded with zeros
            for each block of rows      packed:  tile[k][rows] if a is transposed,
                                                 row[k] if it is of half floats; else read in place
                for each panel, tile    the register tile of `kernels.matmul.matmul`

Sums of earlier blocks of k are in the result, or in `t` where the result is not f32. One thread
forms each sum in the order of k, in blocks that depend only on k, so results do not depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32
from bitwright.backends.cpu.codegen.emit.types import i1, storage_type
from bitwright.backends.cpu.kernels.elementwise.loop_nest import position, product
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import F32Dot
from bitwright.backends.cpu.kernels.matmul.epilogue import Epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import Product
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.kernels.movement.transpose import transposed
from bitwright.backends.cpu.lowering.region import address_of
from bitwright.ir.dtype import DType

DEPTH = 320
"""The most elements of k in a block; a multiple of the lanes of every target."""
BUFFER_FLOATS = 112 << 10
"""f32 elements in both buffers of a thread."""
DIRECT, WIDENED, TRANSPOSED = "direct", "widened", "transposed"
"""How rows are read: in place, as converted rows, or as tiles of rows contiguous on m."""


@dataclass(frozen=True)
class Form:
    """The compile-time parameters of the kernel."""

    tile: Tile
    outer: int
    """The number of batch axes."""
    a: DType
    w: DType
    rows: str
    """DIRECT, WIDENED or TRANSPOSED."""
    w_by_rows: bool
    """Whether w is contiguous on n; otherwise it is contiguous on k."""
    is_short: bool
    """Whether one block holds all of k."""
    keeps: bool
    """Whether sums of earlier blocks are in `t`, because the result is not f32."""

    @property
    def panel_floats(self) -> int:
        return DEPTH * self.tile.columns

    @property
    def panels(self) -> int:
        """Panels in a block: as many as fit, because packed rows are packed again for each."""
        return max(1, BUFFER_FLOATS * 4 // 5 // self.panel_floats)

    @property
    def tiles(self) -> int:
        """Tiles in a block of rows."""
        room = BUFFER_FLOATS - self.panels * self.panel_floats
        return max(4, room // self.tile_floats)

    @property
    def tile_floats(self) -> int:
        """A tile of packed rows; its last store may run over by less than a vector."""
        return DEPTH * self.tile.rows + 16

    @property
    def pointers(self) -> tuple[str, ...]:
        return ("a", "w", "y", *(("t",) if self.keeps else ()))

    @property
    def sizes(self) -> tuple[str, ...]:
        axes = range(self.outer)
        return (
            *("rows", "columns", "depth", "a_step", "w_step", "y_stride"),
            *(f"size{axis}" for axis in axes),
            *(f"{operand}.{axis}" for operand in "awy" for axis in axes),
        )


class TiledRowsDot(F32Dot):
    """f32 products with rows in tiles [k][rows]."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return f.splat(f.load(f32, row, step * self.rows), lanes)


def emit_blocked(
    module: Module,
    name: str,
    form: Form,
    epilogue: Epilogue,
    begin: Callable[[BlockedProduct], None],
) -> Signature:
    """Emits the kernel; `begin` receives the product before its epilogue is emitted.

    `a_step` and `w_step` are the strides of the axes that are not contiguous; `t` has the layout of
    y.
    """
    signature = Signature((*form.pointers, *epilogue.pointers), (*form.sizes, *epilogue.sizes))
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        product = BlockedProduct(f, form, epilogue)
        begin(product)
        product.emit()
    return signature


class BlockedProduct(Product):
    def __init__(self, f: Kernel, form: Form, epilogue: Epilogue) -> None:
        self.form = form
        self.sizes = [f.args.size(f"size{axis}") for axis in range(form.outer)]
        self.outer: tuple[Value, ...] = ()
        dot = TiledRowsDot(form.tile.rows) if form.rows == TRANSPOSED else F32Dot()
        super().__init__(f, form.tile, epilogue, dot)
        self.right = f.scratch(f32, form.panels * form.panel_floats)
        self.left = self.right
        if form.rows != DIRECT:
            self.left = f.scratch(f32, form.tiles * form.tile_floats)
        self.first_row = self.begin = f.index(0)
        self.is_first = self.is_last = f.const(i1, 1)

    def total_steps(self) -> Value:
        return self.f.args.size("depth")

    def emit(self) -> None:
        """Shares columns among threads, or rows where there are more of them."""
        f, tile = self.f, self.tile
        panels = f.udiv(self.columns + (tile.columns - 1), tile.columns)
        tiles = f.udiv(self.rows + (tile.rows - 1), tile.rows)
        by_rows = f.or_(f.gt(self.rows, self.columns), f.lt(panels, f.threads))
        each = f.select(by_rows, tiles, panels)
        begin, end = f.share(product(f, [*self.sizes, each]))
        with f.if_(f.lt(begin, end)), f.do_while(carry=(begin,)) as runs:
            (at,) = runs.carried
            matrix = f.udiv(at, each)
            self.outer = position(f, self.sizes, matrix)
            first = at - matrix * each
            count = f.min(each - first, end - at)
            self._matrix(
                f.select(by_rows, first, 0),
                f.select(by_rows, first + count, tiles),
                f.select(by_rows, 0, first),
                f.select(by_rows, panels, first + count),
            )
            after = at + count
            runs.next(after, again=f.lt(after, end))

    def _matrix(self, tile: Value, last_tile: Value, panel: Value, last_panel: Value) -> None:
        """Computes a rectangle of tiles of the current matrix."""
        f, form = self.f, self.form
        total = self.total_steps()
        if form.is_short:
            self._columns(f.index(0), total, tile, last_tile, panel, last_panel)
            return
        blocks = f.max(f.udiv(total + (DEPTH - 1), DEPTH), 1)
        most = f.udiv(total + (blocks - 1), blocks)
        with f.loop(0, blocks, nonempty=True) as loop:
            begin = loop.index * most
            self.is_first = f.eq(loop.index, 0)
            self.is_last = f.eq(loop.index + 1, blocks)
            count = f.max(f.min(most, total - begin), 0)
            self._columns(begin, count, tile, last_tile, panel, last_panel)

    def _columns(
        self,
        begin: Value,
        count: Value,
        tile: Value,
        last_tile: Value,
        panel: Value,
        last_panel: Value,
    ) -> None:
        """Computes the sums of one block of k."""
        f, form = self.f, self.form
        self.begin, self.depth = begin, count
        with f.loop(panel, last_panel, form.panels) as wide:
            some = f.min(wide.index + form.panels, last_panel)
            (self._pack_panels if form.w_by_rows else self._transpose_panels)(wide.index, some)
            with f.loop(tile, last_tile, form.tiles) as tall:
                top = tall.index * self.tile.rows
                bottom = f.min(
                    f.min(tall.index + form.tiles, last_tile) * self.tile.rows, self.rows
                )
                self.first_row = top
                if form.rows == TRANSPOSED:
                    self._pack_tiles(top, bottom)
                elif form.rows == WIDENED:
                    self._widen_rows(top, bottom)
                with f.loop(wide.index, some) as loop:
                    place = (loop.index - wide.index) * form.panel_floats
                    w = f.gep(f32, self.right, place)
                    self.run_tiles(loop.index, top, bottom, w, w, count)

    def run_tiles(
        self, panel: Value, top: Value, bottom: Value, w: Value, ahead: Value, size: Value
    ) -> None:
        with self.f.loop(top, bottom, self.tile.rows) as loop:
            self._tile(loop.index, bottom, panel * self.tile.columns, w, None)

    # packing

    def _pack_panels(self, panel: Value, last: Value) -> None:
        """Packs panels of w that is contiguous on n, row by row."""
        f, form, tile = self.f, self.form, self.tile
        type_ = storage_type(form.w)
        start = address_of(f, "w", type_, self.outer)
        vector = type_.vector(tile.lanes)
        whole = f.min(last, f.udiv(self.columns, tile.columns))
        with f.loop(0, self.depth) as steps:
            row = f.gep(type_, start, (self.begin + steps.index) * f.args.size("w_step"))

            def copy(
                number: Value, masked: bool, row: Value = row, at: Value = steps.index
            ) -> None:
                column = number * tile.columns
                to = (number - panel) * form.panel_floats + at * tile.columns
                for v in range(tile.vectors):
                    here = column + v * tile.lanes
                    mask = f.mask(self.columns - here, tile.lanes) if masked else None
                    part = f.convert(f.load(vector, row, here, mask=mask), f32)
                    f.store(part, self.right, to + v * tile.lanes)

            with f.loop(panel, whole) as loop:
                copy(loop.index, False)
            with f.if_(f.lt(whole, last)):
                copy(whole, True)

    def _transpose_panels(self, panel: Value, last: Value) -> None:
        """Packs panels of w that is contiguous on k, in squares; missing columns repeat the last
        one, and their sums are never stored."""
        f, form, tile = self.f, self.form, self.tile
        type_, lanes = storage_type(form.w), tile.lanes
        start = f.gep(type_, address_of(f, "w", type_, self.outer), self.begin)
        step = f.args.size("w_step")
        with f.loop(panel * tile.columns, last * tile.columns, lanes) as loop:
            number = f.udiv(loop.index, tile.columns)
            inside = loop.index - number * tile.columns
            to = f.gep(f32, self.right, (number - panel) * form.panel_floats + inside)
            columns = [
                f.gep(type_, start, f.min(loop.index + i, self.columns - 1) * step)
                for i in range(lanes)
            ]

            def square(at: Value, mask: Value | None) -> None:
                rows = [
                    f.convert(f.load(type_.vector(lanes), c, at, mask=mask), f32) for c in columns
                ]
                for i, part in enumerate(transposed(f, rows)):
                    f.store(part, to, (at + i) * tile.columns)

            f.vectors(0, self.depth, lanes, square)

    def _pack_tiles(self, top: Value, bottom: Value) -> None:
        """Packs tiles of a that is contiguous on m. Vectors are longer than a tile: each store runs
        over into the place that is written next."""
        f, form, tile = self.f, self.form, self.tile
        type_, high = storage_type(form.a), tile.rows
        width = 1 << (high - 1).bit_length()
        start = address_of(f, "a", type_, self.outer)
        whole = f.min(bottom, f.max(self.rows - (width - 1), top))
        with f.loop(0, self.depth) as steps:
            line = f.gep(type_, start, (self.begin + steps.index) * f.args.size("a_step"))

            def copy(row: Value, to: Value, masked: bool, line: Value = line) -> None:
                mask = f.mask(self.rows - row, width) if masked else None
                part = f.convert(f.load(type_.vector(width), line, row, mask=mask), f32)
                f.store(part, self.left, to)

            with f.loop(top, whole, high, carry=(top, steps.index * high)) as loop:
                copy(loop.index, loop.carried[1], False)
                loop.next(loop.index + high, loop.carried[1] + form.tile_floats)
            with f.loop(loop.results[0], bottom, high, carry=loop.results[1:]) as rest:
                copy(rest.index, rest.carried[0], True)
                rest.next(rest.carried[0] + form.tile_floats)

    def _widen_rows(self, top: Value, bottom: Value) -> None:
        """Converts rows of a that are contiguous on k."""
        f, lanes = self.f, self.tile.lanes
        type_ = storage_type(self.form.a)
        start = f.gep(type_, address_of(f, "a", type_, self.outer), self.begin)
        with f.loop(top, bottom) as loop:
            row = f.gep(type_, start, loop.index * f.args.size("a_step"))
            to = f.gep(f32, self.left, (loop.index - top) * DEPTH)

            def widen(at: Value, mask: Value | None, row: Value = row, to: Value = to) -> None:
                f.store(f.convert(f.load(type_.vector(lanes), row, at, mask=mask), f32), to, at)

            f.vectors(0, self.depth, lanes, widen)

    # addresses and results

    def row_address(self, row: Value) -> Value:
        f, form = self.f, self.form
        if form.rows == DIRECT:
            offset = row * f.args.size("a_step") + self.begin
            return f.gep(f32, address_of(f, "a", f32, self.outer), offset)
        inside = row - self.first_row
        if form.rows == WIDENED:
            return f.gep(f32, self.left, inside * DEPTH)
        high = self.tile.rows
        number = f.udiv(inside, high)
        return f.gep(f32, self.left, number * form.tile_floats + (inside - number * high))

    def row_addresses(self, row: Value, count: int) -> list[Value]:
        if self.form.rows != TRANSPOSED:
            return super().row_addresses(row, count)
        first = self.row_address(row)
        return [self.f.gep(f32, first, i) for i in range(count)]

    def add_products(
        self, rows: list[Value], w: Value, sums: list[Value], ahead: Value | None
    ) -> list[Value]:
        return self.add_run(rows, w, sums, self.depth, ahead)[1]

    def result_offset(self, row: Value) -> Value:
        f = self.f
        total = row * self.y_stride
        for axis, place in enumerate(self.outer):
            total = total + place * f.args.size(f"y.{axis}")
        return total

    def _finish_row(self, row: Value, column: Value, masks: list[Value], sums: list[Value]) -> None:
        """Adds the sums of earlier blocks of k; the epilogue applies to the last block."""
        if self.form.is_short:
            super()._finish_row(row, column, masks, sums)
            return
        f, lanes = self.f, self.tile.lanes
        base = f.args.pointer("t" if self.form.keeps else "y")
        kept = f.gep(f32, base, self.result_offset(row) + column)
        with f.if_(f.not_(self.is_first), sums) as branch:
            parts = [
                f.load(self.vector, kept, v * lanes, mask=mask) for v, mask in enumerate(masks)
            ]
            branch.next(*[f.add(part, total) for part, total in zip(parts, sums, strict=True)])
        totals = list(branch.results)
        with f.if_(self.is_last) as last:
            super()._finish_row(row, column, masks, totals)
        with last.else_():
            for v, mask in enumerate(masks):
                f.store(totals[v], kept, v * lanes, mask=mask)
