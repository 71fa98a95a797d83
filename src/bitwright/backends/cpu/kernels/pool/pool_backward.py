"""Gradients of pooling, in the layouts of `kernels.pool.pool`.

    places   the pixel of each window's maximum as an i32, counted in its plane; -1 for no pixel
    max      dx[p] = sum of dy over the windows whose place is p
    avg      dx[p] = sum of dy / (pixels of the window) over the windows that contain p

Channels last, and means: a pixel reads the windows around it, and its sum is in registers.
Channels first, maxima: the windows of a plane are added to their places one by one, in order. A
plane or a pixel belongs to one thread, so that the number of threads does not change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import computed, i1, i32, i64, storage_type
from bitwright.backends.cpu.codegen.expression import from_stored, load_computed, to_stored
from bitwright.backends.cpu.kernels.elementwise.loop_nest import emit_loop_nest, product
from bitwright.backends.cpu.kernels.pool.pool import MAX_TAPS, Pool, PoolEmitter, WindowTaps
from bitwright.ir.dtype import DType

GROUP = 4
"""Vectors of channels per pass over the windows around a pixel."""
NONE = -1
"""The place of a window without a pixel."""


def _signature(pool: Pool, *pointers: str) -> Signature:
    names = ["in", "out", "begin", *(["end"] if pool.kind == "avg_padded" else [])]
    slots = [f"{name}{axis}" for name in names for axis in range(pool.rank)]
    channels = ("channels",) if pool.channels_last else ()
    return Signature(pointers, ("images", *channels, *slots))


# places of maxima


def emit_places(module: Module, name: str, pool: Pool) -> Signature:
    """The place of every window's maximum: the first of equal ones, the last NaN."""
    signature = _signature(pool, "x", "y")
    with module.kernel(name, signature) as f:
        emitter = _Places(f, pool)
        if pool.channels_last:
            emitter.channels_last()
        else:
            emitter.channels_first()
    return signature


class _Places(PoolEmitter):
    """`PoolEmitter` whose windows give places instead of maxima."""

    def first_place(self, taps: Sequence[WindowTaps], strides: Sequence[Operand]) -> Value:
        """The place of a window's first pixel on the axes given, NONE if it has none there."""
        f = self.f
        place, is_empty = f.index(0), f.const(i1, 0)
        for axis, (window, stride) in enumerate(zip(taps, strides, strict=False)):
            place = (window.start + window.first * self.pool.dilations[axis]) * stride + place
            is_empty = f.or_(is_empty, f.ge(window.first, window.stop))
        return f.select(is_empty, NONE, place)

    def choose(self, carried: Sequence[Value], value: Value, place: Value) -> tuple[Value, Value]:
        """The maximum so far and its place, after one more pixel."""
        f, (best, at) = self.f, carried
        wins = f.or_(f.gt(value, best), f.is_nan(value))
        return f.select(wins, value, best), f.select(wins, place, at)

    def _over_channels(
        self,
        taps: Sequence[WindowTaps],
        strides: Sequence[Operand],
        x: Value,
        y: Value,
        channels: Value,
    ) -> None:
        f, pool, lanes = self.f, self.pool, self.pool.lanes
        planes = [product(f, self.sizes[axis + 1 :]) for axis in range(pool.rank)]
        first = f.splat(f.convert(self.first_place(taps, planes), i32), lanes)

        def group(channel: Value, mask: Value | None) -> None:
            def accumulate(place: Value, carried: Sequence[Value]) -> tuple[Value, Value]:
                value = self.load(lanes, place * channels + x + channel, mask)
                found = f.splat(f.convert(place, i32), lanes)
                return self.choose(carried, value, found)

            start = pool.start(f, lanes), first
            _, found = self.loop_over_taps(taps, planes, f.index(0), start, accumulate)
            f.store(found, self.y, y + channel, mask=mask)

        f.vectors(0, channels, lanes, group)

    def _row(
        self, taps: Sequence[WindowTaps], strides: Sequence[Operand], x: Value, y: Value
    ) -> None:
        """Places of windows along the last axis, one per lane."""
        f, pool, lanes = self.f, self.pool, self.pool.lanes
        count, stride, step = self.counts[-1], pool.strides[-1], pool.dilations[-1]
        margin = f.args.size(f"begin{pool.rank - 1}")
        steps = f.iota(i32, lanes) * stride
        outer = self.first_place(taps, strides)

        def windows(first: Value, is_masked: bool, stored_lanes: Value | None = None) -> None:
            start = first * stride - margin

            def take(row: Value, carried: Sequence[Value], tap: Operand) -> tuple[Value, Value]:
                place = start + tap * step
                value = self._strided(row + x, place, is_masked)
                found = f.convert(row + place, i32)
                return self.choose(carried, value, f.splat(found, lanes) + steps)

            def accumulate(row: Value, carried: Sequence[Value]) -> Sequence[Value]:
                if pool.kernel[-1] > MAX_TAPS:
                    with f.loop(*self._taps_in_range(start), carry=carried) as loop:
                        loop.next(*take(row, loop.carried, loop.index))
                    return loop.results
                for tap in range(pool.kernel[-1]):
                    carried = take(row, carried, tap)
                return carried

            place = f.splat(f.convert(outer + start, i32), lanes) + steps
            if is_masked:
                own = self.taps(pool.rank - 1, f.iota(i32, lanes) + f.convert(first, i32))
                place = place + own.first * step
                place = f.select(f.lt(own.first, own.stop), place, NONE)
            place = f.select(f.lt(outer, 0), f.const(place.type, NONE), place)
            carry = pool.start(f, lanes), place
            _, found = self.loop_over_taps(taps, strides, f.index(0), carry, accumulate)
            f.store(found, self.y, y + first, mask=stored_lanes)

        self.vectors_of_windows(count, windows)


