"""Quantizes keys and values of int8 attention once for all queries (`ops.quant.int8_attention`).

    k_q   [batch, head, key, features]         and the scale of each row
    v_q   [batch, head, key / 4, width, 4]     m and ln m of each row, u of each head and the
                                               means of all features

For targets with a u8 × s8 dot product, k has an offset of 128 and rows are padded to groups of
four; v interleaves four keys, padded with zeros. Otherwise both are f32 numbers, and v is [batch,
head, key, width]. Past keys precede present keys. Work is divided by rows of k and heads of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Type, Value, f32, i8, i32
from bitwright.backends.cpu.codegen.instr import dot_u8s8
from bitwright.backends.cpu.kernels.attention.spec import Attention
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.kernels.movement.transpose import transposed
from bitwright.backends.cpu.lowering.region import address_of
from bitwright.ops.quant import int8_attention as meaning
from bitwright.target import Target

_VALUES = ("q", "multipliers", "log_multipliers", "inverse_scales", "means")
INT8 = ("k_q", "k_scales", *(f"v_{name}" for name in _VALUES))
"""The slots of quantized keys and values."""
Q_MAX, TINY = float(meaning.STEPS), float(meaning.TINY)
MAX_SUMS = 4
"""Vectors of features whose means are computed at a time."""
Q_OFFSET = 128
_NOT_FINITE = 0x7F800000


@dataclass(frozen=True)
class QuantizedKeys:
    features: int
    value_features: int
    has_past: bool
    causal: bool
    dots: bool
    """Whether products are u8 × s8 dot products."""
    lanes: int

    @classmethod
    def of(cls, target: Target, kernel: Attention) -> QuantizedKeys:
        lanes = target.lanes(32)
        dot = dot_u8s8(target)
        fits = dot is not None and dot.result is i32.vector(lanes)
        sizes = kernel.features, kernel.value_features
        return cls(*sizes, kernel.has_past, kernel.causal, fits, lanes)

    @property
    def row(self) -> int:
        """Elements per row of k."""
        return -(-self.features // 4) * 4 if self.dots else self.features

    @property
    def element(self) -> Type:
        """The storage type of a quantized value."""
        return i8 if self.dots else f32

    @property
    def width(self) -> int:
        """Columns of v, padded to whole vectors."""
        return -(-self.value_features // self.lanes) * self.lanes

    @property
    def signature(self) -> Signature:
        tensors = ["k", "v", *(("past_k", "past_v") if self.has_past else ())]
        sizes = ["batches", "heads", "keys", *(("past",) if self.has_past else ())]
        strides = [f"{name}.{axis}" for name in tensors for axis in range(3)]
        return Signature((*tensors, *INT8), (*sizes, *strides))


def emit_int8_keys(module: Module, name: str, form: QuantizedKeys) -> Signature:
    with module.kernel(name, form.signature) as f, f.subnormals_as_zeros():
        _KeyQuantizer(f, form).emit()
    return form.signature


def peak_of(f: Kernel, x: Value, peak: Value) -> Value:
    """The bits of the running maximum of |x|; as bits, NaN is the largest."""
    bits = f.and_(f.bitcast(x, x.type.of(i32)), 0x7FFFFFFF)
    return f.max(bits, peak)


def factors(f: Kernel, peak: Value) -> tuple[Value, Value]:
    """(1 / scale, scale) from the bits of a peak."""
    value = f.bitcast(peak, peak.type.of(f32))
    inverse = f.select(f.lt(value, TINY), 0.0, f.div(Q_MAX, value))
    step = f.select(f.ge(peak, _NOT_FINITE), float("nan"), f.div(value, Q_MAX))
    return inverse, step


def row_peaks(f: Kernel, rows: Sequence[Value], features: int, means: Value | None = None) -> Value:
    """The bits of max |x - mean| of one row per lane."""
    lanes = len(rows)
    vector = f32.vector(lanes)

    def widest(d: Value, mask: Value | None, *peaks: Value) -> list[Value]:
        loaded = [f.load(vector, row, d, mask=mask) for row in rows]
        if means is not None:
            mean = f.load(vector, means, d, mask=mask)
            loaded = [x - mean for x in loaded]
        return [peak_of(f, x, peak) for x, peak in zip(loaded, peaks, strict=True)]

    none = (f.const(i32.vector(lanes), 0),) * lanes
    peaks = f.vectors(0, features, lanes, widest, none)
    return f.combine(transposed(f, peaks), f.max)


class _KeyQuantizer:
    def __init__(self, f: Kernel, form: QuantizedKeys) -> None:
        self.f, self.form, self.lanes = f, form, form.lanes
        self.vector = f32.vector(form.lanes)
        self.inverse = f.scratch(f32, form.lanes)
        self.past = f.args.size("past") if form.has_past else None
        keys = f.args.size("keys")
        self.total = keys if self.past is None else keys + self.past

    def emit(self) -> None:
        f = self.f
        each = pieces(f, self.total, self.lanes) + 1
        heads = f.args.size("heads")
        begin, end = f.share(f.args.size("batches") * heads * each)
        with f.loop(begin, end) as loop:
            group = f.udiv(loop.index, each)
            place = loop.index - group * each
            index = (f.udiv(group, heads), f.urem(group, heads))
            with f.if_(f.eq(place, 0)) as branch:
                self._values(group, index)
            with branch.else_():
                self._keys(group, index, (place - 1) * self.lanes)

    def _row(self, name: str, index: Sequence[Value], key: Value) -> Value:
        """The address of a row of k or v, past or present."""
        f = self.f
        row = f.gep(f32, address_of(f, name, f32, index), key * f.args.size(f"{name}.2"))
        if self.past is None:
            return row
        behind = f.gep(
            f32, address_of(f, name, f32, index), (key - self.past) * f.args.size(f"{name}.2")
        )
        before = f.gep(
            f32, address_of(f, f"past_{name}", f32, index), key * f.args.size(f"past_{name}.2")
        )
        return f.select(f.lt(key, self.past), before, behind)

    def _keys(self, group: Value, index: Sequence[Value], first: Value) -> None:
        """Quantize up to one row of k per lane."""
        f, form, lanes = self.f, self.form, self.lanes
        count = f.min(self.total - first, lanes)
        rows = [self._row("k", index, first + f.min(count - 1, r)) for r in range(lanes)]
        inverse, step = factors(f, row_peaks(f, rows, form.features))
        number = group * self.total + first
        f.store(step, f.args.pointer("k_scales"), number, mask=f.mask(count, lanes))
        f.store(inverse, self.inverse, align=inverse.type.total_bytes)
        with f.loop(0, count, nonempty=True) as loop:
            row = self._row("k", index, first + loop.index)
            factor = f.splat(f.load(f32, self.inverse, loop.index), lanes)
            place = (number + loop.index) * form.row
            q = f.gep(form.element, f.args.pointer("k_q"), place)

            def put(d: Value, mask: Value | None) -> None:
                found = f.round_to_int(f.load(self.vector, row, d, mask=mask) * factor)
                moved = found + Q_OFFSET if form.dots else found
                f.store(f.convert(moved, form.element), q, d, mask=mask)

            f.vectors(0, form.features, lanes, put)

    def _values(self, group: Value, index: Sequence[Value]) -> None:
        """Quantize the values of a head."""
        f, form = self.f, self.form
        means = f.gep(f32, f.args.pointer("v_means"), group * form.width)
        if form.causal:
            for column in range(0, form.width, self.lanes):
                f.store(f.const(self.vector, 0.0), means, column)
        else:
            self._rounded_means(index, means)
        start = group * self.total
        multipliers, log_multipliers = (
            f.gep(f32, f.args.pointer(name), start)
            for name in ("v_multipliers", "v_log_multipliers")
        )
        unit = self._row_multipliers(index, means, multipliers, log_multipliers)
        f.store(unit, f.args.pointer("v_inverse_scales"), group)
        rows = pieces(f, self.total, 4) * 4 if form.dots else self.total
        q = f.gep(form.element, f.args.pointer("v_q"), group * rows * form.width)
        for column in range(0, form.width, self.lanes):
            mean = f.load(self.vector, means, column)
            if form.dots:
                self._quantize_groups(index, column, mean, multipliers, unit, q)
            else:
                with f.loop(0, self.total) as loop:
                    found = self._quantize(index, loop.index, column, mean, multipliers, unit)
                    f.store(f.convert(found, f32), q, loop.index * form.width + column)

    def _mask(self, column: int) -> Value | None:
        left = self.form.value_features - column
        return self.f.mask(self.f.index(left), self.lanes) if left < self.lanes else None

    def _rounded_means(self, index: Sequence[Value], means: Value) -> None:
        parts = self.form.width // self.lanes
        for begin in range(0, parts, MAX_SUMS):
            some = range(begin, min(begin + MAX_SUMS, parts))
            self._means(index, means, [part * self.lanes for part in some])
        self._round(means)

    def _means(self, index: Sequence[Value], means: Value, columns: Sequence[int]) -> None:
        f = self.f
        masks = [self._mask(column) for column in columns]
        zeros = (f.const(self.vector, 0.0),) * len(columns)
        with f.loop(0, self.total, carry=zeros) as loop:
            row = self._row("v", index, loop.index)
            loaded = [
                f.load(self.vector, row, column, mask=mask)
                for column, mask in zip(columns, masks, strict=True)
            ]
            loop.next(*(a + b for a, b in zip(loop.carried, loaded, strict=True)))
        count = f.convert(self.total, f32)
        for column, total in zip(columns, loop.results, strict=True):
            f.store(total / count, means, column)

    def _round(self, means: Value) -> None:
        """Round the means to few bits."""
        f = self.f
        columns = range(0, self.form.width, self.lanes)
        loaded = [f.load(self.vector, means, column) for column in columns]
        bits = f.const(i32.vector(self.lanes), 0)
        for mean in loaded:
            bits = peak_of(f, mean, bits)
        largest = f.bitcast(f.reduce(bits, f.max), f32)
        added = f.min(largest * float(meaning.MEAN_ROUNDING), float(meaning.MOST_ADDED))
        wide = f.splat(added, self.lanes)
        for column, mean in zip(columns, loaded, strict=True):
            f.store((mean + wide) - wide, means, column)

    def _row_multipliers(
        self, index: Sequence[Value], means: Value, multipliers: Value, log_multipliers: Value
    ) -> Value:
        """Store m and ln m of each row; return u of the head."""
        f, lanes = self.f, self.lanes
        none = f.const(i32.vector(lanes), 0)
        with f.loop(0, self.total, lanes, carry=(none, none)) as loop:
            count = f.min(self.total - loop.index, lanes)
            rows = [self._row("v", index, loop.index + f.min(count - 1, r)) for r in range(lanes)]
            peaks = row_peaks(f, rows, self.form.value_features, means)
            f.store(
                f.bitcast(peaks, self.vector), multipliers, loop.index, mask=f.mask(count, lanes)
            )
            first = f.select(f.eq(loop.index, 0), peaks, loop.carried[1])
            loop.next(f.max(loop.carried[0], peaks), first)
        highest, first = loop.results
        bits = f.lane(first, 0) if self.form.causal else f.reduce(highest, f.max)
        largest = f.bitcast(bits, f32)
        largest = f.select(f.lt(largest, float(meaning.FLAT)), 1.0, largest)
        least, *more = zip(*(x.tolist() for x in meaning.levels(self.form.causal)), strict=True)
        bounds = [f.splat(f.div(largest, number), lanes) for number, _ in more]

        def put(key: Value, mask: Value | None) -> None:
            peak = f.load(self.vector, multipliers, key, mask=mask)
            found = [f.const(self.vector, number) for number in least]
            for bound, numbers in zip(bounds, more, strict=True):
                fits = f.le(peak, bound)
                found = [f.select(fits, n, old) for n, old in zip(numbers, found, strict=True)]
            # peak - peak is NaN for non-finite values and propagates to queries that see the key
            found[1] = found[1] + (peak - peak)
            for number, place in zip(found, (multipliers, log_multipliers), strict=True):
                f.store(number, place, key, mask=mask)

        f.vectors(0, self.total, lanes, put)
        return f.select(f.ge(bits, _NOT_FINITE), float("nan"), f.div(Q_MAX, largest))

    def _quantize(
        self,
        index: Sequence[Value],
        key: Value,
        column: int,
        mean: Value,
        multipliers: Value,
        unit: Value,
    ) -> Value:
        """A vector of a row's quantized values, in i32."""
        f = self.f
        row = self._row("v", index, key)
        distance = f.load(self.vector, row, column, mask=self._mask(column)) - mean
        units = distance * f.splat(f.load(f32, multipliers, key) * unit, self.lanes)
        if self.form.causal:
            units = f.quick_min(f.quick_max(units, -Q_MAX), Q_MAX)
        return f.round_to_int(units)

    def _quantize_groups(
        self,
        index: Sequence[Value],
        column: int,
        mean: Value,
        multipliers: Value,
        unit: Value,
        q: Value,
    ) -> None:
        """Quantize and interleave groups of four keys, padded with zeros."""
        f, total = self.f, self.total
        whole = f.udiv(total, 4)

        def put(number: Value, last: bool) -> None:
            word = f.const(i32.vector(self.lanes), 0)
            for i in range(4):
                key = number * 4 + i
                at = f.min(key, total - 1) if last else key
                part = f.shl(
                    f.and_(self._quantize(index, at, column, mean, multipliers, unit), 0xFF), 8 * i
                )
                if last:
                    part = f.select(f.lt(key, total), part, f.const(part.type, 0))
                word = f.or_(word, part)
            f.store(word, q, number * self.form.width + column)

        with f.loop(0, whole) as loop:
            put(loop.index, False)
        with f.if_(f.lt(whole * 4, total)):
            put(whole, True)
