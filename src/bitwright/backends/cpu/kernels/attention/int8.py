"""int8 attention for blocks of queries (`ops.quant.int8_attention` defines the computation).

As `kernels.attention.attention`, lanes along queries, with keys and values quantized beforehand
(`kernels.attention.int8_keys`). The maximum score of each query is computed first, because weights
are quantized values of e^(score - maximum): with many keys, scores are computed twice, which is
cheap in int8.

    scores   s[key][query] = f32(Σ k q) · step_k · step_q - ln m     four features a time and lane
    weights  w[key / 4][query][4] = rint(255 e^(s - top))           four keys a word
    values   o[query][:]  += f32(Σ w v)                             four keys a time and lane

Without an int8 dot product both products are f32 products of the quantized values, which are exact
while sums stay below 2^24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import f32, i8, i32, storage_type
from bitwright.backends.cpu.codegen.instr import dot_u8s8
from bitwright.backends.cpu.codegen.math.division import divider
from bitwright.backends.cpu.codegen.math.exp_nonpositive import exp_nonpositive_exact
from bitwright.backends.cpu.kernels.attention import int8_keys, spec
from bitwright.backends.cpu.kernels.attention.query_block import Block, emit_query_blocks
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.kernels.movement.transpose import transposed
from bitwright.backends.cpu.lowering.region import address_of, store
from bitwright.ops.quant.int8_attention import PARTS, WEIGHT_STEPS
from bitwright.target import Target

BLOCK = 256
"""Keys per block of scores."""
LONG_BLOCK = 1024
"""The same for f32 products, where recomputing scores costs more than cache misses."""
_MAGIC = 1.5 * 2.0**23
"""Adding it leaves a rounded integer of up to 22 bits in the last bits, below these bits:"""
_MAGIC_BITS = 0x4B400000
_WHOLE = 2.0**23
"""Adding and subtracting it rounds numbers from 0 to 2^23 to integers."""
_OFFSET_WORD = 0x80808080


def quantized_tiles(target: Target, kernel: spec.Attention) -> spec.Tiles:
    size = spec.tiles(target, kernel)
    unit = math.lcm(size.keys, 4)
    keys = int8_keys.QuantizedKeys.of(target, kernel)
    return replace(size, block=(BLOCK if keys.dots else LONG_BLOCK) // unit * unit)


def quantized_signature(kernel: spec.Attention) -> Signature:
    """The slots of `Attention` with quantized values and scales instead of k and v."""
    plain = kernel.signature
    names = [slot.name for slot in plain.slots]
    pointers = [s.name for s in plain.slots if s.kind == "pointer" and s.name not in ("k", "v")]
    sizes = [n for n in names if n not in pointers and n[:2] not in ("k.", "v.")]
    sizes = [name for name in sizes if name not in ("k", "v")]
    return Signature((*int8_keys.INT8, *pointers), sizes)


def emit_int8_attention(module: Module, name: str, kernel: spec.Attention) -> Signature:
    signature = quantized_signature(kernel)
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        emit_query_blocks(f, kernel, _QuantizedBlock)
    return signature


class _Scratch:
    """Scratch memory of a thread."""

    def __init__(self, f: Kernel, kernel: spec.Attention) -> None:
        size, keys = quantized_tiles(f.target, kernel), int8_keys.QuantizedKeys.of(f.target, kernel)
        self.width = keys.width
        self.units = keys.row // 4 if keys.dots else keys.features
        """32-bit words, or numbers, per row of q or k."""
        self.q = f.scratch(f32, self.units * size.queries)
        self.row = -(-self.units // keys.lanes) * keys.lanes
        self.q_rows = f.scratch(f32, keys.lanes * self.row)
        self.q_scales = f.scratch(f32, size.queries)
        self.q_sums = f.scratch(i32, size.queries)
        self.scores = f.scratch(f32, size.block * size.queries)
        self.weights = f.scratch(i32, size.block // 4 * size.queries) if keys.dots else self.scores
        self.results = f.scratch(f32, size.queries * self.width)
        self.factors = f.scratch(f32, size.queries)
        rows = -(-size.block // size.lanes) * size.lanes
        full = kernel.mask == spec.FULL_MASK
        self.bias = f.scratch(f32, rows * size.queries) if full else None


class _QuantizedBlock(Block):
    """One block of queries."""

    scratch_type = _Scratch

    def __init__(
        self, f: Kernel, kernel: spec.Attention, scratch: _Scratch, item: spec.WorkItem
    ) -> None:
        super().__init__(f, kernel, scratch, item)
        self.size = quantized_tiles(f.target, kernel)
        self.quantized_keys = keys = int8_keys.QuantizedKeys.of(f.target, kernel)
        self.dot = dot_u8s8(f.target) if keys.dots else None
        heads = f.udiv(f.args.size("heads"), f.args.size("group"))
        self.group = item.batch * heads + item.key_head
        self.total = f.args.size("keys")
        start = self.group * self.total
        self.k_q = f.gep(keys.element, f.args.pointer("k_q"), start * keys.row)
        self.k_scales, self.v_multipliers, self.v_log_multipliers = (
            f.gep(f32, f.args.pointer(name), start)
            for name in ("k_scales", "v_multipliers", "v_log_multipliers")
        )
        rows = pieces(f, self.total, 4) * 4 if keys.dots else self.total
        self.v_q = f.gep(keys.element, f.args.pointer("v_q"), self.group * rows * keys.width)

    def emit(self) -> None:
        f, item, vectors = self.f, self.item, self.size.vectors
        self._pack_queries()
        self._clear_results()
        lowest = (f.const(self.vector, -math.inf),) * vectors
        low = f.mul(f.udiv(item.low, 4), 4)  # start at a packed group of four keys
        block = self.size.block
        with f.loop(low, item.high, block, carry=lowest) as loop:
            count = f.min(item.high - loop.index, block)
            loop.next(*self._store_scores(loop.index, count, loop.carried))
        tops = loop.results
        shifts = [f.select(f.eq(top, -math.inf), 0.0, top) for top in tops]
        is_long = f.gt(item.high - low, block)
        zeros = (f.const(self.vector, 0.0),) * vectors
        with f.loop(low, item.high, block, carry=zeros) as loop:
            count = f.min(item.high - loop.index, block)
            with f.if_(is_long):
                self._store_scores(loop.index, count, lowest)
            with f.if_(self.is_full, carry=loop.carried) as branch:
                branch.next(*self._weights(loop.index, count, shifts, loop.carried))
            with branch.else_():
                sums = loop.carried
                one = self._weights(loop.index, count, shifts[:1], sums[:1])
                branch.next(*one, *sums[1:])
            self._results_of(loop.index, count)
            loop.next(*branch.results)
        for number, (top, total) in enumerate(zip(tops, loop.results, strict=True)):
            # the maximum does not propagate NaN, the sum does
            is_hidden = f.and_(f.eq(top, -math.inf), f.not_(f.is_nan(total)))
            divisor = f.select(is_hidden, 0.0, total)
            f.store(divisor, self.scratch.factors, number * self.lanes, align=self.align)
        with f.loop(0, item.count, nonempty=True) as loop:
            self._write(loop.index)

    # scores

    def _store_scores(self, first: Value, count: Value, tops: Sequence[Value]) -> Sequence[Value]:
        """Store the scores of a block of keys; return the running maximum of each query."""
        f = self.f
        if self.scratch.bias is not None:
            self._pack_bias(first, count)
        row, width = f.index(self.quantized_keys.row), f.index(self.quantized_keys.width)
        part = spec.Segment(self.k_q, self.v_q, row, width, f.index(0), self.total, self.v_q, width)
        with f.if_(self.is_full, carry=tops) as branch:
            branch.next(*self._scores(part, first, count, tops))
        with branch.else_():
            branch.next(*self._scores(part, first, count, tops[:1]), *tops[1:])
        return branch.results

    def _key(self, part: spec.Segment, first: Value, key: Value) -> Value:
        return self.f.gep(
            self.quantized_keys.element, part.k, (first + key) * self.quantized_keys.row
        )

    def scaled_products(
        self, keys: Sequence[Value], vectors: int, numbers: Sequence[Value]
    ) -> list[list[Value]]:
        f, dot = self.f, self.dot
        if dot is None:
            found = self._products(keys, vectors)
        else:
            starts = [
                f.load(i32.vector(self.lanes), self.scratch.q_sums, v * self.lanes)
                for v in range(vectors)
            ]
            with f.loop(0, self.scratch.units, carry=starts * len(keys), nonempty=True) as loop:
                totals = list(loop.carried)
                queries = [
                    f.bitcast(self._words(at), dot.operands[2])
                    for at in (loop.index * self.pitch + v * self.lanes for v in range(vectors))
                ]
                for t, address in enumerate(keys):
                    word = f.load(i32, f.offset(address, loop.index * 4), align=4)
                    spread = f.bitcast(f.splat(word, self.lanes), dot.operands[1])
                    for v, query in enumerate(queries):
                        at = t * vectors + v
                        totals[at] = dot(f, totals[at], spread, query)
                loop.next(*totals)
            flat = [f.convert(total, f32) for total in loop.results]
            found = [flat[i : i + vectors] for i in range(0, len(flat), vectors)]
        for row, number in zip(found, numbers, strict=True):
            step = f.splat(f.load(f32, self.k_scales, number), self.lanes)
            row[:] = [total * step for total in row]
        return found

    def _add_bias(
        self, found: list[list[Value]], numbers: Sequence[Value], keys: Sequence[Value]
    ) -> list[list[Value]]:
        """Scores times the scales of the queries, capped, with bias, minus ln m of each key."""
        f = self.f
        steps = [
            f.load(self.vector, self.scratch.q_scales, v * self.lanes, align=self.align)
            for v in range(len(found[0]))
        ]
        log_multipliers = [f.load(f32, self.v_log_multipliers, number) for number in numbers]
        scores = [[total * steps[v] for v, total in enumerate(row)] for row in found]
        scores = super()._add_bias(scores, numbers, keys)
        taken = [f.splat(log, self.lanes) for log in log_multipliers]
        return [[x - log for x in row] for row, log in zip(scores, taken, strict=True)]

    def _words(self, at: Value) -> Value:
        """Words of neighbouring queries."""
        return self.f.load(self.vector, self.scratch.q, at, align=self.align)

    # weights

    def _weights(
        self, first: Value, count: Value, shifts: Sequence[Value], sums: Sequence[Value]
    ) -> Sequence[Value]:
        """Store the quantized softmax weights; return their running sums."""
        f = self.f

        def group(number: Value, totals: Sequence[Value], last: bool) -> list[Value]:
            found = list(totals)
            for v, shift in enumerate(shifts):
                # a word is the sum of four shifted rounded numbers minus their upper bits
                upper = sum(_MAGIC_BITS << (8 * i) for i in range(4))
                word = f.const(i32.vector(self.lanes), -upper & 0xFFFFFFFF)
                for i in range(4):
                    key = number * 4 + i
                    at = key * self.pitch + v * self.lanes
                    score = f.load(self.vector, self.scratch.scores, at, align=self.align)
                    power = exp_nonpositive_exact(f, score - shift)
                    place = first + key
                    if last:
                        inside = f.lt(key, count)
                        power = f.select(inside, power, f.const(self.vector, 0.0))
                        place = f.select(inside, place, first)
                    most, multipliers = (
                        float(WEIGHT_STEPS * PARTS),
                        f.load(f32, self.v_multipliers, place),
                    )
                    if self.kernel.causal:
                        parts = (power * most + _WHOLE) - _WHOLE
                        found[v] = f.fma(parts, f.splat(multipliers, self.lanes), found[v])
                    else:
                        parts = (power * f.splat(multipliers * most, self.lanes) + _WHOLE) - _WHOLE
                        found[v] = found[v] + parts
                    rounded = power * float(WEIGHT_STEPS) + _MAGIC
                    if self.dot is None:
                        f.store(rounded - _MAGIC, self.scratch.weights, at, align=self.align)
                    else:
                        word = word + f.shl(f.bitcast(rounded, word.type), 8 * i)
                if self.dot is not None:
                    at = number * self.pitch + v * self.lanes
                    f.store(word, self.scratch.weights, at, align=self.align)
            return found

        whole = f.udiv(count, 4)
        with f.loop(0, whole, carry=sums) as loop:
            loop.next(*group(loop.index, loop.carried, False))
        with f.if_(f.lt(whole * 4, count), carry=loop.results) as branch:
            branch.next(*group(whole, loop.results, True))
        return branch.results

    # values

    def _results_of(self, first: Value, count: Value) -> None:
        """Add the block's values to the results."""
        f, size = self.f, self.size
        width = self.quantized_keys.width // self.lanes
        parts = -(-width // size.columns)
        bounds = [width * n // parts for n in range(parts + 1)]
        with f.loop(0, self.item.count, size.rows, nonempty=True) as loop:
            for begin, end in pairwise(bounds):
                self._results_tile(loop.index, begin * self.lanes, end - begin, first, count)

    def _results_tile(
        self, query: Value, column: int, columns: int, first: Value, count: Value
    ) -> None:
        f, scratch, align, dot = self.f, self.scratch, self.align, self.dot
        rows, width = range(self.size.rows), self.quantized_keys.width
        places = [
            (query + r) * width + (column + c * self.lanes) for r in rows for c in range(columns)
        ]
        before = [f.load(self.vector, scratch.results, place, align=align) for place in places]
        source = f.gep(self.quantized_keys.element, self.v_q, first * width)
        steps = count if dot is None else pieces(f, count, 4)
        begin: Sequence[Value] = before
        if dot is not None:
            begin = [f.const(i32.vector(self.lanes), 0)] * len(places)
        with f.loop(0, steps, carry=begin, nonempty=True) as loop:
            values = [
                f.load(self.vector, source, loop.index * width + (column + c * self.lanes))
                for c in range(columns)
            ]
            weights = f.gep(f32, scratch.weights, loop.index * self.pitch + query)
            after: list[Value] = []
            for r in rows:
                weight = f.splat(f.load(f32, weights, r), self.lanes)
                for c, value in enumerate(values):
                    total = loop.carried[r * columns + c]
                    if dot is None:
                        after.append(f.fma(weight, value, total))
                    else:
                        q = f.bitcast(value, dot.operands[2])
                        after.append(dot(f, total, f.bitcast(weight, dot.operands[1]), q))
            loop.next(*after)
        for place, old, total in zip(places, before, loop.results, strict=True):
            new = total if dot is None else old + f.convert(total, f32)
            f.store(new, scratch.results, place, align=align)

    # queries and results

    def _pack_queries(self) -> None:
        """Quantize each query into features (or words of four) by queries, with its scale."""
        f, item, scratch, dot = self.f, self.item, self.scratch, self.dot
        features = self.kernel.features
        index = (item.batch, item.head, item.first)
        base, step = address_of(f, "q", f32, index), f.args.size("q.2")
        with f.loop(0, item.count, self.lanes, nonempty=True) as vectors:
            start = vectors.index
            count = f.min(item.count - start, self.lanes)
            rows = [
                f.gep(f32, base, (start + f.min(count - 1, r)) * step) for r in range(self.lanes)
            ]
            inverse, unit = int8_keys.factors(f, int8_keys.row_peaks(f, rows, features))
            f.store(unit * self.kernel.scale, scratch.q_scales, start, align=self.align)
            f.store(inverse, scratch.factors, align=self.align)
            with f.loop(0, count, nonempty=True) as loop:
                row = f.gep(f32, base, (start + loop.index) * step)
                held = f.gep(i32, scratch.q_rows, loop.index * scratch.row)
                self._quantize_query(row, f.load(f32, scratch.factors, loop.index), held)
            self._transpose_queries(start)
        if dot is None:
            return
        moved = f.bitcast(f.const(i32.vector(self.lanes), _OFFSET_WORD), dot.operands[1])
        for v in range(self.size.vectors):
            with f.loop(0, scratch.units, carry=(f.const(i32.vector(self.lanes), 0),)) as loop:
                at = loop.index * self.pitch + v * self.lanes
                word = f.bitcast(self._words(at), dot.operands[2])
                loop.next(dot(f, loop.carried[0], moved, word))
            f.store(0 - loop.results[0], scratch.q_sums, v * self.lanes, align=self.align)

    def _quantize_query(self, row: Value, inverse: Value, held: Value) -> None:
        """Quantize one query contiguously, with its last word padded with zeros."""
        f, features = self.f, self.kernel.features
        factor = f.splat(inverse, self.lanes)
        if self.dot is not None and features % 4:
            f.store(f.const(i32, 0), held, self.scratch.units - 1)

        def put(d: Operand, mask: Value | None) -> None:
            found = f.round_to_int(f.load(self.vector, row, d, mask=mask) * factor)
            f.store(f.convert(found, f32 if self.dot is None else i8), held, d, mask=mask)

        f.vectors(0, features, self.lanes, put)

    def _transpose_queries(self, start: Value) -> None:
        """Transpose one query per lane, from rows to words."""
        f, scratch, lanes = self.f, self.scratch, self.lanes

        def turn(first: Operand, count: int) -> None:
            rows = [
                f.load(self.vector, scratch.q_rows, f.index(first) + r * scratch.row)
                for r in range(lanes)
            ]
            for number, column in enumerate(transposed(f, rows)[:count]):
                at = (f.index(first) + number) * self.pitch + start
                f.store(column, scratch.q, at, align=self.align)

        whole = scratch.units // lanes * lanes
        with f.loop(0, whole, lanes) as loop:
            turn(loop.index, lanes)
        if rest := scratch.units - whole:
            turn(whole, rest)

    def _write(self, query: Value) -> None:
        f, kernel, item, width = self.f, self.kernel, self.item, self.quantized_keys.width
        index = (item.batch, item.head, item.first + query)
        result = kernel.after.dtype
        y = address_of(f, "y", storage_type(result), index)
        extras = kernel.extras.at(f, index, self.lanes)
        total = f.load(f32, self.scratch.factors, query)
        divided, is_hidden = divider(f, total, self.lanes), f.eq(total, 0.0)
        unit = f.load(f32, f.args.pointer("v_inverse_scales"), self.group)
        step = f.splat(f.div(float(PARTS), unit), self.lanes)
        means = f.gep(f32, f.args.pointer("v_means"), self.group * width)
        for column in range(0, width, self.lanes):
            left = kernel.value_features - column
            mask = f.mask(f.index(left), self.lanes) if left < self.lanes else None
            value = f.load(self.vector, self.scratch.results, query * width + column)
            value = divided(value) * step + f.load(self.vector, means, column)
            value = f.select(is_hidden, f.const(self.vector, 0.0), value)  # all keys are masked
            value = kernel.after.evaluate(f, [value, *extras.load(column, mask)], self.lanes)
            store(f, value, result, y, column, mask)
