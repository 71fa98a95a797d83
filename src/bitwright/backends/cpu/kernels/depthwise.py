"""Depthwise convolution with channels innermost: every channel has a small filter of its own.

    y[n, i, j, c] = epilogue(Σ_(u, v) x[n, i·sy + u·dy − top, j·sx + v·dx − left, c] · w[u, v, c])

Lanes run along channels. A block of channels keeps its filter in registers along a whole line of
the result; lines at the top and bottom and pixels at the left and right take only the taps that
fall inside the image, by the same code with the filter read from memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.emit import Kernel, Module, Signature, Value, f32
from bitwright.backends.cpu.kernels.matmul import NO_EPILOGUE, Epilogue

_PIXELS = 4
_SIZES = (
    "images", "ih", "iw", "oh", "ow", "channels",
    "sy", "sx", "dy", "dx", "top", "left",
    "x_image", "x_line", "x_pixel", "y_image", "y_line", "y_pixel",
)  # fmt: skip


@dataclass(frozen=True)
class Depthwise:
    """What shapes the code: the filter's size and the epilogue."""

    height: int
    width: int
    epilogue: Epilogue = NO_EPILOGUE

    @property
    def signature(self) -> Signature:
        return Signature(("x", "w", "y", *self.epilogue.pointers), (*_SIZES, *self.epilogue.sizes))


def emit_depthwise(module: Module, name: str, conv: Depthwise) -> Signature:
    with module.kernel(name, conv.signature) as f, f.subnormals_as_zeros():
        _Emitter(f, conv).emit()
    return conv.signature


class _Emitter:
    def __init__(self, f: Kernel, conv: Depthwise) -> None:
        self.f, self.conv = f, conv
        self.lanes = f.target.lanes(32)
        self.vector = f32.vector(self.lanes)
        self.size = {name: f.args.size(name) for name in _SIZES}

    def emit(self) -> None:
        """Threads share out (image, line); a line goes block by block of channels."""
        f, size = self.f, self.size
        begin, end = f.share(size["images"] * size["oh"])
        with f.loop(begin, end) as lines:
            image = f.udiv(lines.index, size["oh"])
            line = lines.index - image * size["oh"]
            with f.loop(0, size["channels"], self.lanes) as block:
                self._line(image, line, block.index)

    def _line(self, image: Value, line: Value, channel: Value) -> None:
        """All pixels of one line of the result, for one vector of channels."""
        f, size, conv = self.f, self.size, self.conv
        mask = f.mask(size["channels"] - channel, self.lanes)
        first = line * size["sy"] - size["top"]
        # taps of the filter's lines that fall inside the image
        low = f.udiv(f.max(size["dy"] - 1 - first, 0), size["dy"])
        high = f.min(
            f.udiv(f.max(size["ih"] - first + (size["dy"] - 1), 0), size["dy"]), conv.height
        )
        # a place in x, which may lie outside until a column and a tap are added
        x = image * size["x_image"] + channel + first * size["x_line"]
        w = f.gep(f32, f.args.pointer("w"), channel)
        start, stop = self._inner_columns()
        whole = f.and_(f.eq(low, 0), f.eq(high, conv.height))
        inside = f.select(whole, stop, start)

        def edge(column: Value) -> None:
            total = self._edge(x, w, column, low, high, mask)
            self._store(total, image, line, column, channel, mask)

        with f.loop(0, start) as before:
            edge(before.index)
        taps = [
            f.load(self.vector, w, f.mul(size["channels"], number), mask=mask)
            for number in range(conv.height * conv.width)
        ]
        # several pixels a turn, so that their sums do not wait for each other
        many = start + (inside - start) - f.urem(inside - start, _PIXELS)
        with f.loop(start, many, _PIXELS) as middle:
            columns = [middle.index + pixel for pixel in range(_PIXELS)]
            for column, total in zip(columns, self._whole(x, taps, columns, mask), strict=True):
                self._store(total, image, line, column, channel, mask)
        with f.loop(many, inside) as rest:
            (total,) = self._whole(x, taps, [rest.index], mask)
            self._store(total, image, line, rest.index, channel, mask)
        with f.loop(inside, size["ow"]) as behind:
            edge(behind.index)

    def _inner_columns(self) -> tuple[Value, Value]:
        """The columns of the result whose taps all fall inside the image."""
        f, size = self.f, self.size
        sx = size["sx"]
        start = f.min(f.udiv(size["left"] + (sx - 1), sx), size["ow"])
        reach = size["iw"] + size["left"] - size["dx"] * (self.conv.width - 1)
        stop = f.min(f.udiv(f.max(reach + (sx - 1), 0), sx), size["ow"])
        return start, f.max(start, stop)

    def _whole(self, x: Value, taps: list[Value], columns: list[Value], mask: Value) -> list[Value]:
        """The sums of pixels whose taps all fall inside the image."""
        f, size, conv = self.f, self.size, self.conv
        corners = [
            f.gep(
                f32,
                f.args.pointer("x"),
                x + (column * size["sx"] - size["left"]) * size["x_pixel"],
            )
            for column in columns
        ]
        totals = [f.const(self.vector, 0.0)] * len(columns)
        for number, tap in enumerate(taps):
            u, v = divmod(number, conv.width)
            at = f.mul(size["dy"] * size["x_line"], u) + f.mul(size["dx"] * size["x_pixel"], v)
            for i, corner in enumerate(corners):
                totals[i] = f.fma(f.load(self.vector, corner, at, mask=mask), tap, totals[i])
        return totals

    def _edge(
        self, x: Value, w: Value, column: Value, low: Value, high: Value, mask: Value
    ) -> Value:
        """A pixel some of whose taps fall outside: those are left out."""
        f, size, conv = self.f, self.size, self.conv
        first = column * size["sx"] - size["left"]
        left = f.udiv(f.max(size["dx"] - 1 - first, 0), size["dx"])
        right = f.min(
            f.udiv(f.max(size["iw"] - first + (size["dx"] - 1), 0), size["dx"]), conv.width
        )
        with f.loop(low, high, carry=[f.const(self.vector, 0.0)]) as lines:
            with f.loop(left, right, carry=lines.carried) as columns:
                u, v = lines.index, columns.index
                at = u * size["dy"] * size["x_line"] + (first + v * size["dx"]) * size["x_pixel"]
                value = f.load(self.vector, f.args.pointer("x"), x + at, mask=mask)
                tap = f.load(self.vector, w, (u * conv.width + v) * size["channels"], mask=mask)
                columns.next(f.fma(value, tap, columns.carried[0]))
            lines.next(*columns.results)
        return lines.results[0]

    def _store(
        self,
        total: Value,
        image: Value,
        line: Value,
        column: Value,
        channel: Value,
        mask: Value,
    ) -> None:
        f, size = self.f, self.size
        row = (image * size["oh"] + line) * size["ow"] + column
        value = self.conv.epilogue.emit(f, total, row, channel, mask)
        at = image * size["y_image"] + line * size["y_line"] + column * size["y_pixel"] + channel
        f.store(value, f.args.pointer("y"), at, mask=mask)
