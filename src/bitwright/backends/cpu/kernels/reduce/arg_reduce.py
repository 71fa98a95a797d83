"""argmax and argmin along an axis (`kernels.reduce.ordering`), and the one-hot form, hardmax.

Loops are those of `kernels.reduce.reduce`: lanes along the axis, with four alternating candidates
per lane and a fixed tournament at the end; or lanes along kept columns, with one candidate per
lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import i32, i64, storage_type
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces, position, product
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, unless_empty
from bitwright.backends.cpu.kernels.reduce.ordering import Order
from bitwright.backends.cpu.lowering.region import Part, Reads, Row

CANDIDATES = 4


@dataclass(frozen=True)
class ArgReduction:
    order: Order
    last: bool
    """Whether the last of equal elements is selected."""
    before: Part
    x: Reads
    kept: int
    along_rows: bool
    hard: bool = False
    """Whether the result is a one-hot row instead of the index."""

    @property
    def key(self) -> tuple[Any, ...]:
        form = self.kept, self.along_rows, self.hard
        return self.order, self.last, self.before.expression, self.x.key, form

    @property
    def signature(self) -> Signature:
        kept = [f"k{axis}" for axis in range(self.kept)]
        reduced = [] if self.along_rows else ["r0"]
        sizes = (*kept, *reduced, "columns", *self.x.sizes)
        if self.hard:
            return Signature((*self.x.names, "y"), sizes)
        return Signature((*self.x.names, "y", "fault"), (*sizes, *FAULT_SLOTS))


def emit_arg_reduction(module: Module, name: str, kernel: ArgReduction) -> Signature:
    with module.kernel(name, kernel.signature) as f:
        kept = [f.args.size(f"k{axis}") for axis in range(kernel.kept)]
        _Emission(f, kernel, kept).emit()
    return kernel.signature


class _Emission:
    def __init__(self, f: Kernel, kernel: ArgReduction, kept: Sequence[Value]) -> None:
        self.f, self.kernel, self.kept = f, kernel, kept
        self.order = kernel.order
        self.lanes = f.target.lanes(max(self.order.type.bits, 32))
        self.index = (i64 if self.order.type.bits == 64 else i32).vector(self.lanes)
        self.columns = f.args.size("columns")

    def emit(self) -> None:
        f = self.f
        if not self.kernel.along_rows:
            self._emit_columns()
            return
        begin, end = f.share(product(f, self.kept))

        def rows() -> None:
            with f.loop(begin, end) as loop:
                place = self._row(position(f, self.kept, loop.index))
                if self.kernel.hard:
                    self._write_row(loop.index, place)
                else:
                    f.store(f.convert(place, i64), f.args.pointer("y"), loop.index)

        if self.kernel.hard:  # an empty row needs no writes
            with f.if_(f.gt(self.columns, 0)):
                rows()
        else:
            unless_empty(f, self.columns, begin, end, rows)

    # along rows

    def _row(self, index: Sequence[Value]) -> Value:
        f, lanes = self.f, self.lanes
        row = self.kernel.x.at(f, index, lanes)
        first = self._value(self.kernel.x.at(f, index, 1), f.index(0), None, 1)
        values = (f.splat(first, lanes),) * CANDIDATES
        places = (f.const(self.index, 0),) * CANDIDATES

        def body(column: Value, mask: Value | None, *state: Value) -> list[Value]:
            v = self._value(row, column, mask, lanes)
            held, places = state[:CANDIDATES], state[CANDIDATES:]
            at = f.iota(self.index.scalar, lanes) + f.convert(column, self.index.scalar)
            wins = self._wins(v, held[0])
            wins = wins if mask is None else f.and_(wins, mask)
            new, new_at = f.select(wins, v, held[0]), f.select(wins, at, places[0])
            return [*held[1:], new, *places[1:], new_at]

        state = f.vectors(0, self.columns, lanes, body, (*values, *places), unroll=CANDIDATES)
        pairs = list(zip(state[:CANDIDATES], state[CANDIDATES:], strict=True))
        while len(pairs) > 1:
            pairs = [self._better(a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        return self._across(*pairs[0])

    def _value(self, row: Row, column: Operand, mask: Value | None, lanes: int) -> Value:
        v = self.kernel.before.evaluate(self.f, row.load(column, mask), lanes)
        return self.order.to_compared(self.f, v)

    def _wins(self, v: Value, held: Value) -> Value:
        """Whether a later element replaces the candidate."""
        wins = self.order.before(self.f, v, held)
        return self.f.or_(wins, self.order.ties(self.f, v, held)) if self.kernel.last else wins

    def _better(self, a: tuple[Value, Value], b: tuple[Value, Value]) -> tuple[Value, Value]:
        f = self.f
        behind = f.gt(b[1], a[1]) if self.kernel.last else f.lt(b[1], a[1])
        tied = f.and_(self.order.ties(f, b[0], a[0]), behind)
        wins = f.or_(self.order.before(f, b[0], a[0]), tied)
        return f.select(wins, b[0], a[0]), f.select(wins, b[1], a[1])

    def _across(self, values: Value, places: Value) -> Value:
        f = self.f
        while values.type.lanes > 1:
            half = values.type.lanes // 2
            low, high = ((f.part(values, at, half), f.part(places, at, half)) for at in (0, half))
            values, places = self._better(low, high)
        return places

    def _write_row(self, row: Value, place: Value) -> None:
        f, lanes = self.f, self.lanes
        element = storage_type(self.kernel.before.dtype)
        one, zero = f.const(element.vector(lanes), 1.0), f.const(element.vector(lanes), 0.0)
        wanted = f.splat(place, lanes)

        def body(column: Value, mask: Value | None) -> None:
            at = f.iota(self.index.scalar, lanes) + f.convert(column, self.index.scalar)
            y = f.select(f.eq(at, wanted), one, zero)
            f.store(y, f.args.pointer("y"), row * self.columns + column, mask=mask)

        f.vectors(0, self.columns, lanes, body)

    # down columns

    def _emit_columns(self) -> None:
        f, lanes = self.f, self.lanes
        chunks = pieces(f, self.columns, lanes)
        space = [*self.kept, chunks]
        begin, end = f.share(product(f, space))
        size = f.args.size("r0")
        unless_empty(f, size, begin, end, lambda: self._chunks(begin, end, space, size))

    def _chunks(self, begin: Value, end: Value, space: Sequence[Value], size: Value) -> None:
        f, lanes = self.f, self.lanes
        with f.loop(begin, end) as loop:
            *index, chunk = position(f, space, loop.index)
            column = chunk * lanes
            mask = f.mask(self.columns - column, lanes)

            def value(at: Operand, index: Sequence[Value] = index) -> Value:
                row = self.kernel.x.at(f, (*index, at), lanes)
                return self._value(row, column, mask, lanes)

            start = value(0), f.const(self.index, 0)
            with f.loop(1, size, carry=start) as down:
                v = value(down.index)
                wins = self._wins(v, down.carried[0])
                place = f.splat(f.convert(down.index, self.index.scalar), lanes)
                down.next(
                    f.select(wins, v, down.carried[0]), f.select(wins, place, down.carried[1])
                )
            row = f.udiv(loop.index, space[-1]) * self.columns
            f.store(f.convert(down.results[1], i64), f.args.pointer("y"), row + column, mask=mask)
