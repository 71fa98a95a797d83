"""Attention for blocks of queries: scores, softmax and values of `attention.py`, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import Kernel, Operand, Value, i32, i64, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.codegen.math.exp_nonpositive import exp_nonpositive
from bitwright.backends.cpu.kernels.attention import spec
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.kernels.movement.transpose import transposed
from bitwright.backends.cpu.lowering.region import address_of, store


def emit_query_blocks(f: Kernel, kernel: spec.Attention, kind: type[Block]) -> None:
    """All work items of this thread; `kind` is the class that emits a block."""
    size = spec.tiles(f.target, kernel)
    scratch = kind.scratch_type(f, kernel)
    queries = f.args.size("queries")
    blocks = pieces(f, queries, size.queries)
    items = f.args.size("batches") * f.args.size("heads") * blocks
    # later blocks of causal queries see more keys: distribute blocks cyclically for balance
    begin, end = (f.thread, items) if kernel.causal else f.share(items)
    with f.loop(begin, end, f.threads if kernel.causal else 1) as loop:
        group, block = f.udiv(loop.index, blocks), f.urem(loop.index, blocks)
        first = block * size.queries
        count = f.min(queries - first, size.queries)
        item = spec.work_item(f, kernel, group, first, count)
        kind(f, kernel, scratch, item).emit()


def whole(features: int, lanes: int) -> int:
    """Features rounded up to whole vectors."""
    return -(-features // lanes) * lanes


class Scratch:
    """Scratch memory of a thread: blocks that fit the first-level cache."""

    def __init__(self, f: Kernel, kernel: spec.Attention) -> None:
        size, type_ = spec.tiles(f.target, kernel), kernel.type
        self.width = whole(kernel.value_features, size.lanes)
        """Value features, padded to whole vectors."""
        self.scores = f.scratch(type_, size.block * size.queries)
        self.results = f.scratch(type_, size.queries * self.width)
        self.factors = f.scratch(type_, size.queries)
        full = kernel.mask == spec.FULL_MASK
        rows = whole(size.block, size.lanes)
        self.bias = f.scratch(type_, rows * size.queries) if full else None
        self.operands(f, kernel)

    def operands(self, f: Kernel, kernel: spec.Attention) -> None:
        """Packed queries, keys and values."""
        size, type_ = spec.tiles(f.target, kernel), kernel.type
        self.q = f.scratch(type_, kernel.features * size.queries)
        self.values = f.scratch(type_, size.block * self.width)
        widens = storage_type(kernel.element) is not type_
        self.keys = (
            f.scratch(type_, size.block * whole(kernel.features, size.lanes)) if widens else None
        )


class Block:
    """One block of queries. If they fit one vector, the second vector is skipped."""

    scratch_type: Callable[..., Any] = Scratch

    def __init__(
        self, f: Kernel, kernel: spec.Attention, scratch: Any, item: spec.WorkItem
    ) -> None:
        self.f, self.kernel, self.scratch, self.item = f, kernel, scratch, item
        self.size = spec.tiles(f.target, kernel)
        self.type, self.lanes = kernel.type, self.size.lanes
        self.stored = storage_type(kernel.element)
        self.vector = self.type.vector(self.lanes)
        self.align = self.vector.total_bytes
        self.pitch = self.size.queries
        """Row length of the transposed blocks, in queries."""
        self.is_full = f.gt(item.count, self.lanes)
        """Whether the queries need all vectors of the block, not only one."""

    def emit(self) -> None:
        f, item = self.f, self.item
        self._pack_queries()
        self._clear_results()
        lowest = (f.const(self.vector, -math.inf),) * self.size.vectors
        zeros = (f.const(self.vector, 0.0),) * self.size.vectors

        def run(part: spec.Segment, *state: Value) -> Sequence[Value]:
            begin = f.max(item.low - part.start, 0)
            end = f.min(item.high - part.start, part.count)
            with f.loop(begin, end, self.size.block, carry=state) as loop:
                count = f.min(end - loop.index, self.size.block)
                loop.next(*self._keys(part, loop.index, count, loop.carried))
            return loop.results

        state = spec.segments(f, self.kernel, item, (*lowest, *zeros), run)
        for number, total in enumerate(state[self.size.vectors :]):
            factor = f.select(f.eq(total, 0.0), 0.0, f.div(1.0, total))
            f.store(factor, self.scratch.factors, number * self.lanes, align=self.align)
        self._finish_results()
        with f.loop(0, item.count, nonempty=True) as loop:
            self._write(loop.index)

    def load(self, source: Value, at: Operand) -> Value:
        """A vector from scratch memory."""
        return self.f.load(self.vector, source, at, align=self.align)

    # a block of keys

    def _keys(
        self, part: spec.Segment, first: Value, count: Value, state: Sequence[Value]
    ) -> list[Value]:
        """(maximum, sum) per query, including these keys."""
        f = self.f
        vectors = self.size.vectors
        old, sums = state[:vectors], state[vectors:]
        self._pack_keys(part, first, count)
        if self.scratch.bias is not None:
            self._pack_bias(part.start + first, count)
        with f.if_(self.is_full, carry=old) as branch:
            branch.next(*self._scores(part, first, count, old))
        with branch.else_():
            branch.next(*self._scores(part, first, count, old[:1]), *old[1:])
        new = branch.results
        # a query without visible keys has maximum -inf; -inf - -inf would be NaN
        shifts = [f.select(f.eq(top, -math.inf), 0.0, top) for top in new]
        for number, (before, shift) in enumerate(zip(old, shifts, strict=True)):
            factor = exp_nonpositive(f, before - shift)
            f.store(factor, self.scratch.factors, number * self.lanes, align=self.align)
            sums = [s * factor if i == number else s for i, s in enumerate(sums)]
        with f.if_(self.is_full, carry=sums) as branch:
            branch.next(*self._powers(count, shifts, sums))
        with branch.else_():
            branch.next(*self._powers(count, shifts[:1], sums[:1]), *sums[1:])
        sums = branch.results
        self._results(count)
        return [*new, *sums]

    def _scores(
        self, part: spec.Segment, first: Value, count: Value, tops: Sequence[Value]
    ) -> Sequence[Value]:
        """Store the scores of the block; return the maximum of each query."""
        f, size = self.f, self.size
        with f.loop(0, count, size.keys, carry=tops, nonempty=True) as loop:
            # rows past the last key repeat it: they change no maximum and are never read
            keys = [f.min(loop.index + t, count - 1) for t in range(size.keys)]
            rows = [self._key(part, first, key) for key in keys]
            numbers = [part.start + first + key for key in keys]
            found = self.scaled_products(rows, len(tops), numbers)
            found = self._add_bias(found, numbers, keys)
            found = self._mask_edges(found, numbers)
            tops = list(loop.carried)
            for t, row in enumerate(found):
                for v, score in enumerate(row):
                    at = (loop.index + t) * self.pitch + v * self.lanes
                    f.store(score, self.scratch.scores, at, align=self.align)
                    tops[v] = f.quick_max(score, tops[v])
            loop.next(*tops)
        return loop.results

    def _key(self, part: spec.Segment, first: Value, key: Value) -> Value:
        """The address of a key's features."""
        f, packed = self.f, self.scratch.keys
        if packed is not None:
            return f.gep(self.type, packed, key * whole(self.kernel.features, self.lanes))
        return f.gep(self.type, part.k, (first + key) * part.k_step)

    def scaled_products(
        self, keys: Sequence[Value], vectors: int, numbers: Sequence[Value]
    ) -> list[list[Value]]:
        """Scores of a tile of keys without bias; `numbers` are their indices."""
        return self._products(keys, vectors)

    def _products(self, keys: Sequence[Value], vectors: int) -> list[list[Value]]:
        """Products of a tile of keys and `vectors` vectors of queries."""
        f, features = self.f, self.kernel.features
        step = 4 if features >= 8 else 1
        whole = features // step * step
        flat = tuple(f.const(self.vector, 0.0) for _ in range(len(keys) * vectors))
        with f.loop(0, whole, step, carry=flat, nonempty=True) as loop:
            totals: Sequence[Value] = loop.carried
            for d in range(step):
                totals = self._feature(keys, loop.index + d, totals)
            loop.next(*totals)
        totals = loop.results
        for d in range(whole, features):
            totals = self._feature(keys, d, totals)
        return [list(totals[i : i + vectors]) for i in range(0, len(totals), vectors)]

    def _feature(self, keys: Sequence[Value], d: Operand, totals: Sequence[Value]) -> list[Value]:
        f, vectors = self.f, len(totals) // len(keys)
        places = (f.index(d) * self.pitch + v * self.lanes for v in range(vectors))
        queries = [self.load(self.scratch.q, at) for at in places]
        found = []
        for t, address in enumerate(keys):
            key = f.splat(f.load(self.type, address, d), self.lanes)
            found += [f.fma(key, q, totals[t * vectors + v]) for v, q in enumerate(queries)]
        return found

    def _add_bias(
        self, found: list[list[Value]], numbers: Sequence[Value], keys: Sequence[Value]
    ) -> list[list[Value]]:
        """Scores with softcap and mask applied."""
        f, kernel = self.f, self.kernel
        if kernel.softcap > 0:
            cap = kernel.softcap
            found = [
                [vector_math.tanh(f, score * (1.0 / cap)) * cap for score in row] for row in found
            ]
        if kernel.mask == spec.KEY_MASK:
            index = (self.item.batch, self.item.head, 0)
            for row, number in zip(found, numbers, strict=True):
                added = spec.mask_bias(f, kernel, index, number, 1, None)
                row[:] = [score + f.splat(added, self.lanes) for score in row]
        if self.scratch.bias is not None:
            for row, key in zip(found, keys, strict=True):
                at = key * self.pitch
                row[:] = [
                    score + self.load(self.scratch.bias, at + v * self.lanes)
                    for v, score in enumerate(row)
                ]
        return found

    def _mask_edges(self, found: list[list[Value]], numbers: Sequence[Value]) -> list[list[Value]]:
        """Scores with -inf where a query must not see a key; compares only in edge tiles."""
        f, kernel, item = self.f, self.kernel, self.item
        if not kernel.has_edges:
            return found
        inside: list[Value] = []
        last = item.position + item.count - 1
        if kernel.causal:
            inside.append(f.le(numbers[-1], item.position))
        if kernel.window is not None:
            inside.append(f.gt(numbers[0], last - kernel.window))
        if kernel.window_right is not None:
            inside.append(f.le(numbers[-1], item.position + kernel.window_right))
        flat = [score for row in found for score in row]
        with f.if_(f.not_(f.combine(inside, f.and_)), carry=flat) as branch:
            start = f.splat(f.convert(item.position, i32), self.lanes)
            changed = []
            for t, row in enumerate(found):
                key = f.convert(numbers[t], i32)
                for v, score in enumerate(row):
                    lane = f.const_vector(i32, range(v * self.lanes, (v + 1) * self.lanes))
                    seen = spec.visible(f, kernel, start + lane, key, i32.vector(self.lanes))
                    changed.append(f.select(seen, score, -math.inf))
            branch.next(*changed)
        flat = list(branch.results)
        vectors = len(found[0])
        return [flat[i : i + vectors] for i in range(0, len(flat), vectors)]

    def _powers(
        self, count: Value, shifts: Sequence[Value], sums: Sequence[Value]
    ) -> Sequence[Value]:
        """Replace scores by e^(score - maximum); return their sums."""
        f = self.f

        def row(key: Value, _: None, *totals: Value) -> list[Value]:
            found = []
            for v in range(len(shifts)):
                at = key * self.pitch + v * self.lanes
                score = f.load(self.vector, self.scratch.scores, at, align=self.align)
                power = exp_nonpositive(f, score - shifts[v])
                f.store(power, self.scratch.scores, at, align=self.align)
                found.append(totals[v] + power)
            return found

        return f.vectors(0, count, 1, row, sums, unroll=2)

    def _results(self, count: Value) -> None:
        """Rescale the results and add the block's values."""
        f, size = self.f, self.size
        width = self.scratch.width // self.lanes
        parts = -(-width // size.columns)
        bounds = [width * n // parts for n in range(parts + 1)]
        with f.loop(0, self.item.count, self.size.rows, nonempty=True) as loop:
            for begin, end in pairwise(bounds):
                self._result_tile(loop.index, begin * self.lanes, end - begin, count)

    def _result_tile(self, query: Value, column: int, columns: int, count: Value) -> None:
        f, scratch = self.f, self.scratch
        rows = range(self.size.rows)
        places = [
            (query + r) * scratch.width + (column + c * self.lanes)
            for r in rows
            for c in range(columns)
        ]
        factors = [f.splat(f.load(self.type, scratch.factors, query + r), self.lanes) for r in rows]
        totals = [
            self.load(scratch.results, place) * factors[n // columns]
            for n, place in enumerate(places)
        ]
        with f.loop(0, self._value_steps(count), carry=totals, nonempty=True) as loop:
            values, powers = self._step_operands(loop.index, query, column, columns)
            after: list[Value] = []
            for r in rows:
                power = self._power(powers, r)
                after += [
                    self._add_value(power, value, loop.carried[r * columns + c])
                    for c, value in enumerate(values)
                ]
            loop.next(*after)
        for place, total in zip(places, loop.results, strict=True):
            f.store(total, scratch.results, place, align=self.align)

    def _value_steps(self, count: Value) -> Value:
        """The steps in which the values of `count` keys are added."""
        return count

    def _step_operands(
        self, step: Value, query: Value, column: int, columns: int
    ) -> tuple[list[Value], Value]:
        """Vectors of values, and the address of the powers of the queries from `query` on."""
        f, scratch = self.f, self.scratch
        places = (step * scratch.width + (column + c * self.lanes) for c in range(columns))
        values = [self.load(scratch.values, at) for at in places]
        return values, f.gep(self.type, scratch.scores, step * self.pitch + query)

    def _power(self, powers: Value, row: int) -> Value:
        return self.f.splat(self.f.load(self.type, powers, row), self.lanes)

    def _add_value(self, power: Value, value: Value, total: Value) -> Value:
        return self.f.fma(power, value, total)

    # packing

    def _pack_queries(self) -> None:
        """Transpose q[query][d] to scale · q[d][query]; rows past the last query repeat it."""
        f, item, lanes = self.f, self.item, self.lanes
        index = (item.batch, item.head, item.first)
        element = self.kernel.element
        base, step = address_of(f, "q", self.stored, index), f.args.size("q.2")
        whole = self.kernel.features // lanes * lanes
        with f.loop(0, item.count, lanes, nonempty=True) as vectors:
            start = vectors.index
            rows = [
                f.gep(self.stored, base, f.min(item.count - 1, start + r) * step)
                for r in range(lanes)
            ]

            def put(columns: Sequence[Value], d: Operand) -> None:
                for number, column in enumerate(columns):
                    at = f.index(d + number) * self.pitch + start
                    f.store(column * self.kernel.scale, self.scratch.q, at, align=self.align)

            with f.loop(0, whole, lanes) as loop:
                block = [load_computed(f, element, lanes, row, loop.index) for row in rows]
                put(transposed(f, block), loop.index)
            if rest := self.kernel.features - whole:
                mask = f.mask(f.const(i64, rest), lanes)
                block = [load_computed(f, element, lanes, r, whole, mask=mask) for r in rows]
                put(transposed(f, block)[:rest], whole)

    def _pack_keys(self, part: spec.Segment, first: Value, count: Value) -> None:
        """Pack keys and values of a block."""
        scratch, keys = self.scratch, (first, count)
        self._pack((part.v, part.v_step), self.kernel.value_features, keys, scratch.values)
        if scratch.keys is not None:
            self._pack((part.k, part.k_step), self.kernel.features, keys, scratch.keys)

    def _pack(
        self, rows: tuple[Value, Value], features: int, keys: tuple[Value, Value], target: Value
    ) -> None:
        """Copy `keys` (first, count) of rows (address, stride) in the computed type, in whole
        vectors."""
        f, (first, count), width = self.f, keys, whole(features, self.lanes)
        with f.loop(0, count, nonempty=True) as loop:
            row = f.gep(self.stored, rows[0], (first + loop.index) * rows[1])
            for column in range(0, features, self.lanes):
                left = features - column
                mask = f.mask(f.const(i64, left), self.lanes) if left < self.lanes else None
                element = self.kernel.element
                value = load_computed(f, element, self.lanes, row, column, mask=mask)
                f.store(value, target, loop.index * width + column)

    def _pack_bias(self, first: Value, count: Value) -> None:
        """Pack the mask of the block as additive bias, keys by queries."""
        f, item, lanes = self.f, self.item, self.lanes
        assert self.scratch.bias is not None
        with f.loop(0, item.count, lanes, nonempty=True) as vectors:
            start = vectors.index
            queries = [item.first + f.min(item.count - 1, start + r) for r in range(lanes)]
            with f.loop(0, count, lanes, nonempty=True) as loop:
                inside = f.mask(count - loop.index, lanes)
                key = first + loop.index
                places = [(item.batch, item.head, query) for query in queries]
                block = [spec.mask_bias(f, self.kernel, at, key, lanes, inside) for at in places]
                for number, column in enumerate(transposed(f, block)):
                    at = (loop.index + number) * self.pitch + start
                    f.store(column, self.scratch.bias, at, align=self.align)

    def _clear_results(self) -> None:
        f = self.f
        with f.loop(0, self.pitch * self.scratch.width, self.lanes, nonempty=True) as loop:
            zero = f.const(self.vector, 0.0)
            f.store(zero, self.scratch.results, loop.index, align=self.align)

    def _finish_results(self) -> None:
        """Hook: bring the results into rows of queries."""

    def _write(self, query: Value) -> None:
        f, kernel, item = self.f, self.kernel, self.item
        index = (item.batch, item.head, item.first + query)
        result = kernel.after.dtype
        y = address_of(f, "y", storage_type(result), index)
        extras = kernel.extras.at(f, index, self.lanes)
        factor = f.splat(f.load(self.type, self.scratch.factors, query), self.lanes)
        for column in range(0, self.scratch.width, self.lanes):
            left = kernel.value_features - column
            mask = f.mask(f.const(i64, left), self.lanes) if left < self.lanes else None
            at = query * self.scratch.width + column
            value = f.load(self.vector, self.scratch.results, at) * factor
            value = kernel.after.evaluate(f, [value, *extras.load(column, mask)], self.lanes)
            store(f, value, result, y, column, mask)
