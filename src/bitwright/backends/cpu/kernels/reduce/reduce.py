"""Reductions of strided operands (`kernels.reduce.reduction`): along rows, or down columns.

    rows      the last axis is reduced: lanes run along it, accumulators alternate, and a fixed
              tree combines the lanes at the end
    columns   the last axis is kept: lanes run along it, four vectors of columns at a time

Views have their axes in the order kept …, reduced … (rows) or kept …, reduced …, columns. Sizes of
kept axes are slots `k0` …, of reduced ones `r0` …, and `columns` is the last axis. A long axis is
reduced in pieces, so that rounding errors grow slowly with its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces, position, product
from bitwright.backends.cpu.kernels.reduce.reduction import ReductionOp
from bitwright.backends.cpu.kernels.rows.formulas import Pass
from bitwright.backends.cpu.lowering.region import STEP, Part, Reads

ACCUMULATORS = 4
VECTORS = 4
"""Vectors of columns reduced together."""
PIECE = 512
"""Vectors, or rows of columns, per set of accumulators."""


@dataclass(frozen=True)
class Reduction:
    op: ReductionOp
    before: Part
    x: Reads
    kept: int
    reduced: int
    """The number of axes of each kind, without the columns."""
    along_rows: bool

    @property
    def key(self) -> tuple[Any, ...]:
        shape = self.kept, self.reduced, self.along_rows
        return self.op, self.before.expression, self.x.key, shape

    @property
    def signature(self) -> Signature:
        kept = [f"k{axis}" for axis in range(self.kept)]
        reduced = [f"r{axis}" for axis in range(self.reduced)]
        return Signature((*self.x.names, "y"), (*kept, *reduced, "columns", *self.x.sizes))


def emit_reduction(module: Module, name: str, kernel: Reduction) -> Signature:
    with module.kernel(name, kernel.signature) as f:
        kept = [f.args.size(f"k{axis}") for axis in range(kernel.kept)]
        reduced = [f.args.size(f"r{axis}") for axis in range(kernel.reduced)]
        (_Rows if kernel.along_rows else _Columns)(f, kernel, kept, reduced).emit()
    return kernel.signature


class _Emission:
    """Shared by both loop orders: the loops over the reduced axes except the last."""

    def __init__(
        self, f: Kernel, kernel: Reduction, kept: Sequence[Value], reduced: Sequence[Value]
    ) -> None:
        self.f, self.kernel, self.kept, self.reduced = f, kernel, kept, reduced
        self.op = kernel.op
        # gathers read element by element: more lanes would only add code
        skips = STEP in kernel.x.columns
        self.lanes = f.target.lanes(max(self.op.type.bits, 32 if skips else 8))
        self.vector = self.op.type.vector(self.lanes)
        self.columns = f.args.size("columns")

    def _nest(
        self,
        axes: Sequence[Value],
        carry: Sequence[Value],
        body: Callable[..., Sequence[Value]],
        index: tuple[Value, ...] = (),
    ) -> Sequence[Value]:
        """Loops over axes, outermost first, around `body(index, *carried)`."""
        if not axes:
            return body(index, *carry)
        with self.f.loop(0, axes[0], carry=carry) as loop:
            loop.next(*self._nest(axes[1:], loop.carried, body, (*index, loop.index)))
        return loop.results

    def _accumulate(
        self,
        step: Pass,
        end: Value,
        unit: int,
        total: Value,
        value: Callable[[Value, Value | None], Value],
        stats: Sequence[Value],
    ) -> Value:
        """The total plus elements 0 … end - 1, `unit` at a time, with alternating accumulators."""
        f = self.f

        def body(at: Value, mask: Value | None, *totals: Value) -> tuple[Value, ...]:
            folded = step.accumulate(f, totals[0], value(at, mask), stats)
            if mask is not None:
                folded = f.select(mask, folded, totals[0])
            return (*totals[1:], folded)

        start = (f.const(self.vector, step.start),) * ACCUMULATORS
        with f.loop(0, end, PIECE * unit, carry=(total,)) as loop:
            stop = f.min(loop.index + PIECE * unit, end)
            found = f.vectors(loop.index, stop, unit, body, start, unroll=ACCUMULATORS)
            together = f.combine(found, partial(step.combine, f))
            loop.next(step.combine(f, loop.carried[0], together))
        return loop.results[0]


class _Rows(_Emission):
    def emit(self) -> None:
        f = self.f
        begin, end = f.share(product(f, self.kept))
        with f.loop(begin, end) as loop:
            result = self._row(position(f, self.kept, loop.index))
            result = self.op.to_stored(f, result)
            f.store(result, f.args.pointer("y"), loop.index)

    def _row(self, index: Sequence[Value]) -> Value:
        f, kernel = self.f, self.kernel
        count = product(f, (*self.reduced, self.columns))
        stats: list[Value] = []
        for step in self.op.passes:

            def inner(place: Sequence[Value], total: Value, step: Pass = step) -> list[Value]:
                row = kernel.x.at(f, (*index, *place), self.lanes)

                def value(column: Value, mask: Value | None) -> Value:
                    v = kernel.before.evaluate(f, row.load(column, mask), self.lanes)
                    return self.op.to_accumulator(f, v)

                return [self._accumulate(step, self.columns, self.lanes, total, value, stats)]

            start = (f.const(self.vector, step.start),)
            (total,) = self._nest(self.reduced, start, inner)
            total = f.reduce(total, partial(step.combine, f))
            stats.append(step.finish(f, total, count))
        return self.op.result(f, stats)


class _Columns(_Emission):
    def emit(self) -> None:
        f = self.f
        width = self.lanes * VECTORS
        chunks = pieces(f, self.columns, width)
        space = [*self.kept, chunks]
        begin, end = f.share(product(f, space))
        with f.loop(begin, end) as loop:
            *index, chunk = position(f, space, loop.index)
            row = f.udiv(loop.index, chunks) * self.columns
            first = chunk * width
            left = self.columns - first
            with f.if_(f.ge(left, width)) as branch:
                self._chunk(index, row, first, VECTORS, None)
            with branch.else_(), f.loop(first, self.columns, self.lanes) as part:
                mask = f.mask(self.columns - part.index, self.lanes)
                self._chunk(index, row, part.index, 1, mask)

    def _chunk(
        self, index: Sequence[Value], row: Value, column: Value, vectors: int, mask: Value | None
    ) -> None:
        f = self.f
        columns = [column + v * self.lanes for v in range(vectors)]
        count = product(f, self.reduced)
        stats: list[list[Value]] = [[] for _ in columns]
        for step in self.op.passes:
            totals = self._reduce_columns(step, index, columns, mask, stats)
            for v, total in enumerate(totals):
                stats[v].append(step.finish(f, total, f.index(count)))
        for v, at in enumerate(columns):
            result = self.op.to_stored(f, self.op.result(f, stats[v]))
            f.store(result, f.args.pointer("y"), row + at, mask=mask)

    def _reduce_columns(
        self,
        step: Pass,
        index: Sequence[Value],
        columns: Sequence[Value],
        mask: Value | None,
        stats: Sequence[Sequence[Value]],
    ) -> Sequence[Value]:
        """Totals of vectors of columns over all reduced axes."""
        f = self.f
        start = [f.const(self.vector, step.start)] * len(columns)

        def value(place: Sequence[Value], v: int) -> Value:
            row = self.kernel.x.at(f, (*index, *place), self.lanes)
            loaded = row.load(columns[v], mask)
            return self.op.to_accumulator(f, self.kernel.before.evaluate(f, loaded, self.lanes))

        def inner(place: Sequence[Value], *totals: Value) -> Sequence[Value]:
            last = self.reduced[-1]
            if len(columns) == 1:
                down = lambda at, _: value((*place, at), 0)
                return [self._accumulate(step, last, 1, totals[0], down, stats[0])]
            with f.loop(0, last, PIECE, carry=totals) as piece:
                stop = f.min(piece.index + PIECE, last)
                with f.loop(piece.index, stop, carry=start) as loop:
                    after = [
                        step.accumulate(f, total, value((*place, loop.index), v), stats[v])
                        for v, total in enumerate(loop.carried)
                    ]
                    loop.next(*after)
                pairs = zip(piece.carried, loop.results, strict=True)
                piece.next(*(step.combine(f, a, b) for a, b in pairs))
            return piece.results

        return self._nest(self.reduced[:-1], start, inner)
