"""Converts an image of few channels to padded pixels of four bytes.

    y[n, top + i, left + j, c] = x[n, c, i, j]      and `fill` in the padding and missing channels

A pixel is then one group of an int8 dot product (`kernels.matmul.dot.int8_dot`). The input is
planar (lines of one channel are contiguous) or has pixels of contiguous channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, i8, i32

WIDTH = 4
_SIZES = ("images", "ih", "iw", "oh", "ow", "top", "left", "x_image", "x_line", "x_channel")


@dataclass(frozen=True)
class Pixels:
    channels: int
    is_planar: bool
    """Whether the lines of a channel are contiguous; otherwise the channels of a pixel are."""

    @property
    def signature(self) -> Signature:
        return Signature(("x", "y", "fill"), _SIZES)


def emit_pixels(module: Module, name: str, pixels: Pixels) -> Signature:
    with module.kernel(name, pixels.signature) as f:
        _Emitter(f, pixels).emit()
    return pixels.signature


class _Emitter:
    def __init__(self, f: Kernel, pixels: Pixels) -> None:
        self.f, self.pixels = f, pixels
        self.lanes = f.target.lanes(32)
        self.size = {name: f.args.size(name) for name in _SIZES}
        self.fill = f.load(i8, f.args.pointer("fill"))
        self.word = f.lane(f.bitcast(f.splat(self.fill, WIDTH), i32.vector(1)), 0)

    def emit(self) -> None:
        """Threads share the lines of the result."""
        f, size = self.f, self.size
        begin, end = f.share(size["images"] * size["oh"])
        with f.loop(begin, end) as loop:
            image = f.udiv(loop.index, size["oh"])
            row = loop.index - image * size["oh"] - size["top"]
            y = f.gep(i32, f.args.pointer("y"), loop.index * size["ow"])
            with f.if_(f.ult(row, size["ih"])) as branch:
                x = f.gep(i8, f.args.pointer("x"), image * size["x_image"] + row * size["x_line"])
                right = size["left"] + size["iw"]
                self._pad(y, f.index(0), size["left"])
                self._line(x, f.gep(i32, y, size["left"]))
                self._pad(y, right, size["ow"])
            with branch.else_():
                self._pad(y, f.index(0), size["ow"])

    def _pad(self, y: Value, begin: Value, end: Value) -> None:
        f = self.f
        stop = begin + f.max(end - begin, 0) - f.urem(f.max(end - begin, 0), self.lanes)
        with f.loop(begin, stop, self.lanes) as loop:
            f.store(f.splat(self.word, self.lanes), y, loop.index, align=1)
        with f.loop(stop, end) as loop:
            f.store(self.word, y, loop.index, align=1)

    def _line(self, x: Value, y: Value) -> None:
        """Writes whole vectors of pixels, then the remaining ones one by one."""
        f, size, lanes, channels = self.f, self.size, self.lanes, self.pixels.channels
        stop = size["iw"] - f.urem(size["iw"], lanes)
        with f.loop(0, stop, lanes) as loop:
            f.store(self._pixels(x, loop.index), y, loop.index * WIDTH, align=1)
        with f.loop(stop, size["iw"]) as loop:
            for channel in range(WIDTH):
                value = self.fill
                if channel < channels:
                    value = f.load(i8, self._channel(x, loop.index, channel))
                f.store(value, y, loop.index * WIDTH + channel)

    def _channel(self, x: Value, pixel: Value, channel: int) -> Value:
        f = self.f
        if self.pixels.is_planar:
            return f.gep(i8, x, f.mul(self.size["x_channel"], channel) + pixel)
        return f.gep(i8, x, pixel * self.pixels.channels + channel)

    def _pixels(self, x: Value, pixel: Value) -> Value:
        """`lanes` pixels of the result from `pixel` on."""
        f, lanes, channels = self.f, self.lanes, self.pixels.channels
        if self.pixels.is_planar:
            planes = [
                f.load(i8.vector(lanes), self._channel(x, pixel, c), align=1)
                for c in range(channels)
            ]
            planes += [f.splat(self.fill, lanes)] * (WIDTH - channels)
            order = [lanes * (i % WIDTH) + i // WIDTH for i in range(WIDTH * lanes)]
            return f.shuffle(f.join(*planes), order)
        run = i8.vector(channels * lanes)
        found = f.load(run, self._channel(x, pixel, 0), align=1)
        order = [
            i // WIDTH * channels + i % WIDTH if i % WIDTH < channels else channels * lanes
            for i in range(WIDTH * lanes)
        ]
        return f.shuffle(found, order, f.splat(self.fill, channels * lanes))
