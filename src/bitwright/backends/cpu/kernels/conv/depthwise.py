"""Depthwise channels-last convolution: one small filter per channel.

    y[n, i, j, c] = epilogue(Σ_(u, v) x[n, i·sy + u·dy − top, j·sx + v·dx − left, c] · w[u, v, c])

Lanes are channels. A tile is a few neighbouring pixels of one line of the result. For every filter
line inside the image, a tile loads each input pixel once and adds its products to all sums that use
it; the sums stay in registers. Tiles that cross the left or right edge or the end of the line load
zeros there and store only existing pixels.

Threads share tiles, or vectors of channels where there are few tiles. A thread processes a band of
lines that fits the L2 cache once per vector of channels, line by line, so that the input lines that
neighbouring results share are still in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import f32, storage_type
from bitwright.backends.cpu.codegen.expression import to_stored
from bitwright.backends.cpu.kernels.matmul.epilogue import NO_EPILOGUE, Epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import FEW_TILES
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import f32 as real
from bitwright.target import Target

_SIZES = (
    "images", "ih", "iw", "oh", "ow", "channels",
    "sy", "top", "left", "band",
    "x_image", "x_line", "x_pixel", "y_image", "y_line", "y_pixel",
)  # fmt: skip


LoadPixel = Callable[[Value, int, Value | None], Value]


@dataclass(frozen=True)
class DepthwiseForm:
    """The filter's size, stride and dilation, and the tile."""

    height: int
    width: int
    stride: int
    """The horizontal stride."""
    dilations: tuple[int, int]
    pixels: int
    """Pixels of a tile."""
    is_even: bool
    """Whether every line consists of whole tiles."""
    is_ragged: bool
    """Whether the last vector of channels is incomplete."""


@dataclass(frozen=True)
class Depthwise:
    form: DepthwiseForm
    epilogue: Epilogue = NO_EPILOGUE
    element: DType | None = None
    """The type of x where it is not f32. Half floats are converted to f32. Integers and weights are
    converted to f32 minus their zero points; their products and sums are exact."""
    has_zero: bool = False
    """Whether the zero point of x is in a slot; otherwise it is 0."""

    @property
    def signature(self) -> Signature:
        zero = ("x_zero",) if self.has_zero else ()
        return Signature(
            ("x", "w", "y", *zero, *self.epilogue.pointers), (*_SIZES, *self.epilogue.sizes)
        )


MOST_TAPS = 32
"""Unrolled taps of a filter line; longer lines are a loop over as many."""
EXACT_TAPS = 2**24 // 255**2
"""The most taps for which sums of 8-bit products are exact in f32."""


