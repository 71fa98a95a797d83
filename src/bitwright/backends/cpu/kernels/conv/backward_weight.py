"""Weight gradients of channels-last convolutions.

    dw[m, c, tap] = Σ over images n and windows o of dy[n, o, m] · x[n, o·stride + tap − pad, c]

A tile of sums has `rows` channels of x, one broadcast each, and vectors of channels of dy (for a
depthwise convolution, vectors of channels of both). It stays in registers while the windows of a
block of images pass; windows that read padding at this tap are left out of the loops, so that no
padded image is needed. Blocks are added up in memory, and so are `splits` of the images:

    partial[split][panel][tap][tile][rows][columns]

The last tile of channels starts earlier, so that it is whole. Threads share (split, panel, tap,
tile). The number of splits depends on sizes alone, and `emit_sum_partials` adds them up in order,
so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32, storage_type
from bitwright.backends.cpu.codegen.emit.types import i16, i64
from bitwright.backends.cpu.codegen.expression import load_computed, to_stored
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.ir.dtype import DType
from bitwright.target import Target

_AXES = ("y", "x")
_GEOMETRY = tuple(
    f"{what}{axis}" for axis in _AXES for what in ("in", "out", "pad", "stride", "dilation", "taps")
)
_PLACES = ("images", "splits", "split", "block", "channels", "columns")
_STRIDES = tuple(f"{x}_{axis}" for x in ("x", "dy") for axis in ("image", "line", "pixel"))


@dataclass(frozen=True)
class BackwardWeight:
    """The compile-time parameters of the kernels."""

    tile: Tile
    element: DType
    is_depthwise: bool
    is_ragged: bool
    """Whether the last panel has fewer columns than the others."""

    @property
    def signature(self) -> Signature:
        return Signature(("x", "dy", "y"), (*_PLACES, *_GEOMETRY, *_STRIDES))


@dataclass(frozen=True)
class SumPartials:
    """The compile-time parameters of the kernel that adds up splits."""

    tile: Tile
    element: DType

    @property
    def signature(self) -> Signature:
        strides = ("y.out", "y.in", "y.tap")
        return Signature(("x", "y"), ("splits", "taps", "channels", "columns", *strides))


def tile_for(target: Target, channels: int, columns: int, is_depthwise: bool) -> Tile:
    """The register tile with the fewest estimated cycles for each product."""
    lanes = target.lanes(32)
    if is_depthwise:
        return Tile(1, min(4, -(-columns // lanes)), lanes)
    most = 24 if target.vector_registers >= 32 else 12 if target.has_fma else 8
    best, least = Tile(1, 1, lanes), float("inf")
    for vectors in range(1, 5):
        panels = -(-columns // (vectors * lanes))
        for wanted in range(1, most // vectors + 1):
            tiles = -(-channels // wanted)
            rows = -(-channels // tiles)
            cycles = max(rows * vectors, (rows + vectors) * _LOAD, _LATENCY) + _PER_PIXEL
            cost = panels * tiles * cycles
            if cost < least:
                best, least = Tile(rows, vectors, lanes), cost
    return best


_LOAD, _LATENCY, _PER_PIXEL = 0.55, 4, 2
"""Cycles of a load, of a dependent multiply-add, and of the loop over pixels, for multiply-adds of
one cycle."""


def emit_backward_weight(module: Module, name: str, form: BackwardWeight) -> Signature:
    with module.kernel(name, form.signature) as f, f.subnormals_as_zeros():
        _Emitter(f, form).emit()
    return form.signature


class _Emitter:
    def __init__(self, f: Kernel, form: BackwardWeight) -> None:
        self.f, self.form, self.tile = f, form, form.tile
        self.size = {name: f.args.size(name) for name in (*_PLACES, *_GEOMETRY, *_STRIDES)}
        self.vector = f32.vector(self.tile.lanes)
        self.stored = storage_type(form.element)

    def emit(self) -> None:
        f, size, tile = self.f, self.size, self.tile
        panels = f.udiv(size["columns"] + (tile.columns - 1), tile.columns)
        rows = f.index(1) if self.form.is_depthwise else size["channels"]
        tiles = f.udiv(rows + (tile.rows - 1), tile.rows)
        taps = size["tapsy"] * size["tapsx"]
        begin, end = f.share(size["splits"] * panels * taps * tiles)
        with f.loop(begin, end) as units:
            outer = f.udiv(units.index, tiles)
            channel = f.min((units.index - outer * tiles) * tile.rows, rows - tile.rows)
            panel = f.udiv(outer, taps)
            tap = outer - panel * taps
            split = f.udiv(panel, panels)
            column = (panel - split * panels) * tile.columns
            to = f.gep(f32, f.args.pointer("y"), units.index * (tile.rows * tile.columns))
            zeros = [f.const(self.vector, 0.0)] * (tile.rows * tile.vectors)
            self._store(to, zeros)
            first = split * size["split"]
            last = f.min(first + size["split"], size["images"])
            with f.loop(first, last, size["block"]) as blocks:
                stop = f.min(blocks.index + size["block"], last)
                sums = self._sum_block(blocks.index, stop, tap, channel, column)
                held = [f.load(self.vector, to, i * tile.lanes) for i in range(len(sums))]
                self._store(to, [a + b for a, b in zip(held, sums, strict=True)])

    def _store(self, to: Value, sums: list[Value]) -> None:
        for number, total in enumerate(sums):
            self.f.store(total, to, number * self.tile.lanes)

    def _sum_block(
        self, first: Value, stop: Value, tap: Value, channel: Value, column: Value
    ) -> list[Value]:
        """The sums over the windows of images first … stop - 1."""
        f, size, tile = self.f, self.size, self.tile
        line = f.udiv(tap, size["tapsx"])
        top, bottom, down = self._range("y", line)
        left, right, along = self._range("x", tap - line * size["tapsx"])
        start = channel if not self.form.is_depthwise else column
        x = f.gep(self.stored, f.args.pointer("x"), start)
        x = f.gep(self.stored, x, down * size["x_line"] + along * size["x_pixel"])
        dy = f.gep(self.stored, f.args.pointer("dy"), column)
        load = self._loads(column)
        zeros = [f.const(self.vector, 0.0)] * (tile.rows * tile.vectors)
        with f.loop(first, stop, carry=zeros) as images:
            x_image = f.gep(self.stored, x, images.index * size["x_image"])
            dy_image = f.gep(self.stored, dy, images.index * size["dy_image"])
            with f.loop(top, bottom, carry=images.carried) as lines:
                at = lines.index * size["stridey"] * size["x_line"]
                at = at + left * size["stridex"] * size["x_pixel"]
                to = lines.index * size["dy_line"] + left * size["dy_pixel"]
                carry = (
                    f.gep(self.stored, x_image, at),
                    f.gep(self.stored, dy_image, to),
                    *lines.carried,
                )
                with f.loop(left, right, carry=carry) as pixels:
                    here, there, *sums = pixels.carried
                    load(here, there, sums)
                    after = f.gep(self.stored, here, size["stridex"] * size["x_pixel"])
                    pixels.next(after, f.gep(self.stored, there, size["dy_pixel"]), *sums)
                lines.next(*pixels.results[2:])
            images.next(*lines.results)
        return list(images.results)

    def _range(self, axis: str, tap: Value) -> tuple[Value, Value, Value]:
        """The first and last window that read the image at this tap, and the offset of the tap."""
        f, size = self.f, self.size
        stride = size[f"stride{axis}"]
        offset = tap * size[f"dilation{axis}"] - size[f"pad{axis}"]
        first = f.udiv(f.max(f.sub(0, offset), 0) + (stride - 1), stride)
        room = size[f"in{axis}"] - offset
        count = f.udiv(f.max(room, 0) + (stride - 1), stride)
        return first, f.min(count, size[f"out{axis}"]), offset

    def _loads(self, column: Value) -> Callable[[Value, Value, list[Value]], None]:
        """A function that adds the products of one pixel of x and dy to the sums."""
        f, form, tile = self.f, self.form, self.tile
        lanes, element = tile.lanes, form.element
        masks: list[Value | None] = [None] * tile.vectors
        if form.is_ragged:
            masks = [
                f.mask(self.size["columns"] - column - v * lanes, lanes)
                for v in range(tile.vectors)
            ]

        def add(x: Value, dy: Value, sums: list[Value]) -> None:
            rhs = [
                load_computed(f, element, lanes, dy, v * lanes, mask=mask)
                for v, mask in enumerate(masks)
            ]
            for row in range(tile.rows):
                for v in range(tile.vectors):
                    if form.is_depthwise:
                        lhs = load_computed(f, element, lanes, x, v * lanes, mask=masks[v])
                    elif v == 0:
                        lhs = f.splat(load_computed(f, element, 1, x, row), lanes)
                    at = row * tile.vectors + v
                    sums[at] = f.fma(lhs, rhs[v], sums[at])

        return add


def emit_sum_partials(module: Module, name: str, form: SumPartials) -> Signature:
    """Emits dw[m, c, tap] = Σ partial[split]; threads share (panel, tap, channel)."""
    tile = form.tile
    with module.kernel(name, form.signature) as f:
        taps, channels, columns = (f.args.size(n) for n in ("taps", "channels", "columns"))
        panels = f.udiv(columns + (tile.columns - 1), tile.columns)
        padded = f.udiv(channels + (tile.rows - 1), tile.rows) * tile.rows
        last = padded - tile.rows
        one_split = panels * taps * padded * tile.columns
        begin, end = f.share(panels * taps * channels)
        with f.loop(begin, end) as rows:
            outer = f.udiv(rows.index, channels)
            channel = rows.index - outer * channels
            panel = f.udiv(outer, taps)
            shift = f.select(f.ge(channel, last), padded - channels, 0)
            row = outer * padded + channel + shift
            source = f.gep(f32, f.args.pointer("x"), row * tile.columns)
            first = panel * tile.columns
            place = (outer - panel * taps) * f.args.size("y.tap") + channel * f.args.size("y.in")
            for v in range(tile.vectors):
                zero = f.const(f32.vector(tile.lanes), 0.0)
                with f.loop(0, f.args.size("splits"), carry=(zero,)) as loop:
                    at = loop.index * one_split + v * tile.lanes
                    loop.next(loop.carried[0] + f.load(zero.type, source, at))
                _scatter(f, form, loop.results[0], place, first + v * tile.lanes)
    return form.signature


def _scatter(f: Kernel, form: SumPartials, value: Value, place: Value, column: Value) -> None:
    """Writes a vector of columns, which are `y.out` apart."""
    lanes, step = form.tile.lanes, f.args.size("y.out")
    y = f.gep(storage_type(form.element), f.args.pointer("y"), place + column * step)
    mask = f.mask(f.args.size("columns") - column, lanes)
    indices = f.mul(f.iota(i64, lanes), f.splat(step, lanes))
    held = to_stored(f, value, form.element)
    if held.type.bits == 16:  # LLVM would ignore the mask for half types
        held = f.bitcast(held, held.type.of(i16))
    f.scatter(held, y, indices, mask=mask)
