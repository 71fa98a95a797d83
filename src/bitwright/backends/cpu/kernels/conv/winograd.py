"""Winograd convolution: 3×3 filters with stride 1, channels last.

    y = epilogue(A [Σ_c (G w_c G') · (B d_c B')] A')      m × m results from n × n pixels, n = m+2

Instead of 9 products per result and channel there are n² per m² results: 2.25 (m = 4) or 4 (m = 2).
The term in brackets is one matrix product per position in n × n; its rows are tiles of the image,
its columns channels of the result. G w G' is computed at compile time (`toom_cook`).

A block of tiles passes three stages while its data stays in the caches:

    v[group][position][channel / lanes][tile][lanes]   B d B' of every tile, with zero padding
    sums[group][position][tile][columns]               products with one panel of weights
    y                                                  A … A', then the epilogue pixel by pixel

Threads share (block, panel) pairs. One thread forms each result in a fixed order. The rounding
error is that of a sum of larger terms (`toom_cook`); an infinity or NaN spreads to all results of
its tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed, to_stored
from bitwright.backends.cpu.kernels.conv.toom_cook import linear_map, matrices, transform_filter
from bitwright.backends.cpu.kernels.matmul.epilogue import NO_EPILOGUE, Epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import pack
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import f32 as real
from bitwright.target import Target

Array = np.ndarray[Any, Any]
TAPS = 3
_UNROLL = 2
"""Channels per iteration of the inner loop."""


@dataclass(frozen=True)
class Winograd:
    """The compile-time parameters of the kernel."""

    results: int
    """m: results of a tile in each direction."""
    tile: Tile
    """The register tile: tiles of the image × columns."""
    channels: int
    groups: int
    """The most groups of `tile.rows` tiles in a block."""
    epilogue: Epilogue = NO_EPILOGUE
    element: DType = real
    """The type of x."""

    @property
    def width(self) -> int:
        """n: pixels that a tile reads in each direction."""
        return self.results + TAPS - 1

    @property
    def positions(self) -> int:
        return self.width**2

    @property
    def depth(self) -> int:
        """Channels, padded to whole vectors."""
        return -(-self.channels // self.tile.lanes) * self.tile.lanes

    @property
    def heights(self) -> tuple[int, ...]:
        """The heights of register tiles that are emitted: a group uses the lowest that holds its
        tiles."""
        return (*(height for height in (2, 4, 8, 16) if height < self.tile.rows), self.tile.rows)

    @property
    def signature(self) -> Signature:
        geometry = ("images", "ih", "iw", "oh", "ow", "top", "left", "columns")
        strides = ("x_image", "x_line", "x_pixel", "y_stride")
        return Signature(
            ("x", "w", "y", *self.epilogue.pointers), (*geometry, *strides, *self.epilogue.sizes)
        )


def tile_for(target: Target, columns: int) -> Tile:
    """The register tile with as many sums as fit besides the panel, and the least padding of
    columns.

    Rows have constant strides, so that their addresses take no registers.
    """
    sums = 24 if target.vector_registers >= 32 else 12 if target.has_fma else 8
    lanes = target.lanes(32)
    widths = (3, 4, 2, 1) if sums == 24 else (2, 1)
    tiles = [Tile(sums // vectors, vectors, lanes) for vectors in widths]
    return min(tiles, key=lambda tile: -(-columns // tile.columns) * tile.columns)


def scratch_bytes(results: int, tile: Tile, channels: int) -> int:
    """Bytes of a thread's stack per group of tiles."""
    one = Winograd(results, tile, channels, 1)
    return one.positions * tile.rows * (one.depth + tile.columns) * 4


