"""Padding and cyclic shifts, as a map from result positions to source positions per axis.

    place = index - begin                          on each axis of the source, of size m
    constant   the value where a place is out of range
    edge       place clamped to 0 … m - 1
    wrap       place mod m
    reflect    place mod 2(m - 1), mirrored beyond m - 1

Rows are contiguous on both sides. Within a row, consecutive source positions are copied as one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Function, Kernel, Module, Signature, Type, Value, i1
from bitwright.backends.cpu.kernels.elementwise import loop_nest
from bitwright.backends.cpu.kernels.movement.copy import PIECE_BYTES, WORD, copy_bytes, fill
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, unless_empty


def emit_pad(module: Module, name: str, mode: str, rank: int, width: int) -> Signature:
    """Slots: sizes n of the result, m of the source, begins b, and strides x and y of rows."""
    slots = [f"{letter}{axis}" for letter in "nmb" for axis in range(rank)]
    slots += [f"{letter}{axis}" for letter in "xy" for axis in range(rank - 1)]
    signature = Signature(("x", "y", "value", "fault"), (*slots, *FAULT_SLOTS))
    word, piece = WORD[width], PIECE_BYTES // width
    with module.kernel(name, signature) as f:
        sizes, inner, begins = ([f.args.size(f"{o}{a}") for a in range(rank)] for o in "nmb")
        x_strides, y_strides = ([f.args.size(f"{o}{a}") for a in range(rank - 1)] for o in "xy")
        counts = [*sizes[:-1], loop_nest.pieces(f, sizes[-1], piece)]
        begin, end = f.share(loop_nest.product(f, counts))
        value = f.load(word, f.args.pointer("value"))

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            places, inside = _places(f, mode, coordinates[:-1], begins, inner)
            x = f.gep(word, f.args.pointer("x"), loop_nest.dot(f, places, x_strides))
            y = f.gep(word, f.args.pointer("y"), offsets["y"])
            first = coordinates[-1] * piece
            stop = f.min(first + piece, sizes[-1])
            row = _Row(f, x, y, first, stop, begins[-1], inner[-1], word)
            if mode == "constant":
                row.constant(value, inside)
            else:
                row.mapped(mode)

        def pad() -> None:
            loop_nest.emit_loop_nest(f, counts, {"y": [*y_strides, 0]}, begin, end, body)

        if mode == "constant":
            pad()
        else:  # an empty source has no elements to repeat
            unless_empty(f, loop_nest.product(f, inner), begin, end, pad)
    return signature


def source_place(f: Function, mode: str, place: Value, size: Value) -> Value:
    """The source position for a position out of range; the axis is not empty."""
    if mode in ("constant", "edge"):
        return f.max(f.min(place, size - 1), 0)
    with f.if_(f.ult(place, size), carry=(place,)) as branch:
        branch.next(place)
    with branch.else_():
        period = size if mode == "wrap" else f.max(f.shl(size - 1, 1), 1)
        rest = f.srem(place, period)
        rest = f.select(f.lt(rest, 0), rest + period, rest)
        if mode == "reflect":
            rest = f.select(f.lt(rest, size), rest, period - rest)
        branch.next(rest)
    return branch.results[0]


def _places(
    f: Function,
    mode: str,
    coordinates: Sequence[Value],
    begins: Sequence[Value],
    sizes: Sequence[Value],
) -> tuple[list[Value], Value]:
    """Source positions on the outer axes, and whether all were in range."""
    inside = f.const(i1, 1)
    places = []
    for coordinate, begin, size in zip(coordinates, begins, sizes, strict=False):
        place = coordinate - begin
        inside = f.and_(inside, f.ult(place, size))
        places.append(source_place(f, mode, place, size))
    return places, inside


@dataclass(frozen=True)
class _Row:
    """The part first … stop - 1 of a row; x and y point to the start of their rows."""

    f: Kernel
    x: Value
    y: Value
    first: Value
    stop: Value
    begin: Value
    size: Value
    word: Type

    def constant(self, value: Value, inside: Value) -> None:
        f = self.f
        start = f.max(f.min(f.max(self.begin, 0), self.stop), self.first)
        end = f.max(f.min(self.begin + self.size, self.stop), start)
        end = f.select(inside, end, start)
        fill(f, value, f.gep(self.word, self.y, self.first), start - self.first)
        self.run(start, end)
        fill(f, value, f.gep(self.word, self.y, end), self.stop - end)

    def run(self, start: Value, end: Value) -> None:
        """Copy a contiguous run from the source."""
        f = self.f
        x = f.gep(self.word, self.x, start - self.begin)
        y = f.gep(self.word, self.y, start)
        copy_bytes(f, x, y, (end - start) * self.word.bytes)

    def mapped(self, mode: str) -> None:
        f = self.f
        if mode == "wrap":
            self._wrapped()
            return
        start = f.max(f.min(f.max(self.begin, 0), self.stop), self.first)
        end = f.max(f.min(self.begin + self.size, self.stop), start)
        for low, high in ((self.first, start), (end, self.stop)):
            with f.loop(low, high) as loop:
                place = source_place(f, mode, loop.index - self.begin, self.size)
                f.store(f.load(self.word, self.x, place), self.y, loop.index)
        with f.if_(f.lt(start, end)):
            self.run(start, end)

    def _wrapped(self) -> None:
        """Copy runs up to the end of the source repeatedly."""
        f = self.f
        with f.do_while(carry=(self.first,)) as loop:
            (at,) = loop.carried
            place = source_place(f, "wrap", at - self.begin, self.size)
            count = f.min(self.size - place, self.stop - at)
            x, y = f.gep(self.word, self.x, place), f.gep(self.word, self.y, at)
            copy_bytes(f, x, y, count * self.word.bytes)
            loop.next(at + count, again=f.lt(at + count, self.stop))
