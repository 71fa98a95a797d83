"""Depthwise channels-last convolution of 8-bit values by a dot product instruction.

    y[n, i, j, c] = epilogue(offset[c] + Σ_(u, v) x'[n, i·sy + u·dy − top, j·sx + v·dx − left, c] w)

The instruction sums four bytes of one lane: here four lines of the image at one pixel of a channel.
A tile is a few lines times a few pixels of the result. For every input column it loads the input
lines, interleaves them in groups of four (`a[c], b[c], c[c], d[c]` for every channel), and adds
their products to all results that use the column. A filter of three lines thus computes two lines
of the result, with a weight of 0 for the line that each does not use.

    w         [channels / lanes][dots][lanes][4]     dots: every result line, column, group of four
    pad       the value of every channel outside the image
    offset    the initial sums: bias and zero points (`kernels.matmul.lower_int8.Offsets`)

Threads share tiles, or vectors of channels where there are few tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import i8, storage_type
from bitwright.backends.cpu.codegen.expression import to_stored
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot4
from bitwright.backends.cpu.kernels.matmul.epilogue import Epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import FEW_TILES
from bitwright.ir.dim import Size
from bitwright.target import Target

Array = np.ndarray[Any, Any]
_SIZES = (
    "images", "ih", "iw", "oh", "ow", "channels", "top", "left",
    "x_image", "x_line", "x_pixel", "y_image", "y_line", "y_pixel",
)  # fmt: skip
GROUP = 4
_LINE = 64
"""Bytes of a cache line."""
_MOST_STEPS = 400
"""The most dot products and shuffles of a tile, which are unrolled."""
_ABOUT = 1.03
"""The accuracy of instruction counts: costs within this ratio are equal."""
_EPILOGUE = 8
"""Instructions of a common epilogue."""


@dataclass(frozen=True)
class Int8DepthwiseForm:
    """The filter's size, strides and dilations, and the tile."""

    height: int
    width: int
    strides: tuple[int, int]
    dilations: tuple[int, int]
    lines: int
    """Lines of a tile."""
    pixels: int
    """Pixels of each line of a tile."""
    is_even: bool
    """Whether every line consists of whole tiles."""
    is_ragged: bool
    """Whether the last vector of channels is incomplete."""

    @property
    def rows(self) -> list[int]:
        """The input lines of a tile, relative to its first."""
        return _needed(self.lines, self.strides[0], self.height, self.dilations[0])

    @property
    def columns(self) -> list[int]:
        return _needed(self.pixels, self.strides[1], self.width, self.dilations[1])

    @property
    def groups(self) -> int:
        return -(-len(self.rows) // GROUP)

    @property
    def dots(self) -> dict[tuple[int, int, int], int]:
        """The index in the weights of (line of the result, filter column, group of lines)."""
        at = {row: place for place, row in enumerate(self.rows)}
        found: dict[tuple[int, int, int], int] = {}
        for line in range(self.lines):
            for column in range(self.width):
                for tap in range(self.height):
                    row = line * self.strides[0] + tap * self.dilations[0]
                    found.setdefault((line, column, at[row] // GROUP), len(found))
        return found

    def pack(self, taps: Array, lanes: int) -> Array:
        """Packs taps[channels, height, width]."""
        channels = len(taps)
        at = {row: place for place, row in enumerate(self.rows)}
        vectors = -(-channels // lanes)
        packed = np.zeros((vectors * lanes, len(self.dots), GROUP), np.int8)
        for (line, column, group), dot in self.dots.items():
            for tap in range(self.height):
                place = at[line * self.strides[0] + tap * self.dilations[0]]
                if place // GROUP == group:
                    packed[:channels, dot, place % GROUP] = taps[:, tap, column]
        cut = packed.reshape(vectors, lanes, len(self.dots), GROUP)
        return np.ascontiguousarray(cut.transpose(0, 2, 1, 3))


def _needed(results: int, stride: int, taps: int, dilation: int) -> list[int]:
    return sorted({r * stride + t * dilation for r in range(results) for t in range(taps)})


@cache
def _steps(
    taps: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
    lines: int,
    pixels: int,
) -> int:
    """Instructions of a tile for one vector of channels."""
    form = Int8DepthwiseForm(*taps, strides, dilations, lines, pixels, True, False)
    per_column = len(form.rows) + form.groups
    return len(form.columns) * per_column + len(form.dots) * form.pixels


def best_form(
    target: Target,
    taps: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
    result: tuple[Size, Size],
    is_ragged: bool,
) -> Int8DepthwiseForm | None:
    """The tile with about the fewest instructions per result; None where all tiles are too long.

    Ties go to the shortest code, which layers of different sizes then often share.
    """
    if taps[1] * -(-taps[0] // GROUP) > _MOST_STEPS:  # more than any tile may have
        return None
    most = 18 if target.vector_registers >= 32 else 8
    found: list[tuple[float, int, Int8DepthwiseForm]] = []
    for lines in range(1, 9):
        for pixels in range(1, most // lines + 1):
            is_even = isinstance(result[1], int) and result[1] % pixels == 0
            form = Int8DepthwiseForm(*taps, strides, dilations, lines, pixels, is_even, is_ragged)
            steps = _steps(taps, strides, dilations, lines, pixels)
            cost = steps / (lines * pixels) + _EPILOGUE
            for size, part in zip(result, (lines, pixels), strict=True):
                if isinstance(size, int) and size > 0:
                    cost *= -(-size // part) * part / size
            if steps <= _MOST_STEPS:
                found.append((cost, steps, form))
    least = min((cost for cost, _, _ in found), default=0.0)
    good = [(steps, form) for cost, steps, form in found if cost <= _ABOUT * least]
    return min(good, key=itemgetter(0))[1] if good else None


@dataclass(frozen=True)
class Int8Depthwise:
    form: Int8DepthwiseForm
    dot: Int8Dot4
    epilogue: Epilogue

    @property
    def signature(self) -> Signature:
        return Signature(
            ("x", "w", "y", "pad", *self.dot.pointers, *self.epilogue.pointers),
            (*_SIZES, *self.epilogue.sizes),
        )


def emit_int8_depthwise(module: Module, name: str, conv: Int8Depthwise) -> Signature:
    with module.kernel(name, conv.signature) as f, f.subnormals_as_zeros():
        _Emitter(f, conv).emit()
    return conv.signature


@dataclass(frozen=True)
class _Tile:
    """The position of a tile."""

    line: Value
    """The first line of the result; `pixel` is the first pixel of the line."""
    pixel: Value
    y: Value
    """The address of its first result."""
    number: Value
    """The index of its first pixel among all results."""


class _Emitter:
    def __init__(self, f: Kernel, conv: Int8Depthwise) -> None:
        self.f, self.form, self.dot, self.epilogue = f, conv.form, conv.dot, conv.epilogue
        self.lanes = f.target.lanes(32)
        self.vector = conv.dot.sum_type.vector(self.lanes)
        self.result = storage_type(conv.epilogue.result)
        self.size = {name: f.args.size(name) for name in _SIZES}
        self.rows, self.columns, self.dots = self.form.rows, self.form.columns, self.form.dots
        self.sums = f.scratch(self.vector, self.form.lines * self.form.pixels)
        # interleaves the bytes of the lines a, b, c, d: a0 b0 c0 d0 a1 …
        self.order = [self.lanes * (i % GROUP) + i // GROUP for i in range(GROUP * self.lanes)]

    def emit(self) -> None:
        f, size, form = self.f, self.size, self.form
        tiles = f.udiv(size["ow"] + (form.pixels - 1), form.pixels)
        bands = f.udiv(size["oh"] + (form.lines - 1), form.lines)
        count = size["images"] * bands * tiles
        is_wide = f.ge(count, f.threads * FEW_TILES)
        blocks = f.udiv(size["channels"] + (self.lanes - 1), self.lanes)
        begin, end = self._share(count, is_wide)
        # whole cache lines of the result, to avoid false sharing
        unit = max(1, _LINE // (self.lanes * self.result.bytes))
        first, last = self._share(f.udiv(blocks + (unit - 1), unit), f.not_(is_wide))
        part = f.min(first * unit, blocks), f.min(last * unit, blocks)
        with f.loop(begin, end) as loop:
            band = f.udiv(loop.index, tiles)
            image = f.udiv(band, bands)
            line = (band - image * bands) * form.lines
            pixel = (loop.index - band * tiles) * form.pixels
            self._tile(image, line, pixel, part, blocks)

    def _share(self, count: Value, is_shared: Value) -> tuple[Value, Value]:
        """The thread's range, or the whole range."""
        begin, end = self.f.share(count)
        return self.f.select(is_shared, begin, 0), self.f.select(is_shared, end, count)

    def _tile(
        self, image: Value, line: Value, pixel: Value, part: tuple[Value, Value], blocks: Value
    ) -> None:
        f, size, form = self.f, self.size, self.form
        top = line * form.strides[0] - size["top"]
        left = pixel * form.strides[1] - size["left"]
        x = f.gep(i8, f.args.pointer("x"), image * size["x_image"])
        offset = image * size["y_image"] + line * size["y_line"] + pixel * size["y_pixel"]
        y = f.gep(self.result, f.args.pointer("y"), offset)
        number = (image * size["oh"] + line) * size["ow"] + pixel
        tile = _Tile(line, pixel, y, number)
        low, high = part
        whole = f.udiv(size["channels"], self.lanes) if form.is_ragged else blocks
        inside = f.and_(f.ge(top, 0), f.le(top + (self.rows[-1] + 1), size["ih"]))
        across = f.and_(f.ge(left, 0), f.le(left + (self.columns[-1] + 1), size["iw"]))
        with f.if_(f.and_(inside, across)) as branch:
            corner = f.gep(i8, x, top * size["x_line"] + left * size["x_pixel"])
            starts = [f.gep(i8, corner, size["x_line"] * row) for row in self.rows]
            places = [[f.gep(i8, s, size["x_pixel"] * c) for c in self.columns] for s in starts]
            with f.loop(low, f.min(high, whole)) as loop:
                self._vector(tile, places, loop.index, None, True)
        with branch.else_():
            places = self._clamped(x, top, left)
            with f.loop(low, f.min(high, whole)) as loop:
                self._vector(tile, places, loop.index, None, False)
        if form.is_ragged:
            with f.if_(f.and_(f.eq(high, blocks), f.lt(low, high))):
                mask = f.mask(size["channels"] - whole * self.lanes, self.lanes)
                self._vector(tile, self._clamped(x, top, left), whole, mask, False)

    def _clamped(self, x: Value, top: Value, left: Value) -> list[list[Value]]:
        """The addresses of the input pixels; those outside the image are the address of `pad`."""
        f, size = self.f, self.size
        pad = f.args.pointer("pad")
        lines = [(f.ult(top + r, size["ih"]), (top + r) * size["x_line"]) for r in self.rows]
        pixels = [(f.ult(left + c, size["iw"]), (left + c) * size["x_pixel"]) for c in self.columns]
        return [
            [f.select(f.and_(a, b), f.gep(i8, x, down + right), pad) for b, right in pixels]
            for a, down in lines
        ]

    def _vector(
        self,
        tile: _Tile,
        places: Sequence[Sequence[Value]],
        block: Value,
        mask: Value | None,
        is_inner: bool,
    ) -> None:
        """Computes a tile for one vector of channels."""
        f, form, dot_product = self.f, self.form, self.dot
        channel = block * self.lanes
        unit = i8.vector(GROUP * self.lanes)
        w = f.gep(i8, f.args.pointer("w"), block * (len(self.dots) * unit.lanes))
        weights = [f.load(unit, w, dot * unit.lanes, align=1) for dot in range(len(self.dots))]
        (start,) = dot_product.initial_sums(f, channel, [mask], self.lanes)
        sums = {(r, p): start for r in range(form.lines) for p in range(form.pixels)}
        for number, column in enumerate(self.columns):
            taps = [
                (pixel, tap)
                for pixel in range(form.pixels)
                for tap in range(form.width)
                if pixel * form.strides[1] + tap * form.dilations[1] == column
            ]
            for group in range(form.groups):
                quads = self._interleave(
                    [line[number] for line in places[group * GROUP : (group + 1) * GROUP]],
                    channel,
                    mask,
                )
                for pixel, tap in taps:
                    for line in range(form.lines):
                        dot = self.dots.get((line, tap, group))
                        if dot is not None:
                            total = sums[line, pixel]
                            sums[line, pixel] = dot_product.multiply_add(
                                f, quads, weights[dot], total
                            )
        self._finish(tile, sums, channel, mask, is_inner)

    def _interleave(self, places: Sequence[Value], channel: Value, mask: Value | None) -> Value:
        """The values of up to four lines at one pixel, interleaved by channel."""
        f, byte = self.f, i8.vector(self.lanes)
        loaded = [f.load(byte, place, channel, mask=mask, align=1) for place in places]
        loaded += [f.const(byte, 0)] * (GROUP - len(loaded))
        quads = f.shuffle(f.join(*loaded), self.order)
        return f.xor(quads, 0x80) if self.dot.shift else quads

    def _finish(
        self,
        tile: _Tile,
        sums: dict[tuple[int, int], Value],
        channel: Value,
        mask: Value | None,
        is_inner: bool,
    ) -> None:
        """Applies the epilogue and stores the existing pixels."""
        f, form, size = self.f, self.form, self.size
        lines = f.min(size["oh"] - tile.line, form.lines)
        pixels = f.min(size["ow"] - tile.pixel, form.pixels)

        def store(total: Value, line: Operand, pixel: Operand) -> None:
            row = tile.number + f.mul(size["ow"], line) + pixel
            value = self.epilogue.emit(f, total, row, channel, mask)
            at = f.mul(size["y_line"], line) + f.mul(size["y_pixel"], pixel) + channel
            f.store(to_stored(f, value, self.epilogue.result), tile.y, at, mask=mask)

        if self.epilogue.is_light and mask is None and (is_inner or form.is_even):
            for line in range(form.lines):
                row = [(sums[line, p], p) for p in range(form.pixels)]
                if line == 0 or is_inner:
                    for total, pixel in row:
                        store(total, line, pixel)
                    continue
                with f.if_(f.gt(lines, line)):
                    for total, pixel in row:
                        store(total, line, pixel)
            return
        align = self.vector.total_bytes
        for (line, pixel), total in sums.items():
            f.store(total, self.sums, (line * form.pixels + pixel) * self.lanes, align=align)
        with f.loop(0, lines, nonempty=True) as down, f.loop(0, pixels, nonempty=True) as across:
            at = (down.index * form.pixels + across.index) * self.lanes
            total = f.load(self.vector, self.sums, at, align=align)
            store(total, down.index, across.index)
