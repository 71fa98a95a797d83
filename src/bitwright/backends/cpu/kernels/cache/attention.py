"""Attention of single queries over cached keys and values; the heads that share keys together.

    scores   lanes along features; a tile of keys is transposed to sum across lanes
    softmax  lanes along keys
    values   lanes along the features of v

The keys of a row are cut at multiples of 128. Each part has its own maximum, sum and values, and
parts are combined in order:

    top' = max(top, t)    sum' = sum e^(top - top') + s e^(t - top')    y' likewise

A run with few rows divides parts among threads (`emit_parts`, `emit_combine`); with many rows, a
thread takes whole rows (`emit_rows`). Both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32, i64
from bitwright.backends.cpu.codegen.emit.types import storage_type
from bitwright.backends.cpu.codegen.expression import load_computed, to_stored
from bitwright.backends.cpu.codegen.math.exp_nonpositive import exp_nonpositive
from bitwright.backends.cpu.kernels.cache.write import checked_place
from bitwright.backends.cpu.kernels.movement import fault as faults
from bitwright.backends.cpu.kernels.movement.transpose import transposed
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import i8 as quantized

PART = 128
"""Keys of a part."""
FEW_ROWS = 16
"""Up to as many rows, threads divide the parts of a row."""
MAX_TOTALS = 16
"""Vectors of values that are summed in registers at a time."""


@dataclass(frozen=True)
class CachedAttention:
    """What determines the code of the kernels."""

    result: DType
    element: DType
    slot: DType
    position: DType
    group: int
    """Heads of q per head of the cache."""
    features: int
    value_features: int
    scale: float
    softcap: float
    window: int | None

    @property
    def is_scaled(self) -> bool:
        return self.element == quantized


POINTERS = ("q", "k", "v", "slot", "position")
SIZES = ("rows", "heads", "slots", "context", "q.0", "q.1")


def _slots(kernel: CachedAttention) -> tuple[tuple[str, ...], tuple[str, ...]]:
    scales = ("k_scale", "v_scale") if kernel.is_scaled else ()
    return (*POINTERS, *scales, "parts", "y", "fault"), (*SIZES, *faults.FAULT_SLOTS)


def part_floats(kernel: CachedAttention) -> int:
    """Numbers that a part of one head leaves: maximum, sum and values."""
    return 16 + -(-kernel.value_features // 16) * 16


def emit_cached_attention(module: Module, name: str, kernel: CachedAttention) -> Signature:
    """Parts of rows if rows are few, else whole rows."""
    pointers, sizes = _slots(kernel)
    signature = Signature(pointers, sizes)
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        work = _Attention(f, kernel)
        rows = f.args.size("rows")
        with f.if_(f.gt(f.args.size("slots") * f.args.size("context"), 0)) as some:
            with f.if_(f.le(rows, FEW_ROWS)) as branch:
                work.parts()
            with branch.else_():
                work.whole_rows()
        with some.else_(), f.if_(f.gt(rows, 0)):
            faults.record_fault(f, f.index(0))
    return signature


def emit_combine(module: Module, name: str, kernel: CachedAttention) -> Signature:
    """Combines the parts of few rows."""
    signature = Signature(("parts", "position", "y"), ("rows", "heads", "context"))
    with (
        module.kernel(name, signature) as f,
        f.subnormals_as_zeros(),
        f.if_(f.le(f.args.size("rows"), FEW_ROWS)),
        f.if_(f.gt(f.args.size("context"), 0)),
    ):
        _Combine(f, kernel).emit()
    return signature


class _Work:
    def __init__(self, f: Kernel, kernel: CachedAttention) -> None:
        self.f, self.kernel = f, kernel
        self.lanes = f.target.lanes(32)
        self.vector = f32.vector(self.lanes)
        self.align = self.vector.total_bytes
        self.width = -(-kernel.value_features // self.lanes) * self.lanes
        self.rows, self.heads = f.args.size("rows"), f.args.size("heads")

    def columns(self, features: int) -> list[tuple[int, Value | None]]:
        """The start of each vector of a row, and the mask of the last one."""
        f, lanes = self.f, self.lanes
        return [
            (d, f.mask(f.const(i64, features - d), lanes) if features - d < lanes else None)
            for d in range(0, features, lanes)
        ]

    def merge(
        self, top: Value, total: Value, results: Value, t: Value, s: Value, values: Value
    ) -> tuple[Value, Value]:
        """Adds a part to the running maximum, sum and values (in memory)."""
        f = self.f
        new = f.quick_max(t, top)
        shift = f.select(f.eq(new, -math.inf), 0.0, new)
        old_factor, factor = exp_nonpositive(f, top - shift), exp_nonpositive(f, t - shift)
        for d in range(0, self.width, self.lanes):
            old = f.load(self.vector, f.gep(f32, results, d), align=4)
            part = f.load(self.vector, f.gep(f32, values, d), align=4)
            both = f.fma(old, f.splat(old_factor, self.lanes), part * f.splat(factor, self.lanes))
            f.store(both, f.gep(f32, results, d), align=4)
        return new, f.fma(total, old_factor, s * factor)

    def write(self, row: Value, head: Value, total: Value, results: Value) -> None:
        """Stores the result of a row and head of q."""
        f, kernel = self.f, self.kernel
        index = (row * self.heads * kernel.group + head) * kernel.value_features
        y = f.gep(storage_type(kernel.result), f.args.pointer("y"), index)
        factor = f.splat(f.select(f.eq(total, 0.0), 0.0, f.div(1.0, total)), self.lanes)
        for d, mask in self.columns(kernel.value_features):
            value = f.load(self.vector, f.gep(f32, results, d), align=4) * factor
            f.store(to_stored(f, value, kernel.result), y, d, mask=mask)

    def clear(self, results: Value) -> None:
        f = self.f
        for d in range(0, self.width, self.lanes):
            f.store(f.const(self.vector, 0.0), f.gep(f32, results, d), align=4)


class _Combine(_Work):
    def emit(self) -> None:
        f, kernel = self.f, self.kernel
        results = f.scratch(self.vector, self.width // self.lanes)
        size, group = part_floats(kernel), kernel.group
        most = f.udiv(f.args.size("context") + (PART - 1), PART)
        begin, end = f.share(self.rows * self.heads * group)
        with f.loop(begin, end) as loop:
            row, head = (
                f.udiv(loop.index, self.heads * group),
                f.urem(loop.index, self.heads * group),
            )
            found = f.load(storage_type(kernel.position), f.args.pointer("position"), row)
            last = f.convert(found, i64, kernel.position.is_signed)
            last = f.select(f.uge(last, f.args.size("context")), 0, last)
            low = f.const(i64, 0)
            if kernel.window is not None:
                low = f.max(last - (kernel.window - 1), 0)
            self.clear(results)
            first = f.udiv(low, PART)
            start = (f.const(f32, -math.inf), f.const(f32, 0.0))
            with f.loop(first, f.udiv(last, PART) + 1, carry=start) as parts:
                at = ((row * self.heads + f.udiv(head, group)) * most + parts.index) * group
                part = f.gep(f32, f.args.pointer("parts"), (at + f.urem(head, group)) * size)
                t, s = f.load(f32, part), f.load(f32, part, 1)
                values = f.gep(f32, part, 16)
                top, total = parts.carried
                parts.next(*self.merge(top, total, results, t, s, values))
            self.write(row, head, parts.results[1], results)


@dataclass(frozen=True)
class _Item:
    """One row and one head of the cache."""

    row: Value
    head: Value
    low: Value
    """The first visible position."""
    last: Value
    base: Value
    """The index of the head's first key among the keys of the cache."""


