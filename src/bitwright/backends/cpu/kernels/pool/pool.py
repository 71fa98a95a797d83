"""Pooling over windows of 1, 2 or 3 spatial axes: max, mean and p-norm.

    tap k of window o reads position o * stride - begin + k * dilation, if it is in range

Images are channels first, [N * C, spatial], with lanes along the last spatial axis; or channels
last, [N, spatial, C], with lanes along the channels. The window, its strides and dilations are
compiled in; sizes and padding are slots: in{a}, out{a}, begin{a}, end{a} for each spatial axis a,
`images` and `channels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen import math
from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import computed, i32, i64, storage_type
from bitwright.backends.cpu.codegen.expression import from_stored, load_computed, to_stored
from bitwright.backends.cpu.kernels.elementwise.loop_nest import emit_loop_nest, product
from bitwright.ir.dtype import DType

GROUP = 4
"""Vectors of channels per pass over a window."""
MAX_TAPS = 32
"""The most taps of a line that are unrolled."""
MAX_FACTORS = 8
"""The largest power that is computed by products."""


@dataclass(frozen=True)
class Pool:
    """The compile-time parameters."""

    kind: str
    """max, avg, avg_padded (count_include_pad) or lp"""
    element: DType
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    channels_last: bool
    lanes: int
    p: int = 2

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def empty(self) -> float:
        """The identity element of the reduction."""
        if self.kind != "max":
            return 0.0
        return float("-inf") if self.element.is_float else self.element.min

    def start(self, f: Kernel, lanes: int) -> Value:
        return f.const(computed(self.element).vector(lanes), self.empty)

    def add(self, f: Kernel, total: Value, value: Value) -> Value:
        if self.kind == "max":
            return f.max(total, value, self.element.is_signed)
        if self.kind == "lp":
            value = self._power(f, f.abs(value))
        return total + value

    def _power(self, f: Kernel, value: Value) -> Value:
        if self.p > MAX_FACTORS:
            return math.pow_(f, value, f.const(value.type, float(self.p)))
        power = value
        for _ in range(self.p - 1):
            power = power * value
        return power

    def finish(self, f: Kernel, total: Value, counted: Value) -> Value:
        """The result; a mean divides by `counted`, one number or one per lane."""
        if self.kind in ("avg", "avg_padded"):
            return f.div(total, f.convert(f.max(counted, 1), total.type.scalar))
        if self.kind == "lp" and self.p > 1:
            return f.sqrt(total) if self.p == 2 else _root(f, total, self.p)
        return total


def _root(f: Kernel, total: Value, p: int) -> Value:
    return math.pow_(f, total, f.const(total.type, 1.0 / p))


@dataclass(frozen=True)
class WindowTaps:
    """The in-range taps of a window along one axis."""

    start: Value
    first: Value
    stop: Value
    counted: Value
    """The number of taps that a mean divides by."""


class PoolEmitter:
    def __init__(self, f: Kernel, pool: Pool, x: str = "x", y: str = "y") -> None:
        self.f, self.pool, self.type = f, pool, storage_type(pool.element)
        self.sizes = [f.args.size(f"in{a}") for a in range(pool.rank)]
        self.counts = [f.args.size(f"out{a}") for a in range(pool.rank)]
        self.x, self.y = f.args.pointer(x), f.args.pointer(y)

    def taps(self, axis: int, window: Value) -> WindowTaps:
        """The taps of a window, or of one window per lane, in the type of `window`."""
        f, pool = self.f, self.pool
        taps, step = pool.kernel[axis], pool.dilations[axis]

        def slot(name: str) -> Value:
            return f.convert(f.args.size(f"{name}{axis}"), window.type.scalar)

        start = window * pool.strides[axis] - slot("begin")

        def before(limit: Operand) -> Value:
            """The number of taps before a position."""
            distance = f.add(f.sub(limit, start), step - 1)
            return f.max(f.min(f.sdiv(distance, step) if step > 1 else distance, taps), 0)

        first, stop = before(0), before(slot("in"))
        counted = f.sub(stop, first)
        if pool.kind == "avg_padded":
            counted = before(slot("in") + slot("end"))
        return WindowTaps(start, first, stop, counted)

    def loop_over_taps(
        self,
        taps: Sequence[WindowTaps],
        strides: Sequence[Operand],
        offset: Value,
        carry: Sequence[Value],
        accumulate: Callable[[Value, Sequence[Value]], Sequence[Value]],
    ) -> tuple[Value, ...]:
        """Loops over a window's taps with carried totals; `accumulate` takes an offset in x."""
        f = self.f
        if not taps:
            return tuple(accumulate(offset, carry))
        step = self.pool.dilations[self.pool.rank - len(strides)]
        with f.loop(taps[0].first, taps[0].stop, carry=carry) as loop:
            place = (taps[0].start + loop.index * step) * strides[0] + offset
            loop.next(*self.loop_over_taps(taps[1:], strides[1:], place, loop.carried, accumulate))
        return loop.results

    def load(self, lanes: int, place: Value, mask: Value | None = None) -> Value:
        return load_computed(self.f, self.pool.element, lanes, self.x, place, mask=mask)

    def store(self, value: Value, place: Value, mask: Value | None = None) -> None:
        self.f.store(to_stored(self.f, value, self.pool.element), self.y, place, mask=mask)

    # channels last

    def channels_last(self) -> None:
        f = self.f
        channels = f.args.size("channels")
        strides = [product(f, [*self.sizes[a + 1 :], channels]) for a in range(self.pool.rank)]
        image = product(f, [*self.sizes, channels])
        counts = [f.args.size("images"), *self.counts]
        begin, end = f.share(product(f, counts))
        steps: dict[str, list[Operand]] = {
            "x": [image, *[0] * self.pool.rank],
            "y": [product(f, [*self.counts[a:], channels]) for a in range(self.pool.rank + 1)],
        }

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            taps = [self.taps(a, coordinates[1 + a]) for a in range(self.pool.rank)]
            self._over_channels(taps, strides, offsets["x"], offsets["y"], channels)

        emit_loop_nest(f, counts, steps, begin, end, body)

    def _over_channels(
        self,
        taps: Sequence[WindowTaps],
        strides: Sequence[Operand],
        x: Value,
        y: Value,
        channels: Value,
    ) -> None:
        f, pool, lanes = self.f, self.pool, self.pool.lanes
        counted = product(f, [t.counted for t in taps])
        wide = lanes * GROUP
        whole = channels - f.urem(channels, wide)

        def group(channel: Value, count: int, mask: Value | None) -> None:
            def accumulate(offset: Value, totals: Sequence[Value]) -> list[Value]:
                return [
                    pool.add(f, total, self.load(lanes, offset + turn * lanes, mask))
                    for turn, total in enumerate(totals)
                ]

            empty = [pool.start(f, lanes)] * count
            totals = self.loop_over_taps(taps, strides, x + channel, empty, accumulate)
            for turn, total in enumerate(totals):
                value = pool.finish(f, total, counted)
                self.store(value, y + channel + turn * lanes, mask)

        with f.loop(0, whole, wide) as loop:
            group(loop.index, GROUP, None)
        f.vectors(whole, channels, lanes, lambda index, mask: group(index, 1, mask))

    # channels first

    def channels_first(self) -> None:
        f, rank = self.f, self.pool.rank
        strides = [product(f, self.sizes[a + 1 :]) for a in range(rank)]
        counts = [f.args.size("images"), *self.counts[:-1]]
        begin, end = f.share(product(f, counts))
        steps: dict[str, list[Operand]] = {
            "x": [product(f, self.sizes), *[0] * (rank - 1)],
            "y": [product(f, self.counts[a:]) for a in range(rank)],
        }

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            taps = [self.taps(a, coordinates[1 + a]) for a in range(rank - 1)]
            self._row(taps, strides, offsets["x"], offsets["y"])

        emit_loop_nest(f, counts, steps, begin, end, body)

    def _row(
        self, taps: Sequence[WindowTaps], strides: Sequence[Operand], x: Value, y: Value
    ) -> None:
        """Windows along the last axis, one per lane; vectors that cross an edge are masked."""
        f, pool, lanes = self.f, self.pool, self.pool.lanes
        count, stride = self.counts[-1], pool.strides[-1]
        margin = f.args.size(f"begin{pool.rank - 1}")

        def windows(first: Value, is_masked: bool, stored_lanes: Value | None = None) -> None:
            start = first * stride - margin

            def add(offset: Value, total: Value, tap: Operand) -> Value:
                place = start + tap * pool.dilations[-1]
                return pool.add(f, total, self._strided(offset, place, is_masked))

            def accumulate(offset: Value, totals: Sequence[Value]) -> list[Value]:
                total = totals[0]
                if pool.kernel[-1] > MAX_TAPS:
                    with f.loop(*self._taps_in_range(start), carry=(total,)) as taps_of_row:
                        (before,) = taps_of_row.carried
                        taps_of_row.next(add(offset, before, taps_of_row.index))
                    return list(taps_of_row.results)
                for tap in range(pool.kernel[-1]):
                    total = add(offset, total, tap)
                return [total]

            (total,) = self.loop_over_taps(taps, strides, x, [pool.start(f, lanes)], accumulate)
            counted = product(f, [t.counted for t in taps])
            if is_masked and pool.kind in ("avg", "avg_padded"):
                own = self.taps(pool.rank - 1, f.iota(i32, lanes) + f.convert(first, i32))
                total = pool.finish(f, total, own.counted * f.convert(counted, i32))
            else:
                total = pool.finish(f, total, counted * pool.kernel[-1])
            self.store(total, y + first, stored_lanes)

        self.vectors_of_windows(count, windows)

    def vectors_of_windows(self, count: Value, windows: Callable[..., None]) -> None:
        """Calls `windows(first, is_masked, stored_lanes)` for vectors that cover `count` windows.

        A vector is masked if one of its windows crosses an edge.
        """
        f, pool, lanes = self.f, self.pool, self.pool.lanes
        stride, margin = pool.strides[-1], f.args.size(f"begin{pool.rank - 1}")
        extent = (pool.kernel[-1] - 1) * pool.dilations[-1] + 1
        with f.if_(f.lt(count, lanes)) as short:
            windows(f.index(0), True, f.mask(count, lanes))
        with short.else_(), f.loop(0, count, lanes) as loop:
            first = f.min(loop.index, count - lanes)
            start = first * stride - margin
            end = start + ((lanes - 1) * stride + extent)
            inside = f.and_(f.ge(start, 0), f.le(end, self.sizes[-1]))
            with f.if_(inside) as branch:
                windows(first, False)
            with branch.else_():
                windows(first, True)

    def _taps_in_range(self, start: Value) -> tuple[Value, Value]:
        """The range of taps in range for any window of a vector; the first starts at `start`."""
        f, pool = self.f, self.pool
        step = pool.dilations[-1]
        last = start + (pool.lanes - 1) * pool.strides[-1]
        first = f.udiv(f.max(f.sub(step - 1, last), 0), step)
        behind = f.udiv(f.max(self.sizes[-1] - start + (step - 1), 0), step)
        return first, f.min(behind, pool.kernel[-1])

    def _strided(self, row: Value, place: Value, is_masked: bool) -> Value:
        """Every stride-th element of a row from `place` on; reads nothing outside the row."""
        f, pool, lanes = self.f, self.pool, self.pool.lanes
        size, stride = self.sizes[-1], pool.strides[-1]
        empty = pool.empty

        def load(first: Value) -> Value:
            mask = None
            if is_masked:
                mask = f.ult(f.iota(i32, lanes) + f.convert(first, i32), f.convert(size, i32))
            where = f.gep(self.type, self.x, row + first)
            return load_computed(f, pool.element, lanes, where, mask=mask, default=empty)

        if stride == 1 or lanes == 1:
            return load(place)
        if stride == 2:
            first, second = load(place), load(place + (lanes - 1))
            order = [2 * i if 2 * i < lanes else lanes + 2 * i - (lanes - 1) for i in range(lanes)]
            return f.shuffle(first, order, second)
        places = f.add(f.mul(f.iota(i64, lanes), stride), place)
        mask = f.ult(places, size) if is_masked else None
        origin = f.gep(self.type, self.x, row)
        found = f.gather(self.type.vector(lanes), origin, places, mask=mask, default=empty)
        return from_stored(f, found, pool.element)


def emit_pool(module: Module, name: str, pool: Pool) -> Signature:
    names = ["in", "out", "begin", *(["end"] if pool.kind == "avg_padded" else [])]
    slots = [f"{name}{axis}" for name in names for axis in range(pool.rank)]
    channels = ("channels",) if pool.channels_last else ()
    signature = Signature(("x", "y"), ("images", *channels, *slots))
    with module.kernel(name, signature) as f:
        emitter = PoolEmitter(f, pool)
        if pool.channels_last:
            emitter.channels_last()
        else:
            emitter.channels_first()
    return signature
