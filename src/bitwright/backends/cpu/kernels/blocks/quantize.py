"""Quantizes activations per run of 32 elements for products with weights in blocks.

Rows are interleaved in tiles of up to 16, so that a register tile reads one stream:

    tile     [runs of K][rows of the tile] of 64 bytes
    64 bytes 32 values i8; f32 scale; i32 -Σq of both halves and of the run; f32 scale times those

Results equal `ops.quant.block_formats.quantize_runs`.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32, i8, i32
from bitwright.ops.quant.block_formats import RUN, TINY

TILE = 16
"""Rows of a tile."""
UNIT = 64
SCALE_AT, SUMS_AT, PRODUCTS_AT = 32, 36, 48
"""Places in a unit: the scale, -Σq and -scale Σq of both halves and of the whole run."""
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


def emit_quantize_runs(module: Module, name: str) -> Signature:
    """Slots: x, its stride in rows, and the number of rows and of runs in a row."""
    signature = Signature(("x", "y"), ("rows", "runs", "x_stride"))
    with module.kernel(name, signature) as f:
        rows, runs, stride = (f.args.size(slot) for slot in ("rows", "runs", "x_stride"))
        begin, end = f.share(rows * runs)
        lanes = min(f.target.lanes(32), RUN // 2)
        step = run_step(f, rows)
        with f.loop(begin, end) as loop:
            row, run = f.udiv(loop.index, runs), f.urem(loop.index, runs)
            x = f.gep(f32, f.args.pointer("x"), row * stride + run * RUN)
            unit = tile_address(f, f.args.pointer("y"), row, rows, runs)
            parts = [f.load(f32.vector(lanes), x, at) for at in range(0, RUN, lanes)]
            quantize_run(f, parts, f.offset(unit, run * step))
    return signature


def quantize_run(f: Kernel, parts: Sequence[Value], unit: Value) -> None:
    """Quantizes the 32 elements of a run and stores them as a unit."""
    lanes = parts[0].type.lanes
    words = i32.vector(lanes)
    bits = [f.and_(f.bitcast(part, words), 0x7FFFFFFF) for part in parts]
    peak = f.reduce(f.combine(bits, lambda a, b: f.max(a, b)), lambda a, b: f.max(a, b))
    finite = f.lt(peak, _INFINITY)
    number = f.bitcast(peak, f32)
    is_used = f.and_(finite, f.ge(peak, _TINY_BITS))
    inverse = f.select(is_used, f.div(f.const(f32, 127.0), number), 0.0)
    scale = f.select(finite, f.div(number, 127.0), float("nan"))
    factor = f.splat(inverse, lanes)
    nothing = f.const(parts[0].type, 0.0)
    whole = []
    for at, part in enumerate(parts):
        safe = f.select(f.lt(bits[at], _INFINITY), part, nothing)
        whole.append(f.round_to_int(safe * factor))
        f.store(f.convert(whole[at], i8), f.offset(unit, at * lanes))
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