# sums of channels-last maxima, and of means


class _Around:
    """The windows around a pixel on one axis: first … stop - 1, and those that have it as a tap."""

    def __init__(self, emitter: PoolEmitter, axis: int, pixel: Value) -> None:
        f, pool = emitter.f, emitter.pool
        self.emitter, self.axis = emitter, axis
        stride = pool.strides[axis]
        self.extent = (pool.kernel[axis] - 1) * pool.dilations[axis] + 1
        self.place = pixel + f.convert(f.args.size(f"begin{axis}"), pixel.type.scalar)
        count = f.convert(emitter.counts[axis], pixel.type.scalar)
        before = f.max(f.sub(self.place, self.extent - stride), 0)  # rounded up
        self.first = f.udiv(before, stride) if stride > 1 else before
        last = f.udiv(self.place, stride) if stride > 1 else self.place
        self.stop = f.min(last + 1, count)

    def share(self, window: Value) -> Value:
        """1 / (pixels on this axis) in the type of the sums; 0 if the pixel is no tap."""
        emitter, f = self.emitter, self.emitter.f
        pool = emitter.pool
        counted = emitter.taps(self.axis, window).counted
        scalar = computed(pool.element)
        share = f.div(1.0, f.convert(f.max(counted, 1), scalar))
        if (step := pool.dilations[self.axis]) == 1:
            return share
        distance = self.place - window * pool.strides[self.axis]
        return f.select(f.eq(f.urem(distance, step), 0), share, 0.0)


def emit_sums_channels_last(module: Module, name: str, pool: Pool) -> Signature:
    """Slots as for the pool; `places` for maxima."""
    given = ("dy", "places", "dx") if pool.kind == "max" else ("dy", "dx")
    signature = _signature(pool, *given)
    with module.kernel(name, signature) as f:
        _ChannelsLast(f, pool).emit()
    return signature


