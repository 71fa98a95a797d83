"""The loop over rows: rows are divided among threads and, where that is faster, grouped.

A pass with a fixed order (`formulas.Order`) may have only one vector of totals per row, hence one
chain of dependent additions. Several rows together have independent chains:

    for each group of rows
        for each pass           all rows of the group together, or row by row
        for each row            the output
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bitwright.backends.cpu.codegen.emit import Function, Kernel, Module, Signature, Value, f64
from bitwright.backends.cpu.kernels.elementwise.loop_nest import position, product
from bitwright.backends.cpu.kernels.rows.formulas import Order, Stats
from bitwright.backends.cpu.kernels.rows.rows import ACCUMULATORS, RowEmission, RowKernel
from bitwright.backends.cpu.lowering.region import Row

GROUP = ACCUMULATORS
"""Rows per group."""
_FOUR = 4
"""Remaining columns that are accumulated without fma; a remainder is shorter than twice this."""


def emit_rows(module: Module, name: str, kernel: RowKernel) -> Signature:
    return emit_each_row(module, name, kernel, RowEmission)


def emit_each_row(
    module: Module, name: str, kernel: RowKernel, emission: Callable[..., RowEmission]
) -> Signature:
    """Emit the kernel; `emission` takes f, kernel, row and the row's coordinates."""
    with module.kernel(name, kernel.signature) as f:
        counts = [f.args.size(f"n{axis}") for axis in range(kernel.row_axes)]
        begin, end = f.share(product(f, counts))

        def at(row: Value) -> RowEmission:
            return emission(f, kernel, row, position(f, counts, row))

        if kernel.formula.is_ordered:
            with f.loop(begin, end, GROUP) as loop:
                _Group(f, kernel, loop.index, f.min(loop.index + GROUP, end), at).emit()
        else:
            with f.loop(begin, end) as loop:
                row = at(loop.index)
                for number in range(len(kernel.formula.passes)):
                    row.stats.append(row.run_pass(number))
                row.write()
    return kernel.signature


class _Group:
    """Rows begin … end - 1; results of passes are on the stack."""

    def __init__(
        self,
        f: Kernel,
        kernel: RowKernel,
        begin: Value,
        end: Value,
        at: Callable[[Value], RowEmission],
    ) -> None:
        self.f, self.type, self.at = f, kernel.type, at
        self.begin, self.end = begin, end
        self.passes = kernel.formula.passes
        self.found = f.scratch(kernel.type, GROUP * len(self.passes))

    def emit(self) -> None:
        f = self.f
        for number, step in enumerate(self.passes):
            if step.order is None or self._keeps_busy(step.order):
                self._run_each(number)
                continue
            with f.if_(f.eq(f.sub(self.end, self.begin), GROUP)) as branch:
                self._run_pass([self.begin + row for row in range(GROUP)], number)
            with branch.else_():
                self._run_each(number)
        with f.loop(self.begin, self.end) as loop:
            self._resumed(loop.index, len(self.passes)).write()

    def _keeps_busy(self, order: Order) -> bool:
        """Whether one row has enough independent totals."""
        bits = f64.bits if order.wide else self.type.bits
        return order.totals >= ACCUMULATORS * self.f.target.lanes(bits)

    def _run_each(self, number: int) -> None:
        with self.f.loop(self.begin, self.end) as loop:
            self._run_pass([loop.index], number)

    def _run_pass(self, rows: Sequence[Value], number: int) -> None:
        emissions = [self._resumed(row, number) for row in rows]
        if self.passes[number].order is None:
            results = [row.run_pass(number) for row in emissions]
        else:
            results = _OrderedPass(emissions, number).emit()
        for row, result in zip(rows, results, strict=True):
            self.f.store(result, self.found, self._place(row, number))

    def _place(self, row: Value, number: int) -> Value:
        return self.f.sub(row, self.begin) * len(self.passes) + number

    def _resumed(self, row: Value, number: int) -> RowEmission:
        """A row with the results of its first passes."""
        emission, places = self.at(row), [self._place(row, n) for n in range(number)]
        emission.stats = [self.f.load(self.type, self.found, place) for place in places]
        return emission


