"""Packs 8-bit matrices into panels at run time, and multiplies them.

    w[…, k, n]  ->  panels [n / columns][k / group][columns][group] of signed weights w', padded
                    with zeros; unsigned values are moved by 128: w' = w ^ 128, wz' = wz - 128

and computes the terms of each column that `kernels.matmul.dot.int8_dot` needs,

    sums    Σ w' - K wz'                        where x_zero differs between rows
    offset  (shift - x_zero) sums + bias        where it is one number
    w_zero  wz'

`BatchedProduct` is the product of `kernels.matmul.matmul` over batch axes; w may be shared along
some of them. Threads share panels when packing, and tiles when multiplying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import i8, i32, storage_type
from bitwright.backends.cpu.kernels.elementwise.loop_nest import position, product
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import DotProduct
from bitwright.backends.cpu.kernels.matmul.epilogue import Epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import Product
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.lowering.region import Reads, address_of
from bitwright.ir.dtype import DType

_TOP_BITS = 0x80808080


@dataclass(frozen=True)
class PackForm:
    """The compile-time parameters of the packing kernel."""

    tile: Tile
    group: int
    signed: bool
    outer: int
    """The number of batch axes."""
    by_rows: bool
    """Whether w is contiguous on n; otherwise it is contiguous on k."""
    shift: int
    """See `Int8Dot.shift`."""
    terms: tuple[str, ...]
    """Which of `sums`, `offset` and `w_zero` are written."""
    inputs: tuple[str, ...]
    """Which of `x_zero`, `w_zero` and `bias` are read, in this order."""


def emit_pack_rhs(module: Module, name: str, form: PackForm, reads: Reads) -> Signature:
    """Emits the kernel; `reads` are the operands that `form.inputs` names, [*outer, n]."""
    sizes = [f"size{axis}" for axis in range(form.outer)] + ["columns", "depth"]
    strides = [f"w.{axis}" for axis in range(form.outer)] + ["step"]
    signature = Signature(
        ("w", "panels", *(f"{term}.made" for term in form.terms), *reads.names),
        (*sizes, *strides, *reads.sizes),
    )
    with module.kernel(name, signature) as f:
        _Emitter(f, form, reads).emit()
    return signature


class _Emitter:
    def __init__(self, f: Kernel, form: PackForm, reads: Reads) -> None:
        self.f, self.form, self.reads = f, form, reads
        self.columns, self.depth = f.args.size("columns"), f.args.size("depth")
        self.steps = f.udiv(self.depth + (form.group - 1), form.group)
        self.group_vector = (i32 if form.group == 4 else i8).vector(form.tile.lanes)

    def emit(self) -> None:
        f, form = self.f, self.form
        panels = f.udiv(self.columns + (form.tile.columns - 1), form.tile.columns)
        sizes = [f.args.size(f"size{axis}") for axis in range(form.outer)]
        begin, end = f.share(product(f, [*sizes, panels]))
        with f.loop(begin, end) as loop:
            matrix = f.udiv(loop.index, panels)
            column = (loop.index - matrix * panels) * form.tile.columns
            outer = position(f, sizes, matrix)
            w = address_of(f, "w", i8, outer)
            panel_bytes = self.steps * (form.tile.columns * form.group)
            packed = f.offset(f.args.pointer("panels"), loop.index * panel_bytes)
            if form.by_rows:
                self._pack_rows(w, column, packed)
            else:
                self._pack_columns(w, column, packed)
            if form.terms:
                self._write_terms(outer, matrix, column, packed)

    def _pack_rows(self, w: Value, column: Value, packed: Value) -> None:
        """Packs w that is contiguous on n, one group of k at a time."""
        f, form = self.f, self.form
        step, lanes = f.args.size("step"), form.tile.lanes
        whole = f.udiv(self.depth, form.group)

        def group(at: Value, count: Value | None, masked: bool) -> None:
            for v in range(form.tile.vectors):
                start = column + v * lanes
                mask = f.mask(self.columns - start, lanes, 8) if masked else None
                word = f.const(self.group_vector, 0)
                for i in range(form.group):
                    k = at * form.group + i
                    if (
                        count is not None
                    ):  # positions behind the last k read it again; the value is masked
                        k = f.min(k, self.depth - 1)
                    row = f.gep(i8, w, k * step)
                    values = f.load(i8.vector(lanes), row, start, mask=mask)
                    if form.group == 1:
                        word = values
                        continue
                    wide = f.shl(f.convert(values, i32, False), 8 * i)
                    word = f.or_(word, wide)
                place = (at * form.tile.columns + v * lanes) * form.group
                f.store(self._to_signed(word, count), f.offset(packed, place), align=1)

        for masked in (False, True):
            is_whole = f.le(column + form.tile.columns, self.columns)
            with f.if_(f.not_(is_whole) if masked else is_whole):
                with f.loop(0, whole) as loop:
                    group(loop.index, None, masked)
                if form.group > 1:
                    left = self.depth - whole * form.group
                    with f.if_(f.gt(left, 0)):
                        group(whole, left, masked)

    def _pack_columns(self, w: Value, column: Value, packed: Value) -> None:
        """Packs w that is contiguous on k, one column at a time."""
        f, form = self.f, self.form
        whole = f.udiv(self.depth, form.group)
        unit = self.group_vector.scalar
        with f.loop(0, form.tile.columns, nonempty=True) as loop:
            # missing columns repeat the last one; their sums are never stored
            number = f.min(column + loop.index, self.columns - 1)
            source = f.gep(i8, w, number * f.args.size("step"))

            def put(word: Value, at: Value, count: Value | None, number: Value) -> None:
                place = (at * form.tile.columns + number) * form.group
                f.store(self._to_signed(word, count), f.offset(packed, place), align=1)

            with f.loop(0, whole) as steps:
                word = f.load(unit, f.offset(source, steps.index * form.group), align=1)
                put(word, steps.index, None, loop.index)
            if form.group > 1:
                left = self.depth - whole * form.group
                with f.if_(f.gt(left, 0)):
                    word = f.const(i32, 0)
                    for i in range(form.group - 1):  # no byte behind the column is read
                        k = f.min(whole * form.group + i, self.depth - 1)
                        value = f.convert(f.load(i8, source, k), i32, False)
                        word = f.or_(word, f.shl(value, 8 * i))
                    put(word, whole, left, loop.index)

    def _to_signed(self, word: Value, count: Value | None) -> Value:
        """Values as signed; zeros behind the first `count` of a group."""
        f, form = self.f, self.form
        if not form.signed:
            word = f.xor(word, 0x80 if form.group == 1 else _TOP_BITS)
        if count is None:
            return word
        mask = f.sub(f.shl(1, f.convert(count, i32) * 8), 1)
        return f.and_(word, f.splat(mask, word.type.lanes) if word.type.is_vector else mask)

    def _write_terms(
        self, outer: Sequence[Value], matrix: Value, column: Value, packed: Value
    ) -> None:
        """Computes the terms of a packed panel's columns."""
        f, form, lanes = self.f, self.form, self.form.tile.lanes
        row = self.reads.at(f, outer, lanes)
        for v in range(form.tile.vectors):
            start = column + v * lanes
            mask = f.mask(self.columns - start, lanes)
            loaded = zip(form.inputs, row.load(start, mask), strict=True)
            inputs = {
                name: f.convert(value, i32, view.dtype.is_signed)
                for (name, value), view in zip(loaded, self.reads.views, strict=True)
            }
            w_zero = inputs.get("w_zero", f.const(i32.vector(lanes), 0))
            if not form.signed:
                w_zero = w_zero - 128
            sums = self._sums(packed, v) - w_zero * f.splat(f.convert(self.depth, i32), lanes)
            terms = {"sums": sums, "w_zero": w_zero}
            if "offset" in form.terms:
                factor = f.const(sums.type, form.shift)
                if "x_zero" in inputs:
                    factor = factor - inputs["x_zero"]
                offset = factor * sums
                terms["offset"] = offset + inputs["bias"] if "bias" in inputs else offset
            for name in form.terms:
                at = matrix * self.columns + start
                f.store(terms[name], f.args.pointer(f"{name}.made"), at, mask=mask)

    def _sums(self, packed: Value, v: int) -> Value:
        """Σ w' of a vector of columns."""
        f, form, lanes = self.f, self.form, self.form.tile.lanes
        with f.loop(0, self.steps, carry=(f.const(i32.vector(lanes), 0),)) as loop:
            place = (loop.index * form.tile.columns + v * lanes) * form.group
            word = f.load(self.group_vector, f.offset(packed, place), align=1)
            total = loop.carried[0]
            if form.group == 1:
                total = total + f.convert(word, i32)
            else:
                for i in range(form.group):
                    total = total + f.ashr(f.shl(word, 24 - 8 * i), 24)
            loop.next(total)
        return loop.results[0]


