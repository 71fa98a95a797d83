"""Depthwise convolution with channels innermost: every channel has a small filter of its own.

    y[n, i, j, c] = epilogue(Σ_(u, v) x[n, i·sy + u·dy − top, j·sx + v·dx − left, c] · w[u, v, c])

Lanes run along channels. A tile is a few neighbouring pixels of one line of the result: for every
line of the filter that falls inside the image it loads each pixel that any of them needs once, and
adds its products to all their sums, which stay in registers. Tiles that reach over the left or
right edge, or beyond the end of the line, load zeros there and store only what exists.

Threads share out tiles, or vectors of channels where tiles are few. A thread goes through a band of
lines, as many as stay in the second-level cache, once for every vector of channels: line after
line, so that the lines of the image that neighbouring results share are still in the first-level
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import (
    Kernel,
    Module,
    Operand,
    Signature,
    Value,
    f32,
    stored,
)
from bitwright.backends.cpu.codegen.expression import to_stored
from bitwright.backends.cpu.kernels.matmul.matmul import FEW_TILES, NO_EPILOGUE, Epilogue
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import f32 as real
from bitwright.target import Target

_SIZES = (
    "images", "ih", "iw", "oh", "ow", "channels",
    "sy", "top", "left", "band",
    "x_image", "x_line", "x_pixel", "y_image", "y_line", "y_pixel",
)  # fmt: skip


@dataclass(frozen=True)
class DepthwiseForm:
    """What shapes the sums: the filter and how it moves along a line."""

    height: int
    width: int
    stride: int
    """Pixels of the image between neighbours on a line of the result."""
    dilations: tuple[int, int]
    pixels: int
    """Results of a tile."""
    is_even: bool
    """Whether every line is a number of whole tiles."""
    is_ragged: bool
    """Whether the last vector of channels is not full."""


@dataclass(frozen=True)
class Depthwise:
    form: DepthwiseForm
    epilogue: Epilogue = NO_EPILOGUE
    qvalues: DType | None = None
    """The type of x where it is not f32. Halves are widened. Codes and weights minus their zero
    points are f32, in which their products and sums are exact."""
    has_zero: bool = False
    """Whether the codes' zero point is in a slot; else it is 0."""

    @property
    def signature(self) -> Signature:
        zero = ("x_zero",) if self.has_zero else ()
        return Signature(
            ("x", "w", "y", *zero, *self.epilogue.pointers), (*_SIZES, *self.epilogue.sizes)
        )


MOST_TAPS = 32
"""Taps of a line of the filter that are written out; longer lines are a loop over as many."""
EXACT_TAPS = 2**24 // 255**2
"""Taps of a filter whose sums of 8-bit products are exact in f32."""