def tile_pixels(target: Target, line: Size) -> list[int]:
    """Numbers of pixels of a tile that hide latency, the static choice first.

    For a line of known length that is the one with least padding. Ties go to odd numbers, which
    still divide the lines of later layers at half the resolution.
    """
    choices = (8, 7, 6) if target.vector_registers >= 32 else (6, 5, 4)
    if not isinstance(line, int):
        return list(choices)
    return sorted(choices, key=lambda pixels: (-(-line // pixels) * pixels, pixels % 2 == 0))


def emit_depthwise(module: Module, name: str, conv: Depthwise) -> Signature:
    with module.kernel(name, conv.signature) as f, f.subnormals_as_zeros():
        _Emitter(f, conv).emit()
    return conv.signature


def _needed(form: DepthwiseForm, taps: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """The input pixels of a tile, relative to its first: (place, [(result, tap), …])."""
    needed: dict[int, list[tuple[int, int]]] = {}
    for pixel in range(form.pixels):
        for tap in range(taps):
            place = pixel * form.stride + tap * form.dilations[1]
            needed.setdefault(place, []).append((pixel, tap))
    return sorted(needed.items())


class _Emitter:
    def __init__(self, f: Kernel, conv: Depthwise) -> None:
        self.f, self.form, self.epilogue, self.x_type = f, conv.form, conv.epilogue, conv.element
        form = conv.form
        self.element = storage_type(conv.element or real)
        self.result = storage_type(conv.epilogue.result)
        self.lanes = f.target.lanes(32)
        self.vector = f32.vector(self.lanes)
        self.size = size = {name: f.args.size(name) for name in _SIZES}
        self.sums = f.scratch(self.vector, form.pixels)
        self.zeros = f.module.table(f, f32, np.zeros(self.lanes))
        self.has_zero = conv.has_zero
        if conv.element and conv.has_zero:
            zero = f.load(self.element, f.args.pointer("x_zero"))
            self.zero = f.splat(f.convert(zero, f32, conv.element.is_signed), self.lanes)
        self.line_step = f.mul(size["x_line"], form.dilations[0])
        self.needed = _needed(form, min(form.width, MOST_TAPS))
        self.steps = [f.mul(size["x_pixel"], place) for place, _ in self.needed]
        self.taps = [f.mul(size["channels"], tap) for tap in range(min(form.width, MOST_TAPS))]

    def emit(self) -> None:
        f, size, form = self.f, self.size, self.form
        tiles = f.udiv(size["ow"] + (form.pixels - 1), form.pixels)
        count = size["images"] * size["oh"] * tiles
        is_wide = f.ge(count, f.threads * FEW_TILES)
        begin, end = self._share(count, is_wide)
        first = f.udiv(begin, f.max(tiles, 1))
        last = f.udiv(end + (tiles - 1), f.max(tiles, 1))
        inner = self._inner_tiles()
        blocks = f.udiv(size["channels"] + (self.lanes - 1), self.lanes)
        low, high = self._share(blocks, f.not_(is_wide))
        whole = f.udiv(size["channels"], self.lanes) if form.is_ragged else blocks
        with f.loop(first, f.select(f.lt(begin, end), last, first), size["band"]) as bands:
            image = f.udiv(bands.index, size["oh"])
            row = bands.index - image * size["oh"]
            bottom = f.min(bands.index + size["band"], last)

            def band(channel: Value, mask: Value | None) -> None:
                with f.loop(bands.index, bottom, carry=(image, row), nonempty=True) as loop:
                    start = f.max(begin - loop.index * tiles, 0)
                    stop = f.min(end - loop.index * tiles, tiles)
                    here, line = loop.carried
                    self._line(here, line, channel, mask, (start, stop), inner)
                    below = line + 1
                    is_last = f.eq(below, size["oh"])
                    loop.next(f.select(is_last, here + 1, here), f.select(is_last, 0, below))

            with f.loop(low, f.min(high, whole)) as block:
                band(block.index * self.lanes, None)
            if form.is_ragged:
                with f.if_(f.eq(high, blocks)):
                    rest = whole * self.lanes
                    band(rest, f.mask(size["channels"] - rest, self.lanes))

    def _share(self, count: Value, is_shared: Value) -> tuple[Value, Value]:
        """The thread's range, or the whole range."""
        begin, end = self.f.share(count)
        return self.f.select(is_shared, begin, 0), self.f.select(is_shared, end, count)

    def _inner_tiles(self) -> tuple[Value, Value]:
        """The range of full tiles of a line whose taps are all inside the image."""
        f, size, form = self.f, self.size, self.form
        start = f.udiv(size["left"] + (form.stride - 1), form.stride)
        extent = size["iw"] + size["left"] - form.dilations[1] * (form.width - 1)
        stop = f.min(f.udiv(f.max(extent + (form.stride - 1), 0), form.stride), size["ow"])
        return f.udiv(start + (form.pixels - 1), form.pixels), f.udiv(stop, form.pixels)

    def _line(
        self,
        image: Value,
        row: Value,
        channel: Value,
        mask: Value | None,
        tiles: tuple[Value, Value],
        inner: tuple[Value, Value],
    ) -> None:
        """Computes the thread's tiles of one line of the result for one vector of channels."""
        f, size, form = self.f, self.size, self.form
        step = form.dilations[0]
        top = row * size["sy"] - size["top"]
        # the filter lines inside the image
        low = f.udiv(f.max(step - 1 - top, 0), step)
        high = f.min(f.udiv(f.max(size["ih"] - top + (step - 1), 0), step), form.height)
        x = image * size["x_image"] + channel + (top + low * step) * size["x_line"]
        w = f.gep(f32, f.args.pointer("w"), channel + low * form.width * size["channels"])
        y = image * size["y_image"] + row * size["y_line"] + channel
        first = (image * size["oh"] + row) * size["ow"]
        with f.loop(*tiles) as loop:
            column = loop.index * form.pixels
            left = column * form.stride - size["left"]
            place = _Origin(x, left, w, high - low, first + column, channel, mask)
            target = f.gep(self.result, f.args.pointer("y"), y + column * size["y_pixel"])
            if mask is not None:  # few tiles are masked: one path computes all of them
                self._edge(place, target, column)
            else:
                is_inner = f.and_(f.ge(loop.index, inner[0]), f.lt(loop.index, inner[1]))
                with f.if_(is_inner) as branch:
                    self._inner(place, target)
                with branch.else_():
                    self._edge(place, target, column)

    def _inner(self, place: _Origin, target: Value) -> None:
        f, size = self.f, self.size
        corner = f.gep(self.element, f.args.pointer("x"), place.x + place.left * size["x_pixel"])

        def load(line: Value, number: int, ahead: Value | None) -> Value:
            if ahead is not None:
                line = line + ahead * size["x_pixel"]
            return self._pixel(f.gep(self.element, corner, line + self.steps[number]), None)

        self._finish(place, target, self._sums(place, load), f.index(self.form.pixels), True)

    def _edge(self, place: _Origin, target: Value, column: Value) -> None:
        f, size, form = self.f, self.size, self.form
        corner = place.x + place.left * size["x_pixel"]
        inside = [f.ult(place.left + at, size["iw"]) for at, _ in self.needed]
        offsets = [corner + step for step in self.steps]

        def load(line: Value, number: int, ahead: Value | None) -> Value:
            is_inside = inside[number]
            if ahead is not None:
                line = line + ahead * size["x_pixel"]
                at = place.left + self.needed[number][0] + ahead
                is_inside = f.ult(at, size["iw"])
            here = f.gep(self.element, f.args.pointer("x"), line + offsets[number])
            value = self._pixel(f.select(is_inside, here, self.zeros), place.mask)
            return f.select(is_inside, value, 0.0) if self.has_zero else value

        left = f.min(size["ow"] - column, form.pixels)
        self._finish(place, target, self._sums(place, load), left, form.is_even)

    def _pixel(self, address: Value, mask: Value | None) -> Value:
        """A vector of channels of one pixel, in f32."""
        f = self.f
        value = f.load(self.element.vector(self.lanes), address, mask=mask)
        if self.x_type is None:
            return value
        wide = f.convert(value, f32, self.x_type.is_signed)
        return wide - self.zero if self.has_zero else wide

    def _sums(self, place: _Origin, load: LoadPixel) -> list[Value]:
        """The sums of a tile; `load(line, number, ahead)` returns an input pixel, where `line` is
        the offset of its line and `ahead` the number of pixels in front of the first tap."""
        f, form = self.f, self.form
        start = [f.const(self.vector, 0.0)] * form.pixels
        with f.loop(0, place.lines, carry=(f.index(0), place.w, *start)) as loop:
            line, w, *sums = loop.carried
            if form.width > MOST_TAPS:
                sums = self._long_line(place, load, line, w, sums)
            else:
                sums = self._add(place, sums, w, lambda number: load(line, number, None))
            w = f.gep(f32, w, f.mul(self.size["channels"], form.width))
            loop.next(line + self.line_step, w, *sums)
        return list(loop.results[2:])

    def _long_line(
        self, place: _Origin, load: LoadPixel, line: Value, w: Value, sums: list[Value]
    ) -> list[Value]:
        """Adds the products of a filter line that is not unrolled as a whole."""
        f, form, channels = self.f, self.form, self.size["channels"]
        whole, rest = divmod(form.width, MOST_TAPS)

        def add(first: Value, some: list[Value], count: int) -> list[Value]:
            ahead = first * form.dilations[1]
            weights = f.gep(f32, w, first * channels)
            return self._add(place, some, weights, lambda n: load(line, n, ahead), count)

        with f.loop(0, whole * MOST_TAPS, MOST_TAPS, carry=sums) as loop:
            loop.next(*add(loop.index, list(loop.carried), MOST_TAPS))
        found = list(loop.results)
        return add(f.index(whole * MOST_TAPS), found, rest) if rest else found

    def _add(
        self,
        place: _Origin,
        sums: list[Value],
        w: Value,
        pixel_of: Callable[[int], Value],
        count: int | None = None,
    ) -> list[Value]:
        """Adds the products of `count` neighbouring taps, or of all unrolled taps."""
        f, found = self.f, list(sums)
        taps = [f.load(self.vector, w, at, mask=place.mask) for at in self.taps[:count]]
        for number, (_, uses) in enumerate(self.needed):
            uses = [(pixel, tap) for pixel, tap in uses if count is None or tap < count]
            if not uses:
                continue
            value = pixel_of(number)
            for pixel, tap in uses:
                found[pixel] = f.fma(value, taps[tap], found[pixel])
        return found

    def _finish(
        self, place: _Origin, target: Value, sums: list[Value], count: Value, is_whole: bool
    ) -> None:
        """Applies the epilogue to the first `count` pixels and stores them."""
        f, align, step = self.f, self.vector.total_bytes, self.size["y_pixel"]

        def finished(total: Value, pixel: Operand) -> Value:
            if self.x_type and not self.x_type.is_float:
                total = f.round_to_int(total)
            row = place.row + pixel
            value = self.epilogue.emit(f, total, row, place.channel, place.mask)
            return to_stored(f, value, self.epilogue.result)

        if is_whole and self.epilogue.is_light:
            # all epilogues before the first store, so that LLVM shares their loads
            values = [finished(total, pixel) for pixel, total in enumerate(sums)]
            for pixel, value in enumerate(values):
                f.store(value, target, f.mul(step, pixel), mask=place.mask)
            return
        for pixel, total in enumerate(sums):
            f.store(total, self.sums, pixel * self.lanes, align=align)
        with f.loop(0, count, nonempty=True) as loop:
            total = f.load(self.vector, self.sums, loop.index * self.lanes, align=align)
            f.store(finished(total, loop.index), target, loop.index * step, mask=place.mask)


@dataclass(frozen=True)
class _Origin:
    """The position of a tile."""

    x: Value
    """The offset of the first input line, in elements of x."""
    left: Value
    """The first input column; negative in the padding."""
    w: Value
    """The address of the first filter line inside the image."""
    lines: Value
    """The number of filter lines inside the image."""
    row: Value
    """The index of its first pixel among all results."""
    channel: Value
    mask: Value | None
