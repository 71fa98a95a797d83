"""Packs filters that are known at run time into the layouts of constant ones.

    plain      [out / columns][height][width][in][columns]  (`kernels.matmul.matmul.pack`)
    Winograd   [out / columns][position][in, padded][columns], G w G' (`kernels.conv.winograd`)

The filter w[out, in, height, width] has any strides: those of a transposed and flipped filter give
the convolution that computes an input gradient. Lanes are output channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32, i64
from bitwright.backends.cpu.kernels.conv.toom_cook import linear_map, matrices
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile

_STRIDES = ("w.out", "w.in", "w.line", "w.column")


@dataclass(frozen=True)
class PackFilter:
    """The compile-time parameters of the kernels."""

    tile: Tile
    is_close: bool
    """Whether output channels are contiguous."""
    results: int = 0
    """Results of a Winograd tile in each direction; 0 for a plain filter."""

    @property
    def signature(self) -> Signature:
        sizes = ("depth",) if self.results else ("height", "width")
        return Signature(("w", "y"), ("columns", "channels", *sizes, *_STRIDES))


def emit_pack_filter(module: Module, name: str, form: PackFilter) -> Signature:
    """Emits the kernel; threads share the rows of the panels."""
    with module.kernel(name, form.signature) as f:
        pack = _Pack(f, form)
        if form.results:
            pack.emit_winograd()
        else:
            pack.emit_plain()
    return form.signature


class _Pack:
    def __init__(self, f: Kernel, form: PackFilter) -> None:
        self.f, self.form, self.tile = f, form, form.tile
        self.columns, self.channels = f.args.size("columns"), f.args.size("channels")
        self.panels = f.udiv(self.columns + (self.tile.columns - 1), self.tile.columns)

    def _load(self, place: Value, panel: Value, vector: int) -> Value:
        """A vector of output channels at `place`; zeros beyond the last."""
        f, lanes = self.f, self.tile.lanes
        first = panel * self.tile.columns + vector * lanes
        mask = f.mask(self.columns - first, lanes)
        w, type_ = f.args.pointer("w"), f32.vector(lanes)
        if self.form.is_close:
            return f.load(type_, w, place + first, mask=mask)
        step = f.args.size("w.out")
        indices = f.mul(f.iota(i64, lanes), f.splat(step, lanes))
        return f.gather(type_, f.gep(f32, w, place + first * step), indices, mask=mask)

    def emit_plain(self) -> None:
        f, tile = self.f, self.tile
        height, width = f.args.size("height"), f.args.size("width")
        taps = height * width
        begin, end = f.share(self.panels * taps)
        with f.loop(begin, end) as rows:
            panel = f.udiv(rows.index, taps)
            tap = rows.index - panel * taps
            line = f.udiv(tap, width)
            place = line * f.args.size("w.line")
            place = place + (tap - line * width) * f.args.size("w.column")
            with f.loop(0, self.channels) as loop:
                at = place + loop.index * f.args.size("w.in")
                to = (rows.index * self.channels + loop.index) * tile.columns
                for v in range(tile.vectors):
                    f.store(self._load(at, panel, v), f.args.pointer("y"), to + v * tile.lanes)

    def emit_winograd(self) -> None:
        f, tile, depth = self.f, self.tile, self.f.args.size("depth")
        taps = 3
        maps = linear_map(matrices(self.form.results, taps).filter)
        width = self.form.results + taps - 1
        begin, end = f.share(self.panels * depth)
        with f.loop(begin, end) as rows:
            panel = f.udiv(rows.index, depth)
            channel = rows.index - panel * depth
            inside = f.lt(channel, self.channels)
            at = f.select(inside, channel, 0) * f.args.size("w.in")
            for v in range(tile.vectors):
                lines = []
                for line in range(taps):
                    down = at + f.args.size("w.line") * line
                    places = [down + f.args.size("w.column") * column for column in range(taps)]
                    lines.append([self._load(place, panel, v) for place in places])
                halfway = [maps.apply(f, list(column)) for column in zip(*lines, strict=True)]
                for line in range(width):
                    row = maps.apply(f, [column[line] for column in halfway])
                    for column, value in enumerate(row):
                        position = panel * width**2 + (line * width + column)
                        to = (position * depth + channel) * tile.columns + v * tile.lanes
                        held = f.select(inside, value, f.const(value.type, 0.0))
                        f.store(held, f.args.pointer("y"), to)
