"""Attention for a few queries, as in decoding: one query at a time, each key read once.

    scores   lanes along features; a tile of keys is transposed to sum across lanes
    softmax  lanes along keys
    values   lanes along the features of v

The running maximum and sum are scalars; otherwise as in `kernels.attention.query_block`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import Kernel, Value, i32, i64, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.codegen.math.exp_nonpositive import exp_nonpositive
from bitwright.backends.cpu.kernels.attention import spec
from bitwright.backends.cpu.kernels.movement.transpose import transposed
from bitwright.backends.cpu.lowering.region import address_of, store

BLOCK = 256
"""Keys per block of scores."""
MAX_TOTALS = 8
"""Vectors of value features accumulated in registers at a time."""


def emit_single_query(f: Kernel, kernel: spec.Attention) -> None:
    """All queries of this thread."""
    queries = f.args.size("queries")
    lanes = f.target.lanes(kernel.type.bits)
    width = -(-kernel.value_features // lanes) * lanes
    scores = f.scratch(kernel.type, BLOCK)
    q = f.scratch(kernel.type, -(-kernel.features // lanes) * lanes)
    results = f.scratch(kernel.type, width)
    begin, end = f.share(f.args.size("batches") * f.args.size("heads") * queries)
    with f.loop(begin, end) as loop:
        group, first = f.udiv(loop.index, queries), f.urem(loop.index, queries)
        item = spec.work_item(f, kernel, group, first, f.const(i64, 1))
        _Query(f, kernel, item, scores, q, results).emit()


class _Query:
    """One query."""

    def __init__(
        self,
        f: Kernel,
        kernel: spec.Attention,
        item: spec.WorkItem,
        scores: Value,
        q: Value,
        results: Value,
    ) -> None:
        self.f, self.kernel, self.item = f, kernel, item
        self.scores, self.q, self.results = scores, q, results
        self.lanes = f.target.lanes(kernel.type.bits)
        self.vector = kernel.type.vector(self.lanes)
        self.align = self.vector.total_bytes

    def emit(self) -> None:
        f, item = self.f, self.item
        index = (item.batch, item.head, item.first)
        row = address_of(f, "q", storage_type(self.kernel.element), index)
        for d, mask in self._columns(self.kernel.features):
            x = self._load(row, d, mask)
            f.store(x * self.kernel.scale, self.q, d, align=self.align)
        for d, _ in self._columns(self.kernel.value_features):
            f.store(f.const(self.vector, 0.0), self.results, d, align=self.align)
        lowest = f.const(self.kernel.type, -math.inf)

        def run(part: spec.Segment, top: Value, total: Value) -> Sequence[Value]:
            begin = f.max(item.low - part.start, 0)
            end = f.min(item.high - part.start, part.count)
            with f.loop(begin, end, BLOCK, carry=(top, total)) as loop:
                count = f.min(end - loop.index, BLOCK)
                loop.next(*self._keys(part, loop.index, count, *loop.carried))
            return loop.results

        start = (lowest, f.const(self.kernel.type, 0.0))
        _, total = spec.segments(f, self.kernel, item, start, run)
        self._write(index, f.select(f.eq(total, 0.0), 0.0, f.div(1.0, total)))

    def _load(self, row: Value, column: int, mask: Value | None) -> Value:
        return load_computed(self.f, self.kernel.element, self.lanes, row, column, mask=mask)

    def _columns(self, features: int) -> list[tuple[int, Value | None]]:
        """The start of each vector of a row, and the mask of the last one."""
        f = self.f
        return [
            (
                d,
                f.mask(f.const(i64, features - d), self.lanes)
                if features - d < self.lanes
                else None,
            )
            for d in range(0, features, self.lanes)
        ]

    def _keys(
        self, part: spec.Segment, first: Value, count: Value, old: Value, total: Value
    ) -> tuple[Value, Value]:
        """(maximum, sum) including these keys."""
        f = self.f
        highest = f.const(self.vector, -math.inf)
        with f.loop(0, count, self.lanes, carry=(highest,), nonempty=True) as loop:
            score = self._tile(part, first, loop.index, count)
            f.store(score, self.scores, loop.index, align=self.align)
            loop.next(f.quick_max(score, loop.carried[0]))
        new = f.quick_max(f.reduce(loop.results[0], f.quick_max), old)
        shift = f.select(f.eq(new, -math.inf), 0.0, new)
        factor = exp_nonpositive(f, old - shift)
        with f.loop(
            0, count, self.lanes, carry=(f.const(self.vector, 0.0),), nonempty=True
        ) as loop:
            score = f.load(self.vector, self.scores, loop.index, align=self.align)
            power = exp_nonpositive(f, score - f.splat(shift, self.lanes))
            f.store(power, self.scores, loop.index, align=self.align)
            loop.next(loop.carried[0] + power)
        self._results(part, first, count, factor)
        return new, f.fma(total, factor, f.reduce_add(loop.results[0]))

    def _tile(self, part: spec.Segment, first: Value, start: Value, count: Value) -> Value:
        """Scores of one key per lane; -inf past the last key."""
        f, kernel, lanes = self.f, self.kernel, self.lanes
        rows = [
            f.gep(
                storage_type(kernel.element),
                part.k,
                (first + f.min(start + t, count - 1)) * part.k_step,
            )
            for t in range(lanes)
        ]
        totals = [f.const(self.vector, 0.0)] * lanes
        for d, mask in self._columns(kernel.features):
            x = f.load(self.vector, self.q, d, align=self.align)
            totals = [
                f.fma(self._load(row, d, mask), x, total)
                for row, total in zip(rows, totals, strict=True)
            ]
        score = f.combine(transposed(f, totals), f.add)
        if kernel.softcap > 0:
            score = vector_math.tanh(f, score * (1.0 / kernel.softcap)) * kernel.softcap
        inside = f.mask(count - start, lanes)
        key = part.start + first + start
        item = self.item
        if kernel.mask != spec.NO_MASK:
            index = (item.batch, item.head, item.first)
            score = score + spec.mask_bias(f, kernel, index, key, lanes, inside)
        if kernel.has_edges:
            keys = f.splat(f.convert(key, i32), lanes) + f.iota(i32, lanes)
            at = f.splat(f.convert(item.position, i32), lanes)
            inside = f.and_(inside, spec.visible(f, kernel, at, keys, i32.vector(lanes)))
        return f.select(inside, score, -math.inf)

    def _results(self, part: spec.Segment, first: Value, count: Value, factor: Value) -> None:
        """Rescale the results and add the block's values."""
        columns = self._columns(self.kernel.value_features)
        for begin in range(0, len(columns), MAX_TOTALS):
            self._result_part(part, first, count, factor, columns[begin : begin + MAX_TOTALS])

    def _result_part(
        self,
        part: spec.Segment,
        first: Value,
        count: Value,
        factor: Value,
        columns: Sequence[tuple[int, Value | None]],
    ) -> None:
        f, kernel = self.f, self.kernel
        shrunk = [
            f.load(self.vector, self.results, d, align=self.align) * factor for d, _ in columns
        ]
        zeros = [f.const(self.vector, 0.0)] * len(columns)

        def key(number: Value, _: None, *totals: Value) -> list[Value]:
            """Two sets of totals alternate to hide the latency of the sums."""
            row = f.gep(storage_type(kernel.element), part.v, (first + number) * part.v_step)
            power = f.splat(f.load(kernel.type, self.scores, number), self.lanes)
            mine, others = totals[: len(columns)], totals[len(columns) :]
            found = [
                f.fma(power, self._load(row, d, mask), total)
                for (d, mask), total in zip(columns, mine, strict=True)
            ]
            return [*others, *found]

        totals = f.vectors(0, count, 1, key, [*shrunk, *zeros], unroll=2)
        for n, (d, _) in enumerate(columns):
            together = totals[n] + totals[n + len(columns)]
            f.store(together, self.results, d, align=self.align)

    def _write(self, index: Sequence[Value], factor: Value) -> None:
        f, kernel = self.f, self.kernel
        result = kernel.after.dtype
        y = address_of(f, "y", storage_type(result), index)
        extras = kernel.extras.at(f, index, self.lanes)
        for d, mask in self._columns(kernel.value_features):
            value = f.load(self.vector, self.results, d, align=self.align) * factor
            value = kernel.after.evaluate(f, [value, *extras.load(d, mask)], self.lanes)
            store(f, value, result, y, d, mask)
