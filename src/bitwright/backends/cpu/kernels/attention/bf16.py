"""bf16 attention with bf16 dot products summed in f32: vector dots, and AMX tiles.

Both instructions take the reduction dimension in pairs:

    q[d / 2][query][2]      transposed once per block of queries
    p[key / 2][query][2]    e^(score - maximum), rounded to bf16 when computed

Scores, softmax and sums are f32 as in `kernels.attention.query_block`. A dot reads pairs of a key's
features from memory, and pairs of values v[key / 2][feature][2]. Tiles compute blocks of 32 × 32:

    scores[key][query]    =  k[key][d] · q[d / 2][query][2]
    results[d][query]    +=  v[d][key] · p[key / 2][query][2]

so keys are loaded from memory directly, values are transposed by a separate kernel
(`kernels.attention.transposed_values`), and results are transposed at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Operand, Value, bf16, f32, i16, i32, i64
from bitwright.backends.cpu.codegen.math.exp_nonpositive import exp_nonpositive
from bitwright.backends.cpu.kernels.attention.query_block import Block, Scratch, whole
from bitwright.backends.cpu.kernels.attention.spec import Attention, Segment, tiles
from bitwright.backends.cpu.kernels.attention.transposed_values import LANES, ValuePairs
from bitwright.backends.cpu.kernels.matmul.dot.amx import AmxBf16Dot, amx_bf16_dot
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import BYTES, ROWS, SIZE
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import Tiles as TileForms
from bitwright.backends.cpu.kernels.matmul.dot.half_dot import Bf16Dot2, choose_half_dot
from bitwright.backends.cpu.kernels.movement.transpose import transposed
from bitwright.backends.cpu.lowering.region import address_of
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import bf16 as brain
from bitwright.target import Target

STEP = 32
"""Features, or keys, per tile product."""


def pair_products(target: Target, element: DType) -> AmxBf16Dot | Bf16Dot2 | None:
    """The bf16 product that attention uses on this target, if any."""
    if element != brain or target.lanes(32) != LANES:
        return None
    found = amx_bf16_dot(target) or choose_half_dot(target, element, 2)
    return found if isinstance(found, AmxBf16Dot | Bf16Dot2) else None


def block_kind(kernel: Attention) -> type[Block]:
    if kernel.pairs is None:
        return Block
    return _TileBlock if isinstance(kernel.pairs, AmxBf16Dot) else _DotBlock


class _PairScratch(Scratch):
    def operands(self, f: Kernel, kernel: Attention) -> None:
        size = tiles(f.target, kernel)
        features = whole(kernel.features, STEP)
        self.q = f.scratch(i32, features // 2 * size.queries)
        self.powers = f.scratch(i32, size.block // 2 * size.queries)


class _PairBlock(Block):
    """Shared by dots and tiles."""

    scratch_type = _PairScratch
    step = 2
    """Keys per product."""

    def _pack_queries(self) -> None:
        """Rows past the last query repeat it; features are padded with 0."""
        f, item, features = self.f, self.item, self.kernel.features
        index = (item.batch, item.head, item.first)
        base, step = address_of(f, "q", bf16, index), f.args.size("q.2")
        full = features // STEP * STEP
        with f.loop(0, item.count, LANES, nonempty=True) as vectors:
            start = vectors.index
            rows = [
                f.gep(bf16, base, f.min(item.count - 1, start + r) * step) for r in range(LANES)
            ]

            def put(first: Operand, mask: Value | None) -> None:
                halves = [f.load(bf16.vector(STEP), row, first, mask=mask) for row in rows]
                words = [f.bitcast(half, i32.vector(LANES)) for half in halves]
                line = f.lshr(f.index(first), 1)
                for number, column in enumerate(transposed(f, words)):
                    at = (line + number) * self.pitch + start
                    f.store(column, self.scratch.q, at, align=BYTES)

            with f.loop(0, full, STEP) as loop:
                put(loop.index, None)
            if features > full:
                put(full, f.mask(f.const(i64, features - full), STEP, 16))

    def _powers(
        self, count: Value, shifts: Sequence[Value], sums: Sequence[Value]
    ) -> Sequence[Value]:
        """Store pairs of e^(score - maximum), 0 for padding keys; return the unrounded sums."""
        f, scratch = self.f, self.scratch
        end = self._whole_steps(count)
        with f.loop(count, end) as loop:
            for v in range(len(shifts)):
                at = loop.index * self.pitch + v * LANES
                f.store(f.const(self.vector, -math.inf), scratch.scores, at, align=self.align)

        def pair(number: Value, _: None, *totals: Value) -> list[Value]:
            found = []
            for v, shift in enumerate(shifts):
                total, halves = totals[v], []
                for place in (0, 1):
                    at = (number * 2 + place) * self.pitch + v * LANES
                    score = f.load(self.vector, scratch.scores, at, align=self.align)
                    power = exp_nonpositive(f, score - shift)
                    halves.append(f.bitcast(f.convert(power, bf16), i16.vector(LANES)))
                    total = total + power
                at = (number * self.pitch + v * LANES) * 2
                f.store(f.interleave(*halves), scratch.powers, at, align=BYTES)
                found.append(total)
            return found

        return f.vectors(0, f.lshr(end, 1), 1, pair, sums)

    def _whole_steps(self, count: Value) -> Value:
        """Keys of the block, rounded up to whole products."""
        return self.f.and_(count + (self.step - 1), -self.step)


class _DotScratch(_PairScratch):
    def operands(self, f: Kernel, kernel: Attention) -> None:
        super().operands(f, kernel)
        self.values = f.scratch(bf16, tiles(f.target, kernel).block * self.width)
        self.pairs = ValuePairs(f, kernel.value_features)


class _DotBlock(_PairBlock):
    """Two products and their sum per instruction."""

    scratch_type = _DotScratch

    def _key(self, part: Segment, first: Value, key: Value) -> Value:
        return self.f.gep(bf16, part.k, (first + key) * part.k_step)

    def _products(self, keys: Sequence[Value], vectors: int) -> list[list[Value]]:
        f, features = self.f, self.kernel.features
        totals: Sequence[Value] = [f.const(self.vector, 0.0)] * (len(keys) * vectors)
        with f.loop(0, features // 2, carry=totals) as loop:
            words = [f.load(i32, key, loop.index, align=2) for key in keys]
            loop.next(*self._add(words, loop.index, loop.carried))
        totals = loop.results
        if features % 2:
            words = [f.convert(f.load(i16, key, features - 1), i32, False) for key in keys]
            totals = self._add(words, f.index(features // 2), totals)
        scaled = [total * self.kernel.scale for total in totals]
        return [scaled[i : i + vectors] for i in range(0, len(scaled), vectors)]

    def _add(self, words: Sequence[Value], line: Value, totals: Sequence[Value]) -> list[Value]:
        """The sums plus the products of one pair of features of every key."""
        vectors = len(totals) // len(words)
        queries = [
            self._pairs(self.scratch.q, line * self.pitch + v * LANES) for v in range(vectors)
        ]
        spread = [self._broadcast(word) for word in words]
        return [
            self._dot(totals[t * vectors + v], word, query)
            for t, word in enumerate(spread)
            for v, query in enumerate(queries)
        ]

    def _pairs(self, base: Value, at: Value) -> Value:
        """Sixteen pairs from scratch memory."""
        return self.f.load(bf16.vector(2 * LANES), base, at * 2, align=BYTES)

    def _broadcast(self, word: Value) -> Value:
        return self.f.bitcast(self.f.splat(word, LANES), bf16.vector(2 * LANES))

    def _dot(self, total: Value, a: Value, b: Value) -> Value:
        assert isinstance(self.kernel.pairs, Bf16Dot2)
        return self.kernel.pairs.instr(self.f, total, a, b)

    def _pack_keys(self, part: Segment, first: Value, count: Value) -> None:
        f, width = self.f, self.scratch.width
        with f.loop(0, count, 2, nonempty=True) as loop:
            for column in range(0, width, LANES):
                rows, key = (part.v, part.v_step), first + loop.index
                pairs = self.scratch.pairs.load(rows, key, first + count, column)
                f.store(pairs, self.scratch.values, loop.index * width + 2 * column, align=BYTES)

    def _value_steps(self, count: Value) -> Value:
        return self.f.lshr(self._whole_steps(count), 1)

    def _step_operands(
        self, step: Value, query: Value, column: int, columns: int
    ) -> tuple[list[Value], Value]:
        f, scratch = self.f, self.scratch
        line = step * scratch.width + column
        values = [self._pairs(scratch.values, line + c * LANES) for c in range(columns)]
        return values, f.gep(i32, scratch.powers, step * self.pitch + query)

    def _power(self, powers: Value, row: int) -> Value:
        return self._broadcast(self.f.load(i32, powers, row))

    def _add_value(self, power: Value, value: Value, total: Value) -> Value:
        return self._dot(total, power, value)


class _TileScratch(_PairScratch):
    def operands(self, f: Kernel, kernel: Attention) -> None:
        super().operands(f, kernel)
        size = tiles(f.target, kernel)
        self.keys = f.scratch(bf16, SIZE * whole(kernel.features, STEP))
        self.rest = f.scratch(bf16, SIZE * STEP)
        self.transposed = f.scratch(f32, size.queries * self.width)
        """Results as features by queries."""


class _TileBlock(_PairBlock):
    """Blocks of 32 keys, or features, by 32 queries."""

    scratch_type = _TileScratch
    step = STEP

    @property
    def line(self) -> Value:
        """Bytes of a row of scores, powers or results: each has 32 bits per query."""
        return self.f.index(self.pitch * 4)

    def _pack_keys(self, part: Segment, first: Value, count: Value) -> None:
        """Compute the unscaled scores."""
        f = self.f
        self.values = f.gep(bf16, part.transposed, first)
        self.value_stride = part.transposed_step * bf16.bytes
        with f.loop(0, count, SIZE, nonempty=True) as loop:
            self._score_tiles(part, first + loop.index, loop.index, count - loop.index)

    def _score_tiles(self, part: Segment, key: Value, at: Value, left: Value) -> None:
        f, kernel, scratch = self.f, self.kernel, self.scratch
        width = whole(kernel.features, STEP)
        rows, stride = f.gep(bf16, part.k, key * part.k_step), part.k_step * bf16.bytes
        copies = f.lt(left, SIZE) if width == kernel.features else f.lt(0, left)
        with f.if_(copies):
            self._copy_keys(part, key, f.min(left, SIZE), width)
        start = f.select(copies, scratch.keys, rows)
        stride = f.select(copies, width * bf16.bytes, stride)
        numbers = self._tiles
        sums = [numbers.zeros(f) for _ in range(4)]
        for d in range(0, width, STEP):
            here = f.offset(start, d * bf16.bytes)
            a = [numbers.read(f, f.offset(here, half), stride) for half in (0, stride * ROWS)]
            line = f.gep(i32, scratch.q, d // 2 * self.pitch)
            b = [numbers.read(f, f.offset(line, half), self.line) for half in (0, BYTES)]
            sums = [numbers.dot(f, sums[2 * i + j], a[i], b[j]) for i in (0, 1) for j in (0, 1)]
        for number, total in enumerate(sums):
            place = (at + number // 2 * ROWS) * self.pitch + number % 2 * LANES
            numbers.write(f, total, f.gep(f32, scratch.scores, place), self.line)

    @property
    def _tiles(self) -> TileForms:
        assert isinstance(self.kernel.pairs, AmxBf16Dot)
        return self.kernel.pairs.tiles

    def _copy_keys(self, part: Segment, key: Value, count: Value, width: int) -> None:
        """Copy keys contiguously, features padded with 0; rows of padding keys are not used."""
        f, features = self.f, self.kernel.features
        with f.loop(0, count, nonempty=True) as loop:
            row = f.gep(bf16, part.k, (key + loop.index) * part.k_step)
            for d in range(0, width, STEP):
                left = features - d
                mask = f.mask(f.const(i64, left), STEP, 16) if left < STEP else None
                numbers = f.load(bf16.vector(STEP), row, d, mask=mask)
                f.store(numbers, self.scratch.keys, loop.index * width + d, align=BYTES)

    def _key(self, part: Segment, first: Value, key: Value) -> Value:
        return self.f.gep(f32, self.scratch.scores, key * self.pitch)

    def _products(self, keys: Sequence[Value], vectors: int) -> list[list[Value]]:
        scale = self.kernel.scale
        return [[self.load(key, v * LANES) * scale for v in range(vectors)] for key in keys]

    def _clear_results(self) -> None:
        f = self.f
        with f.loop(0, self.pitch * self.scratch.width, LANES, nonempty=True) as loop:
            zero = f.const(self.vector, 0.0)
            f.store(zero, self.scratch.transposed, loop.index, align=self.align)

    def _results(self, count: Value) -> None:
        f, scratch = self.f, self.scratch
        self._rescale_results()
        for top in range(0, scratch.width, SIZE):
            down = range(min(2, (scratch.width - top) // ROWS))
            corners = [(top + i * ROWS) * self.pitch + j * LANES for i in down for j in (0, 1)]
            places = [f.gep(f32, scratch.transposed, at) for at in corners]
            self._add_results(places, top, count)

    def _add_results(self, places: Sequence[Value], top: int, count: Value) -> None:
        """Add the products of tiles of values and two tiles of powers to the tiles of results.

        Values past the block may be any bits, so the last partial step is copied and masked.
        """
        f, numbers, scratch = self.f, self._tiles, self.scratch
        parts = [numbers.sums(f, place, self.line) for place in places]
        size = len(parts[0])
        values, steps = f.offset(self.values, self.value_stride * top), f.udiv(count, STEP)

        def step(number: Value, v: Value, stride: Value, flat: Sequence[Value]) -> list[Value]:
            a = [
                numbers.read(f, f.offset(v, stride * (i * ROWS)), stride)
                for i in range(len(places) // 2)
            ]
            pairs = f.gep(i32, scratch.powers, number * (STEP // 2 * self.pitch))
            b = [numbers.read(f, f.offset(pairs, half), self.line) for half in (0, BYTES)]
            sums = [list(flat[n : n + size]) for n in range(0, len(flat), size)]
            dots = [
                numbers.dot(f, sums[2 * i + j], part, b[j])
                for i, part in enumerate(a)
                for j in (0, 1)
            ]
            return [value for dot in dots for value in dot]

        flat = [value for part in parts for value in part]
        with f.loop(0, steps, carry=flat) as loop:
            v = f.gep(bf16, values, loop.index * STEP)
            loop.next(*step(loop.index, v, self.value_stride, loop.carried))
        with f.if_(f.lt(steps * STEP, count), loop.results) as branch:
            mask = f.mask(count - steps * STEP, STEP, 16)
            with f.loop(0, len(places) // 2 * ROWS, nonempty=True) as rows:
                line = f.gep(bf16, f.offset(values, self.value_stride * rows.index), steps * STEP)
                held = f.load(bf16.vector(STEP), line, mask=mask)
                f.store(held, scratch.rest, rows.index * STEP, align=BYTES)
            branch.next(*step(steps, scratch.rest, f.index(BYTES), loop.results))
        for number, place in enumerate(places):
            part = list(branch.results[number * size : (number + 1) * size])
            numbers.write(f, part, place, self.line)

    def _rescale_results(self) -> None:
        """Rescale the results where some query's maximum grew."""
        f, scratch = self.f, self.scratch
        factors = [self.load(scratch.factors, v * LANES) for v in range(self.size.vectors)]
        grown = [f.any(f.ne(factor, 1.0)) for factor in factors]
        with f.if_(f.combine(grown, f.or_)), f.loop(0, scratch.width, nonempty=True) as loop:
            for v, factor in enumerate(factors):
                at = loop.index * self.pitch + v * LANES
                value = f.load(self.vector, scratch.transposed, at, align=self.align)
                f.store(value * factor, scratch.transposed, at, align=self.align)

    def _finish_results(self) -> None:
        f, scratch = self.f, self.scratch
        with (
            f.loop(0, self.item.count, LANES, nonempty=True) as queries,
            f.loop(0, scratch.width, LANES, nonempty=True) as loop,
        ):
            places = ((loop.index + n) * self.pitch + queries.index for n in range(LANES))
            rows = [self.load(scratch.transposed, at) for at in places]
            for n, row in enumerate(transposed(f, rows)):
                at = (queries.index + n) * scratch.width + loop.index
                f.store(row, scratch.results, at, align=self.align)