class _ChannelsLast(PoolEmitter):
    def __init__(self, f: Kernel, pool: Pool) -> None:
        super().__init__(f, pool, "dy", "dx")
        pairs = zip(pool.kernel, pool.dilations, pool.strides, strict=True)
        self.is_apart = all((taps - 1) * step < stride for taps, step, stride in pairs)
        """Whether a pixel is in one window at most."""

    def emit(self) -> None:
        f, rank = self.f, self.pool.rank
        channels = f.args.size("channels")
        counts = [f.args.size("images"), *self.sizes]
        begin, end = f.share(product(f, counts))
        steps: dict[str, list[Operand]] = {
            "window": [product(f, self.counts), *[0] * rank],
            "place": [0, *[product(f, self.sizes[axis + 1 :]) for axis in range(rank)]],
            "dx": [product(f, [*self.sizes[axis:], channels]) for axis in range(rank + 1)],
        }

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            around = [_Around(self, axis, coordinates[1 + axis]) for axis in range(rank)]
            self._pixel(around, offsets, channels)

        emit_loop_nest(f, counts, steps, begin, end, body)

    def _pixel(
        self, around: Sequence[_Around], offsets: Mapping[str, Value], channels: Value
    ) -> None:
        f, lanes = self.f, self.pool.lanes
        place = f.splat(f.convert(offsets["place"], i32), lanes)
        zero = f.const(computed(self.pool.element).vector(lanes), 0.0)
        dx = offsets["dx"]

        def add(start: Value, share: Value | None, total: Value, mask: Value | None) -> Value:
            """The sum after one more window, whose channels begin at `start`."""
            dy = self.load(lanes, start, mask)
            if share is not None:
                return total + dy * share
            at = f.load(i32.vector(lanes), f.args.pointer("places"), start, mask=mask)
            return total + f.select(f.eq(at, place), dy, 0.0)

        def only_window(
            window: Value, share: Value | None, carried: Sequence[Value]
        ) -> list[Value]:
            def vector(channel: Value, mask: Value | None) -> None:
                total = add(window * channels + channel, share, zero, mask)
                self.store(total, dx + channel, mask)

            f.vectors(0, channels, lanes, vector, unroll=2)
            return [f.const(i1, 1)]

        if self.is_apart:
            (is_written,) = self._windows(
                around, offsets["window"], None, [f.const(i1, 0)], only_window
            )
            with f.if_(f.not_(is_written)):
                f.vectors(0, channels, lanes, lambda at, mask: self.store(zero, dx + at, mask))
            return

        def group(channel: Value, count: int, mask: Value | None) -> None:
            def accumulate(
                window: Value, share: Value | None, totals: Sequence[Value]
            ) -> list[Value]:
                start = window * channels + channel
                return [
                    add(start + turn * lanes, share, total, mask)
                    for turn, total in enumerate(totals)
                ]

            totals = self._windows(around, offsets["window"], None, [zero] * count, accumulate)
            for turn, total in enumerate(totals):
                self.store(total, dx + channel + turn * lanes, mask)

        wide = lanes * GROUP
        whole = channels - f.urem(channels, wide)
        with f.loop(0, whole, wide) as loop:
            group(loop.index, GROUP, None)
        f.vectors(whole, channels, lanes, lambda index, mask: group(index, 1, mask))

    def _windows(
        self,
        around: Sequence[_Around],
        offset: Value,
        share: Value | None,
        carry: Sequence[Value],
        accumulate: Callable[[Value, Value | None, Sequence[Value]], Sequence[Value]],
    ) -> Sequence[Value]:
        """Loops over the windows around a pixel; `offset` counts windows."""
        if not around:
            return accumulate(offset, share, carry)
        f, first = self.f, around[0]
        stride = product(f, self.counts[first.axis + 1 :])
        with f.loop(first.first, first.stop, carry=carry) as loop:
            if self.pool.kind != "max":
                own = first.share(loop.index)
                share = own if share is None else share * own
            inner = loop.index * stride + offset
            loop.next(*self._windows(around[1:], inner, share, loop.carried, accumulate))
        return loop.results


def emit_means_channels_first(module: Module, name: str, pool: Pool) -> Signature:
    """Sums of means with lanes along the last axis of dx; windows of the row are gathered."""
    signature = _signature(pool, "dy", "dx")
    with module.kernel(name, signature) as f:
        _ChannelsFirst(f, pool).emit()
    return signature


