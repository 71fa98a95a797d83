"""Quantizes activations per run of 32 elements for products with weights in blocks.

Rows are interleaved in tiles of up to 16, so that a register tile reads one stream:

    tile     [runs of K][rows of the tile] of 64 bytes
    64 bytes 32 values i8; f32 scale; i32 -Σq of both halves and of the run; f32 scale times those;
             i32 a bit for this row and each later one of the tile: whether it has a second level

Units of the second level follow those of the first one at `low_distance`. Only those that are used
are written. Results equal `block_formats.quantize_runs`.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32, i8, i32
from bitwright.ir.dim import Size
from bitwright.ops.quant.block_formats import LEVEL, RUN, TINY

TILE = 16
"""Rows of a tile."""
UNIT = 64
SCALE_AT, SUMS_AT, PRODUCTS_AT, LEVELS_AT = 32, 36, 48, 60
"""Places in a unit: the scale, -Σq and -scale Σq of both halves and of the whole run, and which
rows have a second level."""
WHOLE = 2
"""The number of the whole run among the sums."""
_INFINITY = 0x7F800000
_TINY_BITS = int(TINY.view("uint32"))


def tile_address(f: Kernel, base: Value, row: Value, rows: Value, runs: Value) -> Value:
    """The address of the first unit of a row."""
    width = f.min(rows, TILE)
    tile = f.udiv(row, TILE)
    return f.offset(base, (tile * width * runs + f.urem(row, TILE)) * UNIT)


def run_step(f: Kernel, rows: Value) -> Value:
    """Bytes from a unit of a row to its next one."""
    return f.min(rows, TILE) * UNIT


def unit_count(rows: Size, runs: Size) -> Size:
    """Units of one level, those that a register tile reads behind the last row included."""
    return (rows + TILE) * runs + TILE


def low_distance(f: Kernel, rows: Value, runs: Value) -> Value:
    """Bytes from a unit to that of its second level."""
    return f.mul(f.add(f.mul(f.add(rows, TILE), runs), TILE), UNIT)


def emit_quantize_runs(module: Module, name: str, outlier: float) -> Signature:
    """Slots: x, its stride in rows, and the number of rows and of runs in a row."""
    signature = Signature(("x", "y"), ("rows", "runs", "x_stride"))
    with module.kernel(name, signature) as f:
        _Quantizer(f, outlier).emit()
    return signature


class _Quantizer:
    """Threads divide pairs of a tile and a run."""

    def __init__(self, f: Kernel, outlier: float) -> None:
        self.f, self.outlier = f, outlier
        self.rows, self.runs, self.stride = (f.args.size(s) for s in ("rows", "runs", "x_stride"))
        self.lanes = min(f.target.lanes(32), RUN // 2)
        self.squares = f.scratch(f32, TILE)
        """The squares of peaks above which a row's runs get a second level."""
        self.low = low_distance(f, self.rows, self.runs)

    def emit(self) -> None:
        f, runs = self.f, self.runs
        begin, end = f.share(f.udiv(self.rows + (TILE - 1), TILE) * runs)
        with f.if_(f.lt(begin, end)):
            stop = f.udiv(end + (runs - 1), runs)
            with f.loop(f.udiv(begin, runs), stop) as tiles:
                start = tiles.index * runs
                first, last = f.max(begin, start) - start, f.min(end, start + runs) - start
                self._tile(tiles.index * TILE, first, last)

    def _tile(self, row: Value, first: Value, last: Value) -> None:
        """The runs from `first` to `last` of the tile that begins with `row`."""
        f = self.f
        count = f.min(self.rows - row, TILE)
        if self.outlier:
            with f.loop(0, count) as rows:
                f.store(self._square(row + rows.index), self.squares, rows.index)
        with f.loop(first, last) as runs:
            unit = f.offset(
                tile_address(f, f.args.pointer("y"), row, self.rows, self.runs),
                runs.index * run_step(f, self.rows),
            )
            with f.loop(0, count, carry=(f.const(i32, 0),)) as rows:
                here = f.offset(unit, rows.index * UNIT)
                parts = self._parts(row + rows.index, runs.index)
                is_large = self._run(parts, here, rows.index)
                with f.if_(is_large):
                    self._second(parts, here)
                bit = f.shl(f.convert(is_large, i32, signed=False), f.convert(rows.index, i32))
                rows.next(f.or_(rows.carried[0], bit))
            with f.loop(0, count) as each:
                mask = f.lshr(rows.results[0], f.convert(each.index, i32))
                f.store(mask, f.offset(unit, each.index * UNIT + LEVELS_AT))

    def _parts(self, row: Value, run: Value) -> list[Value]:
        f, lanes = self.f, self.lanes
        x = f.gep(f32, f.args.pointer("x"), row * self.stride + run * RUN)
        return [f.load(f32.vector(lanes), x, at) for at in range(0, RUN, lanes)]

    def _square(self, row: Value) -> Value:
        """The mean square of a row times the square of the factor."""
        f = self.f
        zeros = [f.const(f32.vector(self.lanes), 0.0)] * (RUN // self.lanes)
        with f.loop(0, self.runs, carry=zeros) as loop:
            parts = zip(self._parts(row, loop.index), loop.carried, strict=True)
            loop.next(*(f.fma(part, part, total) for part, total in parts))
        total = f.reduce_add(f.combine(loop.results, f.add))
        mean = f.div(total, f.convert(f.mul(self.runs, RUN), f32))
        return f.mul(mean, self.outlier * self.outlier)

    def _run(self, parts: Sequence[Value], unit: Value, row: Value) -> Value:
        """Stores the first level of a run; whether it needs a second one."""
        f = self.f
        peak = self._peak(parts)
        finite, number = f.lt(peak, _INFINITY), f.bitcast(peak, f32)
        scale = f.select(finite, f.div(number, 127.0), float("nan"))
        self._store([f.round_to_int(v) for v in self._scaled(parts, peak)], scale, unit)
        limit = f.load(f32, self.squares, row) if self.outlier else f.const(f32, 0.0)
        return f.and_(finite, f.gt(f.mul(number, number), limit))

    def _second(self, parts: Sequence[Value], unit: Value) -> None:
        """Stores the second level of a finite run."""
        f = self.f
        rest = []
        for value in self._scaled(parts, self._peak(parts)):
            whole = f.convert(f.round_to_int(value), f32)
            small = f.round_to_int((value - whole) * float(LEVEL))
            rest.append(f.max(f.min(small, 127), -127))
        scale = f.mul(f.load(f32, f.offset(unit, SCALE_AT)), 1 / LEVEL)
        self._store(rest, scale, f.offset(unit, self.low))

    def _bits(self, part: Value) -> Value:
        """The bits of absolute values, which are ordered as the values are."""
        return self.f.and_(self.f.bitcast(part, i32.vector(self.lanes)), 0x7FFFFFFF)

    def _peak(self, parts: Sequence[Value]) -> Value:
        f = self.f
        bits = [self._bits(part) for part in parts]
        return f.reduce(f.combine(bits, lambda a, b: f.max(a, b)), lambda a, b: f.max(a, b))

    def _scaled(self, parts: Sequence[Value], peak: Value) -> list[Value]:
        """A run in units of its scale; 0 for elements that are not finite."""
        f, lanes = self.f, self.lanes
        is_used = f.and_(f.lt(peak, _INFINITY), f.ge(peak, _TINY_BITS))
        inverse = f.select(is_used, f.div(f.const(f32, 127.0), f.bitcast(peak, f32)), 0.0)
        factor, nothing = f.splat(inverse, lanes), f.const(parts[0].type, 0.0)
        return [f.select(f.lt(self._bits(p), _INFINITY), p, nothing) * factor for p in parts]

    def _store(self, whole: Sequence[Value], scale: Value, unit: Value) -> None:
        """Stores values, their scale and their sums."""
        f = self.f
        for at, part in enumerate(whole):
            f.store(f.convert(part, i8), f.offset(unit, at * self.lanes))
        half = len(whole) // 2
        sums = [
            f.sub(f.const(i32, 0), f.reduce_add(f.combine(part, f.add)))
            for part in (whole[:half], whole[half:])
        ]
        sums.append(f.add(*sums))
        f.store(scale, f.offset(unit, SCALE_AT))
        for at, total in enumerate(sums):
            f.store(total, f.offset(unit, SUMS_AT + 4 * at))
            f.store(f.convert(total, f32) * scale, f.offset(unit, PRODUCTS_AT + 4 * at))
