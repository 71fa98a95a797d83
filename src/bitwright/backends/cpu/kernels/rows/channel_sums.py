"""Sums over the pixels of channels-last images, for batch normalization in training.

    channel_moments   mean and mean squared deviation of each channel
    channel_sums      sum(dy) and sum(dy · (x - mean)) of each channel

Lanes run along the channels. The pixels are divided into blocks; threads share (block, vectors of
channels), and a second kernel adds up the blocks in f64, in order. The number of blocks depends on
sizes alone, so results do not depend on the number of threads.

Moments are those of x - s, where s is the channel's first pixel: one pass, and no cancellation
where the mean is large beside the deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f64, storage_type
from bitwright.backends.cpu.codegen.emit.types import Type, computed
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.ir.dtype import DType

MOMENTS, SUMS = "channel_moments", "channel_sums"
CHAINS = 8
"""Independent sums of each kind, which hide the latency of additions."""
TERMS = 2


@dataclass(frozen=True)
class ChannelSums:
    """The compile-time parameters of both kernels."""

    op: str
    element: DType
    centre: DType
    """The element type of the mean that `channel_sums` reads."""
    vectors: int
    """Vectors of channels that are summed together."""
    is_ragged: bool
    """Whether the last vector has fewer channels than lanes."""

    @property
    def type(self) -> Type:
        return computed(self.element)

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("x",) if self.op == MOMENTS else ("dy", "x", "mean")

    @property
    def signature(self) -> Signature:
        return Signature((*self.inputs, "y"), ("rows", "channels", "blocks", "block"))

    @property
    def total_signature(self) -> Signature:
        pointers = ("x", "partial", "y0", "y1") if self.op == MOMENTS else ("partial", "y0", "y1")
        return Signature(pointers, ("rows", "channels", "blocks"))


def emit_channel_sums(module: Module, name: str, form: ChannelSums) -> Signature:
    """Emits partial[block][term][channel]."""
    with module.kernel(name, form.signature) as f:
        rows, channels, blocks, block = (
            f.args.size(n) for n in ("rows", "channels", "blocks", "block")
        )
        width = form.vectors * f.target.lanes(form.type.bits)
        chunks = f.udiv(channels + (width - 1), width)
        begin, end = f.share(blocks * chunks)
        with f.loop(begin, end) as units:
            number = f.udiv(units.index, chunks)
            first = number * block
            chunk = _Chunk(f, form, (units.index - number * chunks) * width)
            sums = chunk.sum_rows(first, f.min(first + block, rows))
            chunk.store(sums, f.args.pointer("y"), number * TERMS * channels)
    return form.signature


class _Chunk:
    """Vectors of channels from a column on."""

    def __init__(self, f: Kernel, form: ChannelSums, column: Value) -> None:
        self.f, self.form, self.column = f, form, column
        self.channels = f.args.size("channels")
        self.lanes = f.target.lanes(form.type.bits)
        self.vector = form.type.vector(self.lanes)
        self.masks: list[Value | None] = [None] * form.vectors
        if form.is_ragged:
            left = self.channels - column
            self.masks = [f.mask(left - v * self.lanes, self.lanes) for v in range(form.vectors)]

    def load(self, slot: str, element: DType, place: Value) -> list[Value]:
        """The vectors of an operand behind an offset, in the computed type."""
        f = self.f
        at = f.gep(storage_type(element), f.args.pointer(slot), place + self.column)
        found = [
            load_computed(f, element, self.lanes, at, v * self.lanes, mask=mask)
            for v, mask in enumerate(self.masks)
        ]
        return [f.convert(value, self.vector) for value in found]

    def sum_rows(self, first: Value, stop: Value) -> list[Value]:
        """Both sums of each vector over rows first … stop - 1."""
        f, form = self.f, self.form
        if form.op == MOMENTS:
            centre = self.load("x", form.element, f.index(0))
        else:
            centre = self.load("mean", form.centre, f.index(0))
        count = TERMS * form.vectors
        unroll = max(1, CHAINS // form.vectors)
        zeros = [f.const(self.vector, 0.0)] * count
        whole = first + f.udiv(f.max(stop - first, 0), unroll) * unroll
        with f.loop(first, whole, unroll, carry=zeros * unroll) as loop:
            after: list[Value] = []
            for row in range(unroll):
                sums = loop.carried[row * count : (row + 1) * count]
                after += self._add_row(loop.index + row, centre, sums)
            loop.next(*after)
        parts = [list(loop.results[row * count : (row + 1) * count]) for row in range(unroll)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        with f.loop(whole, f.max(whole, stop), carry=parts[0]) as rest:
            rest.next(*self._add_row(rest.index, centre, rest.carried))
        return list(rest.results)

    def _add_row(self, row: Value, centre: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        f, form = self.f, self.form
        place = row * self.channels
        x = self.load("x", form.element, place)
        distances = [value - middle for value, middle in zip(x, centre, strict=True)]
        terms = distances if form.op == MOMENTS else self.load("dy", form.element, place)
        found: list[Value] = []
        for v, (term, distance) in enumerate(zip(terms, distances, strict=True)):
            found += [sums[TERMS * v] + term, f.fma(term, distance, sums[TERMS * v + 1])]
        return found

    def store(self, sums: Sequence[Value], to: Value, place: Value) -> None:
        for number, total in enumerate(sums):
            v, term = divmod(number, TERMS)
            at = place + term * self.channels + self.column + v * self.lanes
            self.f.store(total, to, at, mask=self.masks[v])


def emit_channel_totals(module: Module, name: str, form: ChannelSums) -> Signature:
    """Emits the results from the sums of blocks."""
    with module.kernel(name, form.total_signature) as f:
        rows, channels, blocks = (f.args.size(n) for n in ("rows", "channels", "blocks"))
        count = f.convert(f.max(rows, 1), f64)
        begin, end = f.share(channels)
        zero = f.const(f64, 0.0)
        with f.loop(begin, end) as loop:
            channel = loop.index
            partial = f.gep(form.type, f.args.pointer("partial"), channel)
            with f.loop(0, blocks, carry=(zero, zero)) as parts:
                at = parts.index * TERMS * channels
                pair = [f.load(form.type, partial, at + term * channels) for term in range(TERMS)]
                sums = zip(parts.carried, pair, strict=True)
                parts.next(*(total + f.convert(part, f64) for total, part in sums))
            first, second = parts.results
            if form.op == MOMENTS:
                with f.if_(f.gt(rows, 0)):
                    x = load_computed(f, form.element, 1, f.args.pointer("x"), channel)
                    mean = f.div(first, count)
                    deviation = f.max(f.div(second, count) - mean * mean, zero)
                    _store(f, form, mean + f.convert(x, f64), "y0", channel)
                    _store(f, form, deviation, "y1", channel)
                with f.if_(f.le(rows, 0)):
                    _store(f, form, zero, "y0", channel)
                    _store(f, form, zero, "y1", channel)
            else:
                _store(f, form, first, "y0", channel)
                _store(f, form, second, "y1", channel)
    return form.total_signature


def _store(f: Kernel, form: ChannelSums, value: Value, slot: str, place: Value) -> None:
    f.store(f.convert(value, form.type), f.args.pointer(slot), place)
