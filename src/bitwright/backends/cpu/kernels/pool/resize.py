"""Resampling on a regular grid, by tables: y[o] = sum over taps t of weight[t, o] * x[place[t, o]].

A first kernel writes the table of each resized axis, with the same f64 operations as the reference
(`ops.vision.resize`): positions as i32, weights in the type of the sums. Then

    nearest   copies elements or slices
    sums      sums 2 (linear) or 4 (cubic) weighted taps per axis, the first axis innermost

x is [outer, resized axes, inner]. Lanes run along the inner elements if there are any (images with
channels last), else along the last axis, whose taps are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen import emit
from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import Type, i32, i64, storage_type
from bitwright.backends.cpu.codegen.expression import from_stored
from bitwright.backends.cpu.kernels.elementwise.loop_nest import emit_loop_nest, pieces, product
from bitwright.backends.cpu.kernels.movement.copy import PIECE_BYTES, WORD, copy_bytes
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, unless_empty
from bitwright.backends.cpu.kernels.movement.gather import PIECE
from bitwright.ir.dtype import DType, f64

_Rows = Sequence[Sequence[tuple[Value, Value]]]
"""Per axis, the offsets and weights of its taps."""
ROW_LIMIT = 2048
"""The longest row that is summed on the stack, in elements."""
CLOSE = 1e-6
"""Relative tolerance within which size · scale counts as an integer (`ops.vision.resize`)."""


@dataclass(frozen=True)
class Grid:
    """The coordinate transformation and interpolation of one axis."""

    mode: str
    coordinates: str
    nearest: str
    cubic: float
    exclude_outside: bool
    scale: float | None
    is_data: bool = False
    """Whether the scale, an f32, is read from a slot."""

    @property
    def taps(self) -> int:
        return {"nearest": 1, "linear": 2, "cubic": 4}[self.mode]


def sum_type(element: DType) -> Type:
    """The type of sums: f64 for integers, to round as the reference does."""
    return emit.f64 if element.is_integer or element == f64 else emit.f32


# tables


def emit_table(module: Module, name: str, grid: Grid, weight: Type) -> Signature:
    """Slots: the sizes of the axis in x and y; one row of `place` and `weight` per tap."""
    pointers = ("place", "fault") if grid.taps == 1 else ("place", "weight", "fault")
    pointers = (*pointers, "scale") if grid.is_data else pointers
    signature = Signature(pointers, ("size", "count", *FAULT_SLOTS))
    with module.kernel(name, signature) as f:
        size, count = f.args.size("size"), f.args.size("count")
        begin, end = f.share(count)

        def positions() -> None:
            with f.loop(begin, end) as loop:
                at = _coordinate(f, grid, loop.index, size, count)
                for tap, (place, share) in enumerate(_taps(f, grid, at, size)):
                    where = count * tap + loop.index
                    f.store(_inside(f, place, size), f.args.pointer("place"), where)
                    if share is not None:
                        f.store(f.convert(share, weight), f.args.pointer("weight"), where)

        unless_empty(f, size, begin, end, positions)
    return signature


def _coordinate(f: Kernel, grid: Grid, index: Value, size: Value, count: Value) -> Value:
    """The coordinate in x of a position of y, as `ops.vision.resize` computes it."""
    place, length, total = (f.convert(value, emit.f64) for value in (index, size, count))
    width = total
    scale: Operand | None = grid.scale
    if grid.is_data:
        scale = f.convert(f.load(emit.f32, f.args.pointer("scale"), invariant=True), emit.f64)
    if scale is not None:
        given = length * scale
        gap = f.abs(given - total)
        near = f.le(gap, f.max(f.abs(given), total) * CLOSE)
        width = f.select(near, total, given)
    if grid.coordinates == "align_corners":
        spread = f.div(place * (length - 1.0), width - 1.0)
        return f.select(f.gt(width, 1.0), spread, 0.0)
    if grid.coordinates == "asymmetric":
        return f.div(place * length, width)
    centred = f.div((place + 0.5) * length, width) - 0.5
    if grid.coordinates == "half_pixel_symmetric":
        return centred + f.div(length, 2.0) * (1.0 - f.div(total, width))
    if grid.coordinates == "pytorch_half_pixel":
        return f.select(f.le(count, 1), 0.0, centred)
    return centred


def _nearest(f: Kernel, at: Value, rule: str) -> Value:
    if rule == "floor":
        return f.floor(at)
    if rule == "ceil":
        return f.ceil(at)
    return f.floor(at + 0.5) if rule == "round_prefer_ceil" else f.ceil(at - 0.5)


def _inside(f: Kernel, place: Value, size: Value) -> Value:
    """An integral f64 clamped to the axis, as i32."""
    last = f.convert(size - 1, emit.f64)
    return f.convert(f.max(f.min(place, last), 0.0), i32)


def _taps(f: Kernel, grid: Grid, at: Value, size: Value) -> list[tuple[Value, Value | None]]:
    """Positions and weights of the taps of a coordinate; nearest has no weight."""
    if grid.mode == "nearest":
        return [(_nearest(f, at, grid.nearest), None)]
    left = f.ceil(at) - 1.0  # the pixel strictly before the coordinate
    first = 1 - grid.taps // 2
    places = [left + float(first + tap) for tap in range(grid.taps)]
    weights = [tap_weight(f, grid.mode, grid.cubic, f.abs(place - at)) for place in places]
    if grid.exclude_outside:
        length = f.convert(size, emit.f64)
        weights = [
            f.select(f.or_(f.lt(place, 0.0), f.ge(place, length)), 0.0, weight)
            for place, weight in zip(places, weights, strict=True)
        ]
        total = weights[0]
        for weight in weights[1:]:
            total = total + weight
        total = f.select(f.eq(total, 0.0), 1.0, total)
        weights = [f.div(weight, total) for weight in weights]
    return list(zip(places, weights, strict=True))


def tap_weight(f: Kernel, mode: str, a: float, d: Value) -> Value:
    """The linear kernel, or the cubic convolution kernel with parameter a, at distance d."""
    if mode == "linear":
        return f.max(1.0 - d, 0.0)
    near = ((a + 2) * d - (a + 3)) * d * d + 1.0
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return f.select(f.le(d, 1.0), near, f.select(f.lt(d, 2.0), far, 0.0))


# the result


def _slots(rank: int, inner: str) -> tuple[str, ...]:
    """Sizes n of y and strides s of x: axis 0 is the outer one, the others are resized.

    Without inner elements the last axis is contiguous and has no stride slot.
    """
    sizes = [f"n{axis}" for axis in range(rank + 1)]
    strides = [f"s{axis}" for axis in range(rank + bool(inner))]
    return (*sizes, *strides, *([inner] if inner else []))


def _shared(f: Kernel, counts: Sequence[Value]) -> tuple[Value, Value]:
    """This thread's range; empty if x is empty, because its tables are not filled."""
    begin, end = f.share(product(f, counts))
    return begin, f.select(f.gt(f.args.size("s0"), 0), end, begin)