class _Attention(_Work):
    def __init__(self, f: Kernel, kernel: CachedAttention) -> None:
        super().__init__(f, kernel)
        self.slots, self.context = f.args.size("slots"), f.args.size("context")
        self.depth = -(-kernel.features // self.lanes) * self.lanes
        self.q = f.scratch(self.vector, kernel.group * self.depth // self.lanes)
        self.scores = f.scratch(self.vector, kernel.group * PART // self.lanes)
        self.keys = f.scratch(self.vector, self.depth)
        self.results = f.scratch(self.vector, kernel.group * self.width // self.lanes)

    def _item(self, row: Value, head: Value) -> _Item:
        f, kernel = self.f, self.kernel
        slot = checked_place(f, "slot", kernel.slot, row, self.slots)
        last = checked_place(f, "position", kernel.position, row, self.context)
        low = f.const(i64, 0)
        if kernel.window is not None:
            low = f.max(last - (kernel.window - 1), 0)
        return _Item(row, head, low, last, (slot * self.heads + head) * self.context)

    def parts(self) -> None:
        """Threads divide rows, heads and parts."""
        f, kernel = self.f, self.kernel
        size = part_floats(kernel)
        most = f.udiv(self.context + (PART - 1), PART)
        element = storage_type(kernel.position)
        with f.loop(0, self.rows, carry=(f.const(i64, 0),)) as loop:
            found = f.load(element, f.args.pointer("position"), loop.index)
            position = f.convert(found, i64, kernel.position.is_signed)
            loop.next(f.max(loop.carried[0], f.min(position, self.context - 1)))
        used = f.udiv(loop.results[0], PART) + 1
        begin, end = f.share(self.rows * self.heads * used)
        with f.loop(begin, end) as loop:
            number, which = f.udiv(loop.index, used), f.urem(loop.index, used)
            item = self._item(f.udiv(number, self.heads), f.urem(number, self.heads))
            first = which * PART
            seen = f.and_(f.le(first, item.last), f.gt(first + PART, item.low))
            with f.if_(seen):
                self._load_queries(item)
                at = (number * most + which) * (kernel.group * size)
                target = f.gep(f32, f.args.pointer("parts"), at)
                self._part(item, first, target, f.const(i64, size))

    def whole_rows(self) -> None:
        f, kernel = self.f, self.kernel
        size = part_floats(kernel)
        target = f.scratch(self.vector, kernel.group * size // self.lanes)
        sums = f.scratch(f32, 2 * kernel.group)
        begin, end = f.share(self.rows * self.heads)
        with f.loop(begin, end) as loop:
            item = self._item(f.udiv(loop.index, self.heads), f.urem(loop.index, self.heads))
            self._load_queries(item)
            for g in range(kernel.group):
                f.store(f.const(f32, -math.inf), sums, 2 * g)
                f.store(f.const(f32, 0.0), sums, 2 * g + 1)
                self.clear(f.gep(f32, self.results, g * self.width))
            first = f.mul(f.udiv(item.low, PART), PART)
            with f.loop(first, item.last + 1, PART) as parts:
                self._part(item, parts.index, target, f.const(i64, size))
                with f.loop(0, kernel.group) as heads:
                    part = f.gep(f32, target, heads.index * size)
                    mine = f.gep(f32, sums, heads.index * 2)
                    top, total = self.merge(
                        f.load(f32, mine),
                        f.load(f32, mine, 1),
                        f.gep(f32, self.results, heads.index * self.width),
                        f.load(f32, part),
                        f.load(f32, part, 1),
                        f.gep(f32, part, 16),
                    )
                    f.store(top, mine)
                    f.store(total, mine, 1)
            with f.loop(0, kernel.group) as heads:
                total = f.load(f32, f.gep(f32, sums, heads.index * 2), 1)
                results = f.gep(f32, self.results, heads.index * self.width)
                self.write(item.row, item.head * kernel.group + heads.index, total, results)

    def _load_queries(self, item: _Item) -> None:
        """The heads of q that share these keys, times the scale."""
        f, kernel = self.f, self.kernel
        with f.loop(0, kernel.group) as heads:
            head = item.head * kernel.group + heads.index
            offset = item.row * f.args.size("q.0") + head * f.args.size("q.1")
            row = f.gep(storage_type(kernel.result), f.args.pointer("q"), offset)
            for d, mask in self.columns(kernel.features):
                x = load_computed(f, kernel.result, self.lanes, row, d, mask=mask)
                place = f.gep(f32, self.q, heads.index * self.depth + d)
                f.store(x * kernel.scale, place, align=self.align)

    def _part(self, item: _Item, first: Value, target: Value, size: Value) -> None:
        """Maximum, sum and values of the visible keys from `first` on, for each head."""
        f, kernel = self.f, self.kernel
        begin = f.max(first, item.low)
        count = f.min(first + PART, item.last + 1) - begin
        start = item.base + begin
        with f.loop(0, count, self.lanes, nonempty=True) as tiles:
            self._load_keys(start, tiles.index, count)
            with f.loop(0, kernel.group) as heads:
                score = self._tile(heads.index, start, tiles.index, count)
                place = f.gep(f32, self.scores, heads.index * PART + tiles.index)
                f.store(score, place, align=self.align)
        with f.loop(0, kernel.group) as heads:
            part = f.gep(f32, target, heads.index * size)
            scores = f.gep(f32, self.scores, heads.index * PART)
            self._softmax(scores, start, count, part)
        self._values(start, count, target, size)

    def _load_keys(self, start: Value, first: Value, count: Value) -> None:
        """A tile of keys in f32; keys behind the last one are the last one."""
        f, kernel = self.f, self.kernel
        element = storage_type(kernel.element)
        for t in range(self.lanes):
            index = start + f.min(first + t, count - 1)
            row = f.gep(element, f.args.pointer("k"), index * kernel.features)
            for d, mask in self.columns(kernel.features):
                x = self._load(row, d, mask)
                f.store(x, f.gep(f32, self.keys, t * self.depth + d), align=self.align)

    def _load(self, row: Value, column: int, mask: Value | None) -> Value:
        x = load_computed(self.f, self.kernel.element, self.lanes, row, column, mask=mask)
        return self.f.convert(x, f32)

    def _tile(self, head: Value, start: Value, first: Value, count: Value) -> Value:
        """Scores of one key per lane; -inf behind the last key."""
        f, kernel, lanes = self.f, self.kernel, self.lanes
        q = f.gep(f32, self.q, head * self.depth)
        totals = [f.const(self.vector, 0.0)] * lanes
        for d in range(0, self.depth, lanes):
            x = f.load(self.vector, f.gep(f32, q, d), align=self.align)
            for t in range(lanes):
                key = f.load(
                    self.vector, f.gep(f32, self.keys, t * self.depth + d), align=self.align
                )
                totals[t] = f.fma(key, x, totals[t])
        score = f.combine(transposed(f, totals), f.add)
        inside = f.mask(count - first, lanes)
        if kernel.is_scaled:
            factors = f.gep(f32, f.args.pointer("k_scale"), start + first)
            score = score * f.load(self.vector, factors, mask=inside)
        if kernel.softcap > 0:
            score = vector_math.tanh(f, score * (1.0 / kernel.softcap)) * kernel.softcap
        return f.select(inside, score, -math.inf)

    def _softmax(self, scores: Value, start: Value, count: Value, part: Value) -> None:
        """Replaces scores by weights; stores their maximum and sum."""
        f, kernel, lanes = self.f, self.kernel, self.lanes
        lowest = f.const(self.vector, -math.inf)
        with f.loop(0, count, lanes, carry=(lowest,), nonempty=True) as loop:
            score = f.load(self.vector, f.gep(f32, scores, loop.index), align=self.align)
            loop.next(f.quick_max(score, loop.carried[0]))
        top = f.reduce(loop.results[0], f.quick_max)
        shift = f.splat(f.select(f.eq(top, -math.inf), 0.0, top), lanes)
        zeros = f.const(self.vector, 0.0)
        with f.loop(0, count, lanes, carry=(zeros,), nonempty=True) as loop:
            place = f.gep(f32, scores, loop.index)
            power = exp_nonpositive(f, f.load(self.vector, place, align=self.align) - shift)
            weight = power
            if kernel.is_scaled:
                inside = f.mask(count - loop.index, lanes)
                factors = f.gep(f32, f.args.pointer("v_scale"), start + loop.index)
                weight = power * f.load(self.vector, factors, mask=inside)
            f.store(weight, place, align=self.align)
            loop.next(loop.carried[0] + power)
        f.store(top, part)
        f.store(f.reduce_add(loop.results[0]), part, 1)

    def _values(self, start: Value, count: Value, target: Value, size: Value) -> None:
        """Σ weight · v of each head; a row of v is read once for several heads."""
        columns = self.columns(self.kernel.value_features)
        wide = self.f.target.vector_registers >= 32
        room = MAX_TOTALS if wide else MAX_TOTALS // 2
        step = max(1, min(len(columns), room))
        heads = max(1, room // step)
        for first in range(0, self.kernel.group, heads):
            chosen = range(first, min(first + heads, self.kernel.group))
            for at in range(0, len(columns), step):
                self._sums(start, count, target, size, chosen, columns[at : at + step])

    def _sums(
        self,
        start: Value,
        count: Value,
        target: Value,
        size: Value,
        heads: Sequence[int],
        columns: Sequence[tuple[int, Value | None]],
    ) -> None:
        f, kernel = self.f, self.kernel
        element = storage_type(kernel.element)
        zeros = [f.const(self.vector, 0.0)] * (len(heads) * len(columns))
        with f.loop(0, count, carry=zeros, nonempty=True) as keys:
            index = (start + keys.index) * kernel.value_features
            row = f.gep(element, f.args.pointer("v"), index)
            totals = list(keys.carried)
            values = [self._load(row, d, mask) for d, mask in columns]
            for h, head in enumerate(heads):
                weight = f.load(f32, f.gep(f32, self.scores, keys.index + head * PART))
                power = f.splat(weight, self.lanes)
                for n, value in enumerate(values):
                    at = h * len(columns) + n
                    totals[at] = f.fma(power, value, totals[at])
            keys.next(*totals)
        for h, head in enumerate(heads):
            part = f.gep(f32, target, size * head)
            for n, (d, _) in enumerate(columns):
                total = keys.results[h * len(columns) + n]
                f.store(total, f.gep(f32, part, 16 + d), align=4)