def pack_filter(weight: Array, results: int, tile: Tile) -> Array:
    """Packs w[out, in, 3, 3] as [out / columns][position][in, padded][columns]."""
    u = transform_filter(weight, results)
    channels, columns = u.shape[2:]
    depth = -(-channels // tile.lanes) * tile.lanes
    padded = np.zeros((u.shape[0] ** 2, depth, columns), np.float32)
    padded[:, :channels] = u.reshape(len(padded), channels, columns)
    return pack(padded.reshape(len(padded) * depth, columns), tile)


def emit_winograd(module: Module, name: str, form: Winograd) -> Signature:
    with module.kernel(name, form.signature) as f, f.subnormals_as_zeros():
        Emitter(f, form).emit()
    return form.signature


class Emitter:
    """Emits the kernel; `kernels.conv.winograd_int8` derives the integer kernel from it."""

    operand, total = f32, f32
    """The types of operands and sums."""

    def __init__(self, f: Kernel, form: Winograd) -> None:
        self.f, self.form, self.tile = f, form, form.tile
        self.lanes = form.tile.lanes
        self.vector = self.total.vector(self.lanes)
        self.align = self.vector.total_bytes
        group = form.positions * form.tile.rows
        self.v = f.scratch(self.operand, form.groups * group * form.depth)
        self.sums = f.scratch(self.total, form.groups * group * form.tile.columns)
        self.results = f.scratch(self.total, form.results**2 * self.lanes)
        self.columns = f.args.size("columns")
        self.prepare()

    def prepare(self) -> None:
        """Prepares the transforms and the scratch of the first stage."""
        f, form = self.f, self.form
        maps = matrices(form.results, TAPS)
        self.data, self.back = linear_map(maps.data), linear_map(maps.back)
        self.element = storage_type(form.element)
        self.patch = f.scratch(self.element, form.positions * self.lanes)
        self.zeros = f.scratch(f32, self.lanes)
        f.store(f.const(self.vector, 0.0), self.zeros, align=self.align)

    def emit(self) -> None:
        f, form, tile = self.f, self.form, self.tile
        across = f.udiv(f.args.size("ow") + (form.results - 1), form.results)
        down = f.udiv(f.args.size("oh") + (form.results - 1), form.results)
        self.across, self.per_image = across, across * down
        total = self.per_image * f.args.size("images")
        panels = f.udiv(self.columns + (tile.columns - 1), tile.columns)
        wanted = f.max(f.udiv(f.threads + (panels - 1), f.max(panels, 1)), 1)
        fair = f.max(f.udiv(total + (wanted - 1), wanted), 1)
        size = f.min(fair, form.groups * tile.rows)
        blocks = f.udiv(total + (size - 1), size)
        begin, end = f.share(blocks * panels)
        nothing = f.const(begin.type, -1)
        with f.loop(begin, end, carry=(nothing,)) as pairs:
            block = f.udiv(pairs.index, panels)
            panel = pairs.index - block * panels
            first = block * size
            count = f.min(size, total - first)
            with f.if_(f.ne(block, pairs.carried[0])), f.loop(0, count) as tiles:
                self._transform_tile(tiles.index, *self._position(first + tiles.index))
            self._multiply(panel, count)
            with f.loop(0, count) as tiles:
                self._finish_tile(tiles.index, panel, *self._position(first + tiles.index))
            pairs.next(block)

    def _position(self, number: Value) -> tuple[Value, Value, Value]:
        """The image, line and column of a tile's first result."""
        f, results = self.f, self.form.results
        image = f.udiv(number, self.per_image)
        inside = number - image * self.per_image
        line = f.udiv(inside, self.across)
        return image, line * results, (inside - line * self.across) * results

    def _rank(self, number: Value) -> tuple[Value, Value]:
        """A tile's group and its index in the group."""
        group = self.f.udiv(number, self.tile.rows)
        return group, number - group * self.tile.rows

    # first stage: data transform

    def _transform_tile(self, number: Value, image: Value, line: Value, column: Value) -> None:
        f, form, width = self.f, self.form, self.form.width
        top, left = line - f.args.size("top"), column - f.args.size("left")
        by_line, by_pixel = f.args.size("x_line"), f.args.size("x_pixel")
        start = image * f.args.size("x_image") + top * by_line + left * by_pixel
        fits = f.and_(
            f.and_(f.ge(top, 0), f.le(top + width, f.args.size("ih"))),
            f.and_(f.ge(left, 0), f.le(left + width, f.args.size("iw"))),
        )
        group, rank = self._rank(number)
        group_size = form.positions * form.depth * self.tile.rows
        to = f.gep(f32, self.v, group * group_size + rank * self.lanes)
        with f.loop(0, form.depth // self.lanes, nonempty=True) as blocks:
            channel = blocks.index * self.lanes
            mask = None
            if form.channels % self.lanes:
                mask = f.mask(form.channels - channel, self.lanes)
            x = f.gep(self.element, f.args.pointer("x"), start + channel)
            carry = (x, by_line, by_pixel)
            with f.if_(fits, carry=carry) as branch:
                branch.next(*carry)
            with branch.else_():
                self._copy_patch(top, left, start + channel, mask)
                branch.next(self.patch, f.index(width * self.lanes), f.index(self.lanes))
            source, line_stride, pixel_stride = branch.results
            target = f.gep(f32, to, channel * self.tile.rows)
            self._transform(source, line_stride, pixel_stride, mask, target)

    def _copy_patch(self, top: Value, left: Value, start: Value, mask: Value | None) -> None:
        """Copies the input of a tile at the edge of the image, padded with zeros."""
        f, width = self.f, self.form.width
        by_line, by_pixel = f.args.size("x_line"), f.args.size("x_pixel")
        columns = [
            f.ult(left + column, f.args.size("iw")) for column in range(width)
        ]  # an unsigned comparison also excludes negative columns
        with f.loop(0, width, nonempty=True) as lines:
            inside = f.ult(top + lines.index, f.args.size("ih"))
            at = start + lines.index * by_line
            for column in range(width):
                there = f.gep(self.element, f.args.pointer("x"), at + by_pixel * column)
                source = f.select(f.and_(inside, columns[column]), there, self.zeros)
                value = f.load(self.element.vector(self.lanes), source, mask=mask)
                place = (lines.index * width + column) * self.lanes
                f.store(value, self.patch, place, align=value.type.total_bytes)

    def _transform(
        self, x: Value, by_line: Value, by_pixel: Value, mask: Value | None, to: Value
    ) -> None:
        """Stores B d B' of one vector of channels, by position."""
        f, width = self.f, self.form.width
        lines = [f.gep(self.element, x, by_line * line) for line in range(width)]
        element = self.form.element
        halfway = [
            self.data.apply(
                f,
                [
                    load_computed(f, element, self.lanes, line, by_pixel * column, mask=mask)
                    for line in lines
                ],
            )
            for column in range(width)
        ]
        stride = self.form.depth * self.tile.rows
        for line in range(width):
            row = self.data.apply(f, [column[line] for column in halfway])
            for column, value in enumerate(row):
                f.store(value, to, (line * width + column) * stride, align=self.align)

    # second stage: products

    def _multiply(self, panel: Value, count: Value) -> None:
        f, form, tile = self.f, self.form, self.tile
        groups = f.udiv(count + (tile.rows - 1), tile.rows)
        with f.loop(0, form.positions, nonempty=True) as positions:
            number = panel * form.positions + positions.index
            w = f.gep(self.operand, f.args.pointer("w"), number * (form.depth * tile.columns))
            with f.loop(0, groups) as loop:
                place = loop.index * form.positions + positions.index
                v = f.gep(self.operand, self.v, place * (form.depth * tile.rows))
                sums = f.gep(self.total, self.sums, place * (tile.rows * tile.columns))
                left = f.min(count - loop.index * tile.rows, tile.rows)
                self._choose(list(form.heights), left, v, w, sums)

    def _choose(self, heights: list[int], left: Value, v: Value, w: Value, sums: Value) -> None:
        """Multiplies by the lowest height that holds the tiles; rows beyond them are not read."""
        f = self.f
        if len(heights) == 1:
            self._product(heights[0], v, w, sums)
            return
        with f.if_(f.gt(left, heights[-2])) as branch:
            self._product(heights[-1], v, w, sums)
        with branch.else_():
            self._choose(heights[:-1], left, v, w, sums)

    def _product(self, height: int, v: Value, w: Value, sums: Value) -> None:
        f, form, tile = self.f, self.form, self.tile
        zeros = [f.const(self.vector, 0.0)] * (height * tile.vectors)
        with f.loop(0, form.depth // self.lanes, carry=(w, *zeros), nonempty=True) as blocks:
            block = f.gep(f32, v, blocks.index * (tile.rows * self.lanes))
            with f.loop(0, self.lanes, _UNROLL, carry=blocks.carried, nonempty=True) as loop:
                w, *totals = loop.carried
                for step in range(_UNROLL):
                    self._add_products(height, f.gep(f32, block, loop.index + step), w, totals)
                    w = f.gep(f32, w, tile.columns)
                loop.next(w, *totals)
            blocks.next(*loop.results)
        for number, total in enumerate(blocks.results[1:]):
            f.store(total, sums, number * self.lanes, align=self.align)

    def _add_products(self, height: int, data: Value, w: Value, totals: list[Value]) -> None:
        """Adds the products of one channel of every tile, broadcast, and the vectors of the
        panel."""
        f, tile = self.f, self.tile
        panel = [f.load(self.vector, w, v * self.lanes) for v in range(tile.vectors)]
        for row in range(height):
            lhs = f.splat(f.load(f32, data, row * self.lanes), self.lanes)
            for v, part in enumerate(panel):
                at = row * tile.vectors + v
                totals[at] = f.fma(lhs, part, totals[at])

    # third stage: result transform

    def _finish_tile(
        self, number: Value, panel: Value, image: Value, line: Value, column: Value
    ) -> None:
        f, form, tile = self.f, self.form, self.tile
        group, rank = self._rank(number)
        group_size = form.positions * tile.rows * tile.columns
        sums = f.gep(self.total, self.sums, group * group_size + rank * tile.columns)
        high = f.min(f.args.size("oh") - line, form.results)
        wide = f.min(f.args.size("ow") - column, form.results)
        row = (image * f.args.size("oh") + line) * f.args.size("ow") + column
        first = panel * tile.columns
        vectors = f.udiv(f.min(self.columns - first, tile.columns) + (self.lanes - 1), self.lanes)
        with f.loop(0, vectors) as loop:
            at = loop.index * self.lanes
            self._transform_results(f.gep(self.total, sums, at))
            self._store(row, first + at, high, wide)

    def _transform_results(self, sums: Value) -> None:
        """Stores A … A' of one vector of columns to the scratch of results."""
        f, form, width = self.f, self.form, self.form.width
        stride = self.tile.rows * self.tile.columns
        halfway = [
            self.back.apply(
                f,
                [
                    f.load(self.vector, sums, (line * width + column) * stride, align=self.align)
                    for line in range(width)
                ],
            )
            for column in range(width)
        ]
        for line in range(form.results):
            row = self.back.apply(f, [column[line] for column in halfway])
            for column, value in enumerate(row):
                place = (line * form.results + column) * self.lanes
                f.store(self.scaled(value), self.results, place, align=self.align)

    def scaled(self, value: Value) -> Value:
        """A result of the last transform, with its scale removed."""
        return value

    def mask(self, column: Value) -> Value | None:
        """The mask of the existing columns from `column` on; None for all."""
        return self.f.mask(self.columns - column, self.lanes)

    def _store(self, row: Value, column: Value, high: Value, wide: Value) -> None:
        """Applies the epilogue to the existing pixels and stores them."""
        f, form = self.f, self.form
        mask = self.mask(column)
        with f.loop(0, high) as lines, f.loop(0, wide) as pixels:
            place = (lines.index * form.results + pixels.index) * self.lanes
            value = f.load(self.vector, self.results, place, align=self.align)
            at = row + lines.index * f.args.size("ow") + pixels.index
            value = self.form.epilogue.emit(f, value, at, column, mask)
            result = form.epilogue.result
            y = f.gep(
                storage_type(result), f.args.pointer("y"), at * f.args.size("y_stride") + column
            )
            f.store(to_stored(f, value, result), y, mask=mask)
