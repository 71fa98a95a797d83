"""Counts of values between edges, minimum and maximum: a pass over blocks, then their sums.

    partial[block][k]        the number of values x > edges[k]
    partial[block][E ...]    the number of values, of NaN, minimum, maximum

Counts of a block are i32 lanes (i64 for f64), and f64 in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f64, i32, i64
from bitwright.backends.cpu.codegen.emit.types import computed
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.ir.dtype import DType
from bitwright.ops.math.range_counts import EXTRA

BLOCK = 1 << 14
"""Values of a block; lanes of i32 count them without overflow."""


@dataclass(frozen=True)
class RangeCounts:
    element: DType
    edges: int

    @property
    def block_signature(self) -> Signature:
        return Signature(("x", "edges", "y"), ("count", "blocks"))

    @property
    def total_signature(self) -> Signature:
        return Signature(("x", "y"), ("blocks",))


def emit_range_counts(module: Module, name: str, form: RangeCounts) -> Signature:
    type_ = computed(form.element)
    word = i64 if type_.bits == 64 else i32
    with module.kernel(name, form.block_signature) as f:
        lanes = f.target.lanes(type_.bits)
        x, y, count = f.args.pointer("x"), f.args.pointer("y"), f.args.size("count")
        edges = [
            f.splat(f.load(type_, f.args.pointer("edges"), k), lanes) for k in range(form.edges)
        ]
        zeros = [f.const(word.vector(lanes), 0)] * (form.edges + 1)
        ends = [f.const(type_.vector(lanes), end) for end in (math.inf, -math.inf)]
        begin, end = f.share(f.args.size("blocks"))
        with f.loop(begin, end) as loop:
            first = loop.index * BLOCK
            stop = f.min(first + BLOCK, count)

            def body(at: Value, mask: Value | None, *so_far: Value) -> list[Value]:
                *counts, low, high = so_far
                v = load_computed(f, form.element, lanes, x, at, mask=mask)
                if mask is not None:  # a lane without a value exceeds no edge
                    v = f.select(mask, v, -math.inf)
                found = [
                    n + f.convert(f.gt(v, edge), word, signed=False)
                    for n, edge in _pairs(counts, edges)
                ]
                missing = counts[-1] + f.convert(f.is_nan(v), word, signed=False)
                lowest = v if mask is None else f.select(mask, v, math.inf)
                return [*found, missing, f.quick_min(lowest, low), f.quick_max(v, high)]

            *counts, low, high = f.vectors(first, stop, lanes, body, [*zeros, *ends])
            totals = [f.convert(f.reduce_add(f.convert(n, i64)), f64) for n in counts]
            results = [*totals[:-1], f.convert(stop - first, f64), totals[-1]]
            results += [
                f.convert(f.reduce(low, partial(f.quick_min)), f64),
                f.convert(f.reduce(high, partial(f.quick_max)), f64),
            ]
            for place, result in enumerate(results):
                f.store(result, y, loop.index * (form.edges + EXTRA) + place)
    return form.block_signature


def _pairs(counts: list[Value], edges: list[Value]) -> list[tuple[Value, Value]]:
    return list(zip(counts, edges, strict=False))


def emit_range_total(module: Module, name: str, form: RangeCounts) -> Signature:
    """One thread adds up the blocks and turns counts above edges into counts between them."""
    with module.kernel(name, form.total_signature) as f:
        begin, end = f.share(f.index(1))
        with f.loop(begin, end):
            above, (values, missing, low, high) = _totals(f, form)
            above = [values - missing, *above]
            bins = [a - b for a, b in zip(above, [*above[1:], f.const(f64, 0.0)], strict=True)]
            for place, result in enumerate([*bins, missing, low, high]):
                f.store(result, f.args.pointer("y"), place)
    return form.total_signature


def _totals(f: Kernel, form: RangeCounts) -> tuple[list[Value], list[Value]]:
    """The sums of blocks: counts above each edge; values, NaN, minimum and maximum."""
    width = form.edges + EXTRA
    start = [f.const(f64, 0.0)] * (width - 2) + [f.const(f64, v) for v in (math.inf, -math.inf)]
    with f.loop(0, f.args.size("blocks"), carry=start) as loop:
        found = [f.load(f64, f.args.pointer("x"), loop.index * width + k) for k in range(width)]
        pairs = list(zip(loop.carried, found, strict=True))
        (low, low_here), (high, high_here) = pairs[-2:]
        loop.next(
            *(total + here for total, here in pairs[:-2]),
            f.quick_min(low_here, low),
            f.quick_max(high_here, high),
        )
    results = list(loop.results)
    return results[: form.edges], results[form.edges :]