def emit_nearest(module: Module, name: str, rank: int, width: int) -> Signature:
    """Slices of `bytes` bytes with strides in bytes; or elements of `width`, if it is not 0."""
    places = [f"place{axis}" for axis in range(1, rank + 1)]
    signature = Signature(("x", "y", *places), _slots(rank, "" if width else "bytes"))
    with module.kernel(name, signature) as f:
        sizes = [f.args.size(f"n{axis}") for axis in range(rank + 1)]
        size = f.index(1) if width else f.args.size("bytes")
        fixed = rank - 1 if width else rank
        counts = [*sizes[:-1], pieces(f, sizes[-1], PIECE)] if width else list(sizes)
        if not width:
            counts.append(pieces(f, size, PIECE_BYTES))
        steps: list[Operand] = [product(f, [*sizes[axis + 1 :], size]) for axis in range(rank + 1)]
        steps = [*steps[:-1], PIECE] if width else [*steps, PIECE_BYTES]
        begin, end = _shared(f, counts)

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            row = coordinates[0] * f.args.size("s0")
            for axis in range(1, fixed + 1):
                place = f.load(i32, f.args.pointer(f"place{axis}"), coordinates[axis])
                row = row + f.convert(place, i64) * f.args.size(f"s{axis}")
            if not width:
                start = coordinates[-1] * PIECE_BYTES
                x, y = f.offset(f.args.pointer("x"), row + start), f.args.pointer("y")
                copy_bytes(f, x, f.offset(y, offsets["y"]), f.min(size - start, PIECE_BYTES))
                return
            word, first = WORD[width], coordinates[-1] * PIECE
            table = f.gep(i32, f.args.pointer(f"place{rank}"), first)
            x = f.gep(word, f.args.pointer("x"), row)
            y = f.gep(word, f.args.pointer("y"), offsets["y"])
            with f.loop(0, f.min(sizes[-1] - first, PIECE)) as loop:
                place = f.convert(f.load(i32, table, loop.index), i64)
                f.store(f.load(word, x, place), y, loop.index)

        emit_loop_nest(f, counts, {"y": steps}, begin, end, body)
    return signature


