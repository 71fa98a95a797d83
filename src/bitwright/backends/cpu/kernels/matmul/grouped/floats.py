"""Products of float rows that are sorted by expert.

    rows     y[r] = x[r] @ w[e]          for the rows r of expert e
    weights  dw[e] = sum over the rows r of expert e of x[r]ᵀ dy[r]

Both are products c = a b of one expert with sums in registers: a is read by element, b by vectors
along its columns. The number of rows per expert is data. Threads share the tiles of each expert;
every sum belongs to one thread. Counts that do not sum to the number of rows are a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import computed, i64, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed, to_stored
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, record_fault
from bitwright.ir.dtype import DType
from bitwright.target import Target

SIZES = ("experts", "rows", "depth", "columns", "x_row", "w_expert", "w_row", *FAULT_SLOTS)


@dataclass(frozen=True)
class Grouped:
    """The compile-time parameters: sums of `rows` × `vectors` are in registers."""

    element: DType
    is_weight: bool
    """Whether the result is the gradient of the weights."""
    rows: int
    vectors: int


def tile_of(target: Target) -> tuple[int, int]:
    """Rows and vectors of a tile that fits the registers."""
    return (8, 3) if target.has("avx512f") else (6, 2) if target.has("avx") else (4, 2)


@dataclass(frozen=True)
class _Product:
    """c[m, n] = sum over k of a[m, k] * b[k, n] of one expert: addresses, sizes and strides."""

    a: Value
    b: Value
    c: Value
    height: Value
    depth: Value
    a_row: Operand
    a_column: Operand
    b_row: Value


def emit_grouped(module: Module, name: str, form: Grouped) -> Signature:
    """Slots: x [rows, depth] and w [experts, depth, columns], or dy [rows, columns] as w.

    `x_row`, `w_row` and `w_expert` are strides; the result is row-major.
    """
    signature = Signature(("x", "w", "counts", "y", "fault"), SIZES)
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        rows = f.args.size("rows")
        with f.loop(0, f.args.size("experts"), carry=(f.index(0),)) as loop:
            (start,) = loop.carried
            given = f.load(i64, f.args.pointer("counts"), loop.index)
            count = f.min(f.max(given, 0), rows - start)
            with f.if_(f.ne(given, count)):
                record_fault(f, given)
            _tiles(f, form, _product(f, form, loop.index, start, count))
            loop.next(start + count)
        (end,) = loop.results
        with f.if_(f.ne(end, rows)):
            record_fault(f, end)
    return signature


def _product(f: Kernel, form: Grouped, expert: Value, start: Value, count: Value) -> _Product:
    type_ = storage_type(form.element)
    x_row, w_row, depth = (f.args.size(name) for name in ("x_row", "w_row", "depth"))
    columns = f.args.size("columns")
    x = f.gep(type_, f.args.pointer("x"), start * x_row)
    w, y = f.args.pointer("w"), f.args.pointer("y")
    if form.is_weight:
        b, c = f.gep(type_, w, start * w_row), f.gep(type_, y, expert * depth * columns)
        return _Product(x, b, c, depth, count, 1, x_row, w_row)
    b = f.gep(type_, w, expert * f.args.size("w_expert"))
    return _Product(x, b, f.gep(type_, y, start * columns), count, depth, x_row, 1, w_row)


def _tiles(f: Kernel, form: Grouped, product: _Product) -> None:
    lanes, columns = f.target.lanes(computed(form.element).bits), f.args.size("columns")
    wide = lanes * form.vectors
    panels, tiles = pieces(f, columns, wide), pieces(f, product.height, form.rows)
    begin, end = f.share(panels * tiles)
    with f.loop(begin, end) as loop:
        panel = f.udiv(loop.index, tiles)
        column, row = panel * wide, (loop.index - panel * tiles) * form.rows
        with f.if_(f.le(column + wide, columns)) as whole:
            _tile(f, form, product, row, column, [None] * form.vectors)
        with whole.else_():
            left = columns - column
            masks = [f.mask(left - turn * lanes, lanes) for turn in range(form.vectors)]
            _tile(f, form, product, row, column, masks)


def _tile(
    f: Kernel,
    form: Grouped,
    product: _Product,
    row: Value,
    column: Value,
    masks: Sequence[Value | None],
) -> None:
    """One tile; rows past the last one read it again and are not written."""
    element, scalar, type_ = form.element, computed(form.element), storage_type(form.element)
    lanes = f.target.lanes(scalar.bits)
    last = product.height - 1
    lines = [
        f.gep(type_, product.a, f.min(row + turn, last) * product.a_row)
        for turn in range(form.rows)
    ]
    b = f.gep(type_, product.b, column)
    zeros = [f.const(scalar.vector(lanes), 0.0)] * (form.rows * form.vectors)
    with f.loop(0, product.depth, carry=zeros) as loop:
        place = loop.index * product.b_row
        found = [
            load_computed(f, element, lanes, b, place + turn * lanes, mask=mask)
            for turn, mask in enumerate(masks)
        ]
        sums = []
        for turn, line in enumerate(lines):
            a = load_computed(f, element, 1, line, loop.index * product.a_column)
            wide = f.splat(a, lanes)
            for at, vector in enumerate(found):
                sums.append(f.fma(wide, vector, loop.carried[turn * form.vectors + at]))
        loop.next(*sums)
    columns = f.args.size("columns")
    for turn in range(form.rows):
        with f.if_(f.lt(row + turn, product.height)):
            c = f.gep(type_, product.c, (row + turn) * columns + column)
            for at, mask in enumerate(masks):
                total = loop.results[turn * form.vectors + at]
                f.store(to_stored(f, total, element), c, at * lanes, mask=mask)
