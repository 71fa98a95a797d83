"""Statistics of f32 arrays, used by `quant` during calibration.

    range_f32       minimum, maximum, sum, sum of squares (both in f64), exact zeros
    histogram_f32   counts[floor(x * factor) - first] += 1

The sum of squares of finite f32 numbers is finite in f64, so a non-finite sum shows that the array
contains NaN or infinity; the other results are then invalid. Two histograms alternate, because
neighbours often fall into the same bin and would depend on each other's store.
"""

from __future__ import annotations

from functools import partial

from bitwright.backends.cpu.codegen.emit import Function, Module, Value, f32, f64, i32, i64, ptr
from bitwright.target import Target

TURNS = 2
RESULTS = ("minimum", "maximum", "total", "total_squares", "zeros")


def statistics_text(target: Target) -> str:
    """The module's text."""
    module = Module(target, "statistics")
    _emit_range(module)
    _emit_histogram(module)
    return module.text()


def _emit_range(module: Module) -> None:
    params = (("x", ptr), ("count", i64), ("y", ptr))
    with module.function("range_f32", params=params, internal=False) as f:
        x, count, y = f.params
        lanes = f.target.lanes(32)
        first = f.load(f32, x)
        start = [f.splat(first, lanes)] * 2 + [f.const(f64.vector(lanes), 0.0)] * 2
        start.append(f.const(i32.vector(lanes), 0))

        def body(at: Value, mask: Value | None, *so_far: Value) -> list[Value]:
            low, high, total, squares, zeros = so_far
            v = f.load(f32.vector(lanes), x, at, mask=mask, align=4)
            is_zero = f.eq(v, 0.0) if mask is None else f.eq(v, 0.0) & mask
            inside = v if mask is None else f.select(mask, v, start[0])
            wide = f.convert(v, f64)
            return [
                f.quick_min(inside, low),
                f.quick_max(inside, high),
                total + wide,
                f.fma(wide, wide, squares),
                zeros + f.convert(is_zero, i32),
            ]

        low, high, total, squares, zeros = f.vectors(0, count, lanes, body, start)
        results = (
            f.convert(f.reduce(low, partial(f.quick_min)), f64),
            f.convert(f.reduce(high, partial(f.quick_max)), f64),
            f.reduce_add(total),
            f.reduce_add(squares),
            f.convert(f.reduce_add(f.convert(zeros, i64)), f64),
        )
        for position, result in enumerate(results):
            f.store(result, y, position)


def _emit_histogram(module: Module) -> None:
    numbers = (("count", i64), ("factor", f64), ("first", f64), ("bins", i64))
    params = (("x", ptr), *numbers, ("counts", ptr), ("scratch", ptr))
    with module.function("histogram_f32", params=params, internal=False) as f:
        x, count, factor, first, bins, counts, scratch = f.params
        lanes = max(TURNS, f.target.lanes(64))

        def bins_of(v: Value) -> Value:
            place = f.floor(f.convert(v, f64) * factor) - first
            to = place.type.of(i32)  # every index is a valid bin: no need to saturate
            return f.emit(to, f"fptosi {place.type.text} {place.text} to {to.text}")

        rows = [f.gep(i32, scratch, bins * turn) for turn in range(TURNS)]
        stop = count - f.urem(count, lanes)
        with f.loop(0, stop, lanes) as loop:
            places = bins_of(f.load(f32.vector(lanes), x, loop.index, align=4))
            for lane in range(lanes):
                _increment(f, rows[lane % TURNS], f.lane(places, lane))
        with f.loop(stop, count) as loop:
            _increment(f, rows[0], bins_of(f.load(f32, x, loop.index)))
        with f.loop(0, bins) as loop:
            total = f.load(i64, counts, loop.index)
            for row in rows:
                total = total + f.convert(f.load(i32, row, loop.index), i64)
                f.store(f.const(i32, 0), row, loop.index)
            f.store(total, counts, loop.index)


def _increment(f: Function, row: Value, place: Value) -> None:
    at = f.convert(place, i64)
    f.store(f.load(i32, row, at) + 1, row, at)