def pixels_of_tile(target: Target, line: Any) -> int:
    """As many as keep the multipliers busy; for a line of known length, those that fill it well.

    Of several the odd ones: lines of a network are halved again and again, and those still fill it
    then.
    """
    choices = (8, 7, 6) if target.vector_registers >= 32 else (6, 5, 4)
    if not isinstance(line, int):
        return choices[0]
    return min(choices, key=lambda pixels: (-(-line // pixels) * pixels, pixels % 2 == 0))


def emit_depthwise(module: Module, name: str, conv: Depthwise) -> Signature:
    with module.kernel(name, conv.signature) as f, f.subnormals_as_zeros():
        _Emitter(f, conv).emit()
    return conv.signature


def _needed(form: DepthwiseForm, taps: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Pixels that a tile needs, counted from its first: (place, [(result, tap), …])."""
    needed: dict[int, list[tuple[int, int]]] = {}
    for pixel in range(form.pixels):
        for tap in range(taps):
            place = pixel * form.stride + tap * form.dilations[1]
            needed.setdefault(place, []).append((pixel, tap))
    return sorted(needed.items())


class _Emitter:
    def __init__(self, f: Kernel, conv: Depthwise) -> None:
        self.f, self.form, self.epilogue, self.qvalues = f, conv.form, conv.epilogue, conv.qvalues
        form = conv.form
        self.element = stored(conv.qvalues or real)
        self.result = stored(conv.epilogue.result)
        self.lanes = f.target.lanes(32)
        self.vector = f32.vector(self.lanes)
        self.size = size = {name: f.args.size(name) for name in _SIZES}
        self.sums = f.scratch(self.vector, form.pixels)
        self.zeros = f.module.table(f, f32, np.zeros(self.lanes))
        self.has_zero = conv.has_zero
        if conv.qvalues and conv.has_zero:
            code = f.load(self.element, f.args.pointer("x_zero"))
            self.zero = f.splat(f.convert(code, f32, conv.qvalues.is_signed), self.lanes)
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
                    self._line(*loop.carried, channel, mask, (start, stop), inner)
                    below = loop.carried[1] + 1
                    is_last = f.eq(below, size["oh"])
                    over = f.select(is_last, loop.carried[0] + 1, loop.carried[0])
                    loop.next(over, f.select(is_last, 0, below))

            with f.loop(low, f.min(high, whole)) as block:
                band(block.index * self.lanes, None)
            if form.is_ragged:
                with f.if_(f.eq(high, blocks)):
                    rest = whole * self.lanes
                    band(rest, f.mask(size["channels"] - rest, self.lanes))

    def _share(self, count: Value, is_shared: Value) -> tuple[Value, Value]:
        """The thread's part, or all of it."""
        begin, end = self.f.share(count)
        return self.f.select(is_shared, begin, 0), self.f.select(is_shared, end, count)

    def _inner_tiles(self) -> tuple[Value, Value]:
        """The tiles of a line that are whole and whose taps all fall inside the image."""
        f, size, form = self.f, self.size, self.form
        start = f.udiv(size["left"] + (form.stride - 1), form.stride)
        reach = size["iw"] + size["left"] - form.dilations[1] * (form.width - 1)
        stop = f.min(f.udiv(f.max(reach + (form.stride - 1), 0), form.stride), size["ow"])
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
        """The thread's tiles of one line of the result, for one vector of channels."""
        f, size, form = self.f, self.size, self.form
        step = form.dilations[0]
        top = row * size["sy"] - size["top"]
        # the filter's lines that fall inside the image
        low = f.udiv(f.max(step - 1 - top, 0), step)
        high = f.min(f.udiv(f.max(size["ih"] - top + (step - 1), 0), step), form.height)
        x = image * size["x_image"] + channel + (top + low * step) * size["x_line"]
        w = f.gep(f32, f.args.pointer("w"), channel + low * form.width * size["channels"])
        y = image * size["y_image"] + row * size["y_line"] + channel
        first = (image * size["oh"] + row) * size["ow"]
        with f.loop(*tiles) as loop:
            column = loop.index * form.pixels
            left = column * form.stride - size["left"]
            place = _Place(x, left, w, high - low, first + column, channel, mask)
            target = f.gep(self.result, f.args.pointer("y"), y + column * size["y_pixel"])
            if mask is not None:  # few tiles have one: a single kind serves them
                self._edge(place, target, column)
            else:
                is_inner = f.and_(f.ge(loop.index, inner[0]), f.lt(loop.index, inner[1]))
                with f.if_(is_inner) as branch:
                    self._inner(place, target)
                with branch.else_():
                    self._edge(place, target, column)

    def _inner(self, place: _Place, target: Value) -> None:
        f, size = self.f, self.size
        corner = f.gep(self.element, f.args.pointer("x"), place.x + place.left * size["x_pixel"])

        def load(line: Value, number: int, ahead: Value | None) -> Value:
            if ahead is not None:
                line = line + ahead * size["x_pixel"]
            return self._pixel(f.gep(self.element, corner, line + self.steps[number]), None)

        self._finish(place, target, self._sums(place, load), f.index(self.form.pixels), True)

    def _edge(self, place: _Place, target: Value, column: Value) -> None:
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
        """A vector of the image's channels as real numbers."""
        f = self.f
        value = f.load(self.element.vector(self.lanes), address, mask=mask)
        if self.qvalues is None:
            return value
        real = f.convert(value, f32, self.qvalues.is_signed)
        return real - self.zero if self.has_zero else real

    def _sums(self, place: _Place, load: Any) -> list[Value]:
        """The sums of a tile; `load(line, number, ahead)` gives a needed pixel: `line` is how far a
        line of the image lies behind the first, `ahead` how many pixels lie before the taps."""
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
        self, place: _Place, load: Any, line: Value, w: Value, sums: list[Value]
    ) -> list[Value]:
        """The sums with the products of a line whose taps are not all written out."""
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
        place: _Place,
        sums: list[Value],
        w: Value,
        pixel_of: Callable[[int], Value],
        count: int | None = None,
    ) -> list[Value]:
        """The sums with the products of `count` neighbouring taps, or all that are written out."""
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
        self, place: _Place, target: Value, sums: list[Value], count: Value, is_whole: bool
    ) -> None:
        """The epilogue and the store of the first `count` pixels."""
        f, align, step = self.f, self.vector.total_bytes, self.size["y_pixel"]

        def finished(total: Value, pixel: Operand) -> Value:
            if self.qvalues and not self.qvalues.is_float:
                total = f.round_to_int(total)
            row = place.row + pixel
            value = self.epilogue.emit(f, total, row, place.channel, place.mask)
            return to_stored(f, value, self.epilogue.result)

        if is_whole and self.epilogue.is_light:
            # all epilogues before the first store, so that what they share is loaded once
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
class _Place:
    """Where a tile stands."""

    x: Value
    """Where the image's first needed line begins, in elements of x."""
    left: Value
    """The column of the image that its first pixel begins at; negative left of the edge."""
    w: Value
    """The first needed line of the filter."""
    lines: Value
    """How many lines of the filter fall inside the image."""
    row: Value
    """The number of its first pixel among all results."""
    channel: Value
    mask: Value | None