class _Sums:
    """Weighted sums over the taps of all axes except the one along lanes."""

    def __init__(self, f: Kernel, rank: int, taps: int, element: DType, lanes: int) -> None:
        self.f, self.rank, self.taps, self.element, self.lanes = f, rank, taps, element, lanes
        self.type = sum_type(element)
        self.vector = self.type.vector(lanes)

    def tap(self, axis: int, tap: int, position: Value) -> tuple[Value, Value]:
        """The offset in x and the weight of one tap at a position."""
        f = self.f
        where = f.args.size(f"n{axis}") * tap + position
        place = f.load(i32, f.args.pointer(f"place{axis}"), where)
        weight = f.load(self.type, f.args.pointer(f"weight{axis}"), where)
        return f.convert(place, i64) * f.args.size(f"s{axis}"), weight

    def weighted_sum(self, parts: Sequence[tuple[Value, Value]]) -> Value:
        """The weighted sum of values; a weight of 0 excludes infinite values."""
        f = self.f
        total = f.const(self.vector, 0.0)
        for value, weight in parts:
            share = f.select(f.eq(weight, 0.0), f.const(self.vector, 0.0), value * weight)
            total = total + share
        return total

    def interpolate(self, rows: _Rows, offset: Value, load: Callable[[Value], Value]) -> Value:
        """The sum over all taps of `rows` (one list per axis, the first axis innermost)."""
        if not rows:
            return load(offset)
        *inner, outer = rows
        return self.weighted_sum(
            [(self.interpolate(inner, offset + at, load), w) for at, w in outer]
        )

    def read(self, value: Value) -> Value:
        return self.f.convert(
            from_stored(self.f, value, self.element), self.type, self.element.is_signed
        )

    def write(self, value: Value, y: Value, index: Operand, mask: Value | None) -> None:
        f, element = self.f, self.element
        if element.is_integer:
            value = f.clamp(f.round(value), float(element.min), float(element.max))
        held = f.convert(value, storage_type(element), element.is_signed)
        f.store(held, y, index, mask=mask)


