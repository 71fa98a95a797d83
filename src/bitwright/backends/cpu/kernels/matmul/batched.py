"""y[…, m, n] = epilogue(Σ_k a[…, m, k] w[…, k, n]), where both operands are known at run time.

    batch axes   any number, each with a stride in every operand (0 where it is broadcast)
    a            any strides
    w            columns contiguous, rows with any stride

Nothing is packed: per k a tile loads a few vectors of one row of w and broadcasts one element of a
per row. Half floats are summed in f32, integers in the type of the result. Threads share tiles; one
thread forms each sum in the order of k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import Type, computed, storage_type
from bitwright.backends.cpu.codegen.expression import from_stored, to_stored
from bitwright.backends.cpu.lowering.region import address_of
from bitwright.ir.dtype import DType
from bitwright.target import Target

ROWS = 4


@dataclass(frozen=True)
class Form:
    """The compile-time parameters of the kernel."""

    outer: int
    """The number of batch axes."""
    a: DType
    w: DType
    sum: DType
    y: DType
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def type(self) -> Type:
        """The type of one sum."""
        return computed(self.sum)


def tile_of(target: Target, total: DType, columns: object) -> tuple[int, int]:
    """Vectors and lanes of a tile; fewer vectors where the result is known to be narrow."""
    lanes = target.lanes(computed(total).bits)
    most = 3 if target.vector_registers >= 32 else 2
    wanted = -(-columns // lanes) if isinstance(columns, int) else most
    return max(1, min(most, wanted)), lanes


@dataclass(frozen=True)
class BatchedEpilogue:
    """`emit(f, value, place, column, mask)` returns the value to store; `place` is the index on the
    batch axes and the row."""

    emit: Callable[[Kernel, Value, Sequence[Value], Value, Value], Value]
    pointers: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()


def emit_product(module: Module, name: str, form: Form, epilogue: BatchedEpilogue) -> Signature:
    axes = range(form.outer)
    signature = Signature(
        ("a", "w", "y", *epilogue.pointers),
        (
            *(f"size{axis}" for axis in axes),
            *("rows", "columns", "depth"),
            *(f"{operand}.{axis}" for operand in "ay" for axis in range(form.outer + 1)),
            *(f"w.{axis}" for axis in axes),
            *("a_k", "w_k"),
            *epilogue.sizes,
        ),
    )
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        _Product(f, form, epilogue).emit()
    return signature


class _Product:
    def __init__(self, f: Kernel, form: Form, epilogue: BatchedEpilogue) -> None:
        self.f, self.form, self.epilogue = f, form, epilogue
        self.rows, self.columns, self.depth = map(f.args.size, ("rows", "columns", "depth"))

    def emit(self) -> None:
        """Shares the tiles of all matrices among the threads."""
        f, form = self.f, self.form
        panels = f.udiv(self.columns + (form.columns - 1), form.columns)
        bands = f.udiv(self.rows + (ROWS - 1), ROWS)
        count = panels * bands
        for axis in range(form.outer):
            count = count * f.args.size(f"size{axis}")
        begin, end = f.share(count)
        with f.loop(begin, end) as tiles:
            rest = f.udiv(tiles.index, panels)
            panel = tiles.index - rest * panels
            matrix = f.udiv(rest, bands)
            band = rest - matrix * bands
            self._tile(self._batch_index(matrix), band * ROWS, panel * form.columns)

    def _batch_index(self, matrix: Value) -> list[Value]:
        """The index of a matrix on every batch axis."""
        f, found = self.f, []
        for axis in reversed(range(self.form.outer)):
            size = f.args.size(f"size{axis}")
            rest = f.udiv(matrix, size)
            found.append(matrix - rest * size)
            matrix = rest
        return list(reversed(found))

    def _tile(self, outer: list[Value], row: Value, column: Value) -> None:
        f, form = self.f, self.form
        w = f.gep(storage_type(form.w), address_of(f, "w", storage_type(form.w), outer), column)
        masks = [
            f.mask(self.columns - column - v * form.lanes, form.lanes, form.type.bits)
            for v in range(form.vectors)
        ]
        with f.if_(f.le(row + ROWS, self.rows)) as branch:
            self._rows(ROWS, outer, row, column, w, masks)
        with branch.else_(), f.loop(row, self.rows) as loop:
            self._rows(1, outer, loop.index, column, w, masks)

    def _rows(
        self,
        count: int,
        outer: list[Value],
        row: Value,
        column: Value,
        w: Value,
        masks: list[Value],
    ) -> None:
        """Computes a few rows of a tile; whole tiles read w without masks."""
        f, form = self.f, self.form
        zeros = [f.const(form.type.vector(form.lanes), 0)] * (count * form.vectors)
        starts = [address_of(f, "a", storage_type(form.a), (*outer, row + i)) for i in range(count)]
        whole = f.le(column + form.columns, self.columns)
        with f.if_(whole, carry=zeros) as branch:
            branch.next(*self._sums(starts, w, zeros, [None] * form.vectors))
        with branch.else_():
            branch.next(*self._sums(starts, w, zeros, masks))
        for number, total in enumerate(branch.results):
            i, v = divmod(number, form.vectors)
            place = (*outer, row + i)
            at = column + v * form.lanes
            value = self.epilogue.emit(f, total, place, at, masks[v])
            y = address_of(f, "y", storage_type(form.y), place)
            f.store(to_stored(f, value, form.y), y, at, mask=masks[v])

    def _sums(
        self, starts: list[Value], w: Value, zeros: list[Value], masks: Sequence[Value | None]
    ) -> tuple[Value, ...]:
        f, form = self.f, self.form
        a_step, w_step = f.args.size("a_k"), f.args.size("w_k")
        with f.loop(0, self.depth, carry=zeros) as loop:
            line = f.gep(storage_type(form.w), w, loop.index * w_step)
            vector = storage_type(form.w).vector(form.lanes)
            parts = [
                self._convert(f.load(vector, line, v * form.lanes, mask=mask), form.w)
                for v, mask in enumerate(masks)
            ]
            sums = list(loop.carried)
            for i, start in enumerate(starts):
                lhs = f.load(storage_type(form.a), start, loop.index * a_step)
                broadcast = f.splat(self._convert(lhs, form.a), form.lanes)
                for v, part in enumerate(parts):
                    at = i * form.vectors + v
                    sums[at] = f.fma(broadcast, part, sums[at])
            loop.next(*sums)
        return loop.results

    def _convert(self, value: Value, element: DType) -> Value:
        """A loaded element converted to the type of the sums."""
        f = self.f
        return f.convert(from_stored(f, value, element), self.form.type, element.is_signed)
