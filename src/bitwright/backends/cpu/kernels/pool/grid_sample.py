"""Sampling at a grid: y[n, c, p] = sum over taps t of weight[t, p] * x[n, c, place[t, p]].

Lanes run along positions. The taps are computed once for all channels, in f64 as the reference does
(`ops.vision.grid_sample`); elements are gathered.

    slots   x [N, C, *spatial]   grid [N, positions, axes]   y [N, C, positions]
            batch, channels, positions, d0 … (the spatial axes)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as combinations

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import f64, i64, storage_type
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces, product
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, unless_empty
from bitwright.backends.cpu.kernels.pool.resize import tap_weight
from bitwright.ir.dtype import DType

OFFSETS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}
CUBIC = -0.75
"""The parameter a of the cubic convolution kernel (Keys)."""
Tap = tuple[Value, Value]
"""An offset and its weight."""


@dataclass(frozen=True)
class Sampling:
    element: DType
    grid: DType
    axes: int
    mode: str
    padding: str
    align_corners: bool


def emit_grid_sample(module: Module, name: str, kernel: Sampling) -> Signature:
    spatial = tuple(f"d{axis}" for axis in range(kernel.axes))
    sizes = ("batch", "channels", "positions", *spatial, *FAULT_SLOTS)
    signature = Signature(("x", "grid", "y", "fault"), sizes)
    with module.kernel(name, signature) as f:
        _Samples(f, kernel, [f.args.size(size) for size in spatial]).emit()
    return signature


class _Samples:
    def __init__(self, f: Kernel, kernel: Sampling, sizes: Sequence[Value]) -> None:
        self.f, self.kernel, self.sizes = f, kernel, sizes
        self.lanes = f.target.lanes(64)
        self.positions, self.channels = f.args.size("positions"), f.args.size("channels")
        self.plane = product(f, sizes)

    def emit(self) -> None:
        f = self.f
        chunks = pieces(f, self.positions, self.lanes)
        begin, end = f.share(f.args.size("batch") * chunks)

        def body() -> None:
            with f.loop(begin, end) as loop:
                image = f.udiv(loop.index, chunks)
                self._chunk(image, (loop.index - image * chunks) * self.lanes)

        unless_empty(f, self.plane, begin, end, body)

    def _chunk(self, image: Value, first: Value) -> None:
        """Sample a vector of positions of one image in all channels."""
        f, element = self.f, storage_type(self.kernel.element)
        mask = f.mask(self.positions - first, self.lanes, 64)
        taps = self._taps(self._grid(image, first, mask))
        with f.loop(0, self.channels) as channel:
            row = image * self.channels + channel.index
            x = f.gep(element, f.args.pointer("x"), row * self.plane)
            total = f.const(f64.vector(self.lanes), 0.0)
            for place, weight in taps:
                read = f.gather(element.vector(self.lanes), x, place, mask=mask)
                share = f.convert(read, f64) * weight
                # 0 · inf would be NaN
                total = total + f.select(f.eq(weight, 0.0), 0.0, share)
            y = f.gep(element, f.args.pointer("y"), row * self.positions + first)
            f.store(f.convert(total, element), y, mask=mask)

    def _grid(self, image: Value, first: Value, mask: Value) -> list[Value]:
        """The coordinates of the positions, outermost axis first."""
        f, axes = self.f, self.kernel.axes
        type_ = storage_type(self.kernel.grid)
        start = f.gep(type_, f.args.pointer("grid"), (image * self.positions + first) * axes)
        lanes = f.iota(i64, self.lanes) * axes
        return [
            f.convert(f.gather(type_.vector(self.lanes), start, lanes + axis, mask=mask), f64)
            for axis in reversed(range(axes))
        ]

    def _taps(self, coordinates: Sequence[Value]) -> list[Tap]:
        """Plane offsets and weights of all combinations of the axes' taps."""
        per_axis = [self._axis(at, size) for at, size in zip(coordinates, self.sizes, strict=True)]
        found = []
        for taps in combinations(*per_axis):
            place, weight = taps[0]
            for (further, share), size in zip(taps[1:], self.sizes[1:], strict=True):
                place, weight = place * size + further, weight * share
            found.append((place, weight))
        return found

    def _axis(self, at: Value, size: Value) -> list[Tap]:
        f, kernel = self.f, self.kernel
        length = f.convert(size, f64)
        last = length - 1.0
        place = f.div(at + 1.0, 2.0) * (last if kernel.align_corners else length)
        if not kernel.align_corners:
            place = place - 0.5
        if kernel.mode == "nearest":
            place = f.round(place)
        place = self._inside(place, length)
        base = f.floor(place)
        taps = []
        for offset in OFFSETS[kernel.mode]:
            pixel = base + float(offset)
            weight = f.const(place.type, 1.0)
            if kernel.mode != "nearest":
                weight = tap_weight(f, kernel.mode, CUBIC, f.abs(pixel - place))
            pixel = self._inside(pixel, length)
            if kernel.padding == "zeros":
                valid = f.and_(f.ge(pixel, 0.0), f.le(pixel, last))
                weight = f.select(valid, weight, 0.0)
            near = f.quick_min(f.quick_max(pixel, 0.0), last)  # NaN becomes 0
            taps.append((f.convert(near, i64), weight))
        return taps

    def _inside(self, place: Value, length: Value) -> Value:
        """Positions outside the image mapped into it according to the padding mode."""
        f, kernel = self.f, self.kernel
        if kernel.padding == "zeros":
            return place
        shift = 0.0 if kernel.align_corners else 0.5
        low, high = f.const(f64, -shift), length - (1.0 - shift)
        outside = f.or_(f.lt(place, low), f.gt(place, high))
        if kernel.padding == "border":
            return f.select(outside, f.max(f.min(place, length - 1.0), 0.0), place)
        span = high - low
        period = span * 2.0
        beyond = place - low
        beyond = beyond - f.floor(f.div(beyond, period)) * period
        mirrored = low + f.select(f.gt(beyond, span), period - beyond, beyond)
        return f.select(outside, f.select(f.gt(span, 0.0), mirrored, low), place)