class BatchedProduct(Product):
    """Products of many matrices; `outer` is the index of the current one while tiles are
    emitted."""

    def __init__(
        self, f: Kernel, tile: Tile, epilogue: Epilogue, dot: DotProduct, outer: int
    ) -> None:
        self.sizes = [f.args.size(f"size{axis}") for axis in range(outer)]
        self.outer: tuple[Value, ...] = ()
        super().__init__(f, tile, epilogue, dot)

    def emit(self) -> None:
        f, tile = self.f, self.tile
        panels = f.udiv(self.columns + (tile.columns - 1), tile.columns)
        tiles = f.udiv(self.rows + (tile.rows - 1), tile.rows)
        height = f.max(f.min(f.args.size("block"), tiles), 1)
        each = tiles * panels
        begin, end = f.share(product(f, [*self.sizes, each]))
        with f.if_(f.lt(begin, end)), f.do_while(carry=(begin,)) as runs:
            (at,) = runs.carried
            matrix = f.udiv(at, each)
            self.outer = position(f, self.sizes, matrix)
            inside = at - matrix * each
            first, tall, _, panel, top = self.tile_position(inside, height, panels, tiles)
            count = f.min(tall - top, end - at)
            self._run_panel(panel, (first + top) * tile.rows, count)
            after = at + count
            runs.next(after, again=f.lt(after, end))

    def rhs_index(self) -> Value:
        """The index of the matrix of w, which several matrices of a may share."""
        f = self.f
        total = f.index(0)
        for axis, place in enumerate(self.outer):
            total = total + place * f.args.size(f"w.{axis}")
        return total

    def panels(self) -> Value:
        matrix_bytes = self.matrix_bytes()
        return self.f.offset(self.f.args.pointer("w"), self.rhs_index() * matrix_bytes)

    def constant_offset(self, column: Value) -> Value:
        return self.rhs_index() * self.columns + column

    def row_address(self, row: Value) -> Value:
        return address_of(self.f, "a", self.dot.element, (*self.outer, row))

    def result_offset(self, row: Value) -> Value:
        f = self.f
        total = row * self.y_stride
        for axis, place in enumerate(self.outer):
            total = total + place * f.args.size(f"y.{axis}")
        return total


def product_sizes(outer: int) -> tuple[str, ...]:
    """The slots of a batched product besides those of `Product`."""
    axes = range(outer)
    return (
        *(f"size{axis}" for axis in axes),
        *(f"a.{axis}" for axis in range(outer + 1)),
        *(f"{operand}.{axis}" for operand in "wy" for axis in axes),
    )


def load_row_zero_point(f: Kernel, reads: Reads, place: Sequence[Value], lanes: int) -> Value:
    """The zero point of a row, the only operand of `reads`, in i32."""
    (zero,) = reads.at(f, place, lanes).load(0)
    element: DType = reads.views[0].dtype
    assert storage_type(element).bits == 8
    return f.convert(zero, i32, element.is_signed)