class _OrderedPass:
    """A pass with a fixed order, over several rows at once."""

    def __init__(self, rows: Sequence[RowEmission], number: int) -> None:
        first = rows[0]
        self.f, self.rows, self.number = first.f, rows, number
        self.step = first.formula.passes[number]
        assert self.step.order is not None
        self.order, self.columns = self.step.order, first.columns
        self.type = f64 if self.order.wide else first.type
        self.lanes = min(self.order.totals, first.lanes)
        self.turns = self.order.totals // self.lanes

    def emit(self) -> list[Value]:
        """The pass's result for each row."""
        f, order, columns = self.f, self.order, self.columns
        stop = f.sub(columns, f.urem(columns, order.totals))
        sources = [row.reads(self.lanes) for row in self.rows]
        start = [f.const(self.type.vector(self.lanes), self.step.start)]
        with f.loop(0, stop, order.totals, start * (len(self.rows) * self.turns)) as loop:
            loop.next(*self._block(loop.index, None, loop.carried, sources))
        totals = loop.results
        if order.rest_last:
            joined = self._rest(stop, self._joined(totals))
        else:
            with f.if_(f.lt(stop, columns), totals) as branch:
                branch.next(*self._block(stop, f.sub(columns, stop), totals, sources))
            joined = self._joined(branch.results)
        count = f.convert(columns, self.type)
        results = [self.step.finish(f, total, count) for total in joined]
        return [f.convert(result, self.rows[0].type) for result in results]

    def _joined(self, totals: Sequence[Value]) -> list[Value]:
        """The combined totals of each row."""
        f, join = self.f, partial(self.step.combine, self.f)
        firsts = range(0, len(totals), self.turns)
        return [
            f.reduce(f.halve(totals[first : first + self.turns], join), join) for first in firsts
        ]

    def _block(
        self, at: Value, left: Value | None, totals: Sequence[Value], sources: Sequence[Row]
    ) -> list[Value]:
        """Accumulate one column per total; only `left` columns, if given."""
        f = self.f
        places = [at + turn * self.lanes for turn in range(self.turns)]
        masks: list[Value | None] = [None] * self.turns
        if left is not None:
            counts = [f.sub(left, turn * self.lanes) for turn in range(self.turns)]
            masks = [f.mask(count, self.lanes) for count in counts]
        visits = [
            (row, source, place, mask)
            for row, source in zip(self.rows, sources, strict=True)
            for place, mask in zip(places, masks, strict=True)
        ]
        return self._accumulated(visits, totals, self.step.accumulate)

    def _rest(self, stop: Value, totals: Sequence[Value]) -> list[Value]:
        """Each row's total plus the columns from `stop` on, one by one."""
        f, step = self.f, self.step
        sources = [row.reads(1) for row in self.rows]
        runs = [(stop, self.columns, step.accumulate)]
        if step.accumulate_unfused is not None:
            four = stop + f.and_(self.columns - stop, _FOUR)
            runs = [(stop, four, step.accumulate_unfused), (four, self.columns, step.accumulate)]
        for begin, end, fold in runs:
            with f.loop(begin, end, carry=totals) as loop:
                pairs = zip(self.rows, sources, strict=True)
                visits = [(row, source, loop.index, None) for row, source in pairs]
                loop.next(*self._accumulated(visits, loop.carried, fold))
            totals = loop.results
        return list(totals)

    def _accumulated(
        self,
        visits: Sequence[tuple[RowEmission, Row, Value, Value | None]],
        totals: Sequence[Value],
        fold: Callable[[Function, Value, Value, Stats], Value],
    ) -> list[Value]:
        """The totals after these visits. All loads precede all stores: rows are often a multiple of
        a page apart, where processors assume that loads alias earlier stores."""
        f, number = self.f, self.number
        values = [row.value(number, at, mask, x) for row, x, at, mask in visits]
        found = []
        for (row, _, at, mask), v, total in zip(visits, values, totals, strict=True):
            row.save(number, v, at, mask)
            fresh = fold(f, total, f.convert(v, self.type), row.stats)
            found.append(fresh if mask is None else f.select(mask, fresh, total))
        return found