def emit_sums(
    module: Module, name: str, rank: int, taps: int, element: DType, has_inner: bool
) -> Signature:
    """Slots as for `emit_nearest`, in elements; `inner` elements follow the axes, or none."""
    tables = [f"{table}{axis}" for table in ("place", "weight") for axis in range(1, rank + 1)]
    signature = Signature(("x", "y", *tables), _slots(rank, "inner" if has_inner else ""))
    with module.kernel(name, signature) as f:
        sums = _Sums(f, rank, taps, element, f.target.lanes(sum_type(element).bits))
        sizes = [f.args.size(f"n{axis}") for axis in range(rank + 1)]
        inner = f.args.size("inner") if has_inner else f.index(1)
        fixed = rank if has_inner else rank - 1
        counts = list(sizes) if has_inner else [*sizes[:-1], pieces(f, sizes[-1], PIECE)]
        steps: list[Operand] = [product(f, [*sizes[axis + 1 :], inner]) for axis in range(rank + 1)]
        if not has_inner:
            steps[-1] = PIECE
        begin, end = _shared(f, counts)

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            rows = [
                [sums.tap(axis, tap, coordinates[axis]) for tap in range(taps)]
                for axis in range(1, fixed + 1)
            ]
            row = coordinates[0] * f.args.size("s0")
            y = f.gep(storage_type(element), f.args.pointer("y"), offsets["y"])
            if has_inner:
                _along_inner(sums, rows, row, y, inner)
            else:
                _along_axis(sums, rows, row, y, coordinates[-1] * PIECE)

        emit_loop_nest(f, counts, {"y": steps}, begin, end, body)
    return signature


def _along_inner(sums: _Sums, rows: _Rows, row: Value, y: Value, count: Value) -> None:
    _interpolate_row(sums, rows, row, count, lambda value, i, mask: sums.write(value, y, i, mask))


def _interpolate_row(
    sums: _Sums,
    rows: _Rows,
    row: Value,
    count: Value,
    put: Callable[[Value, Value, Value | None], None],
) -> None:
    """The sums over `rows` for contiguous elements."""
    f, vector = sums.f, storage_type(sums.element).vector(sums.lanes)

    def body(index: Value, mask: Value | None) -> None:
        def load(offset: Value) -> Value:
            return sums.read(f.load(vector, f.args.pointer("x"), offset + index, mask=mask))

        put(sums.interpolate(rows, row, load), index, mask)

    f.vectors(0, count, sums.lanes, body)


def _along_axis(sums: _Sums, rows: _Rows, row: Value, y: Value, first: Value) -> None:
    """Positions on the last axis, which is contiguous in x.

    Its taps are gathered: from one row on the stack to which all other axes are summed first, if it
    is short enough, else from every row.
    """
    f, vector = sums.f, storage_type(sums.element).vector(sums.lanes)

    def from_x(places: Value, mask: Value | None) -> Value:
        def load(offset: Value) -> Value:
            x = f.gep(vector, f.args.pointer("x"), offset)
            return sums.read(f.gather(vector, x, places, mask=mask))

        return sums.interpolate(rows, row, load)

    if not rows:
        _gathered(sums, from_x, y, first)
        return
    width = f.args.size(f"s{sums.rank - 1}")
    line = f.scratch(sums.type, ROW_LIMIT)
    with f.if_(f.le(width, ROW_LIMIT)) as short:
        _interpolate_row(
            sums, rows, row, width, lambda value, i, mask: f.store(value, line, i, mask=mask)
        )
        _gathered(sums, lambda at, mask: f.gather(sums.vector, line, at, mask=mask), y, first)
    with short.else_():
        _gathered(sums, from_x, y, first)


def _gathered(
    sums: _Sums, take: Callable[[Value, Value | None], Value], y: Value, first: Value
) -> None:
    """The sums over the taps of the last axis; `take` gathers at the positions."""
    f, lanes, size = sums.f, sums.lanes, sums.f.args.size(f"n{sums.rank}")
    places, weights = (f.args.pointer(f"{table}{sums.rank}") for table in ("place", "weight"))

    def body(index: Value, mask: Value | None) -> None:
        parts = []
        for tap in range(sums.taps):
            where = size * tap + first + index
            at = f.load(i32.vector(lanes), places, where, mask=mask)
            parts.append((take(at, mask), f.load(sums.vector, weights, where, mask=mask)))
        sums.write(sums.weighted_sum(parts), y, index, mask)

    f.vectors(0, f.min(size - first, PIECE), lanes, body)