class _ChannelsFirst(_ChannelsLast):
    def emit(self) -> None:
        f, rank = self.f, self.pool.rank
        counts = [f.args.size("images"), *self.sizes[:-1]]
        begin, end = f.share(product(f, counts))
        steps: dict[str, list[Operand]] = {
            "window": [product(f, self.counts), *[0] * (rank - 1)],
            "dx": [product(f, self.sizes[axis:]) for axis in range(rank)],
        }

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            around = [_Around(self, axis, coordinates[1 + axis]) for axis in range(rank - 1)]

            def vector(pixel: Value, mask: Value | None) -> None:
                total = self._row_sums(around, pixel, mask, offsets["window"])
                self.store(total, offsets["dx"] + pixel, mask)

            f.vectors(0, self.sizes[-1], self.pool.lanes, vector)

        emit_loop_nest(f, counts, steps, begin, end, body)

    def _row_sums(
        self, around: Sequence[_Around], pixel: Value, mask: Value | None, offset: Value
    ) -> Value:
        """The sums of a vector of pixels: the window columns of every lane, last one first."""
        f, pool, lanes = self.f, self.pool, self.pool.lanes
        own = _Around(self, pool.rank - 1, f.iota(i32, lanes) + f.convert(pixel, i32))
        zero = f.const(computed(pool.element).vector(lanes), 0.0)
        most = -(-own.extent // pool.strides[-1])
        with f.loop(0, f.min(self.counts[-1], most), carry=(zero,)) as loop:
            column = own.stop - (f.convert(loop.index, i32) + 1)
            valid = f.ge(column, own.first)
            valid = valid if mask is None else f.and_(valid, mask)
            share = own.share(column)

            def accumulate(
                window: Value, rows: Value | None, totals: Sequence[Value]
            ) -> list[Value]:
                start = f.gep(self.type, self.x, window)
                found = f.gather(self.type.vector(lanes), start, column, mask=valid)
                dy = from_stored(f, found, pool.element) * share
                return [totals[0] + (dy if rows is None else dy * rows)]

            loop.next(*self._windows(around, offset, None, loop.carried, accumulate))
        return loop.results[0]


# maxima with channels first


def emit_scatter(module: Module, name: str, element: DType, has_sums: bool) -> Signature:
    """Adds dy to the places of each plane; `sums` are of a wider type than dx, if given."""
    signature = Signature(
        ("dy", "places", "dx", *(("sums",) if has_sums else ())), ("planes", "pixels", "windows")
    )
    type_, scalar = storage_type(element), computed(element)
    with module.kernel(name, signature) as f:
        pixels, windows = f.args.size("pixels"), f.args.size("windows")
        lanes = f.target.lanes(scalar.bits)
        begin, end = f.share(f.args.size("planes"))
        zero = f.const(scalar.vector(lanes), 0.0)

        def add(plane: Value) -> None:
            start = plane * pixels
            sums = f.gep(scalar, f.args.pointer("sums" if has_sums else "dx"), start)
            f.vectors(0, pixels, lanes, lambda at, mask: f.store(zero, sums, at, mask=mask))
            with f.loop(0, windows) as loop:
                window = plane * windows + loop.index
                place = f.load(i32, f.args.pointer("places"), window)
                dy = load_computed(f, element, 1, f.args.pointer("dy"), window)
                with f.if_(f.ge(place, 0)):
                    at = f.convert(place, i64)
                    f.store(f.load(scalar, sums, at) + dy, sums, at)
            if has_sums:
                dx = f.gep(type_, f.args.pointer("dx"), start)

                def convert(at: Value, mask: Value | None) -> None:
                    total = f.load(scalar.vector(lanes), sums, at, mask=mask)
                    f.store(to_stored(f, total, element), dx, at, mask=mask)

                f.vectors(0, pixels, lanes, convert)

        with f.loop(begin, end) as loop:
            add(loop.index)
    return signature
