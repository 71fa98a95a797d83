"""Non-maximum suppression: of overlapping boxes, the one with the best score is selected.

    corners   low and high corner and area of every box, as [batch, 5, boxes] in f64
    select    per batch and class, repeatedly: select the best remaining score and suppress the
              boxes that overlap it, in one pass over the boxes
    rows      (batch, class, box) of every selected box, once their number is known

All computations are in f64, as in the reference, so that overlaps compare equally with the
threshold. A suppressed score is -inf; a score that is -inf or NaN initially is replaced by the
lowest finite number and comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import Type, f64, i64, storage_type
from bitwright.ir.dtype import DType

LOWEST = float(np.finfo(np.float64).min)
PARTS = 5
"""low y, low x, high y, high x, area"""


@dataclass(frozen=True)
class Limits:
    """The element types of the limits; None if absent."""

    count: DType | None
    overlap: DType | None
    score: DType | None


def emit_corners(module: Module, name: str, element: DType, centred: bool) -> Signature:
    signature = Signature(("boxes", "corners"), ("batch", "count"))
    with module.kernel(name, signature) as f:
        batch, count = f.args.size("batch"), f.args.size("count")
        begin, end = f.share(batch * count)
        with f.loop(begin, end) as loop:
            row = f.udiv(loop.index, f.max(count, 1))
            box = f.gep(storage_type(element), f.args.pointer("boxes"), loop.index * 4)
            a, b, c, d = (f.convert(f.load(storage_type(element), box, i), f64) for i in range(4))
            if centred:
                low = [a - f.div(c, 2.0), b - f.div(d, 2.0)]
                high = [a + f.div(c, 2.0), b + f.div(d, 2.0)]
            else:
                low, high = [f.min(a, c), f.min(b, d)], [f.max(a, c), f.max(b, d)]
            area = (high[0] - low[0]) * (high[1] - low[1])
            place = loop.index - row * count
            first = f.gep(f64, f.args.pointer("corners"), row * count * PARTS + place)
            for part, value in enumerate((*low, *high, area)):
                f.store(value, first, count * part)
    return signature


def emit_select(module: Module, name: str, element: DType, limits: Limits) -> Signature:
    given = [n for n in ("count", "overlap", "score") if getattr(limits, n) is not None]
    names = ("scores", "corners", "left", "picked", "counts", *(f"max_{n}" for n in given))
    signature = Signature(names, ("rows", "classes", "boxes"))
    with module.kernel(name, signature) as f:
        _Selection(f, element, limits).emit()
    return signature


class _Selection:
    def __init__(self, f: Kernel, element: DType, limits: Limits) -> None:
        self.f, self.element = f, storage_type(element)
        self.lanes = f.target.lanes(64)
        self.vector = f64.vector(self.lanes)
        self.boxes = f.args.size("boxes")
        most = self._limit("count", limits.count, i64)
        self.most = f.index(0) if most is None else most
        overlap = self._limit("overlap", limits.overlap, f64)
        self.overlap = f.const(f64, 0.0) if overlap is None else overlap
        self.score = self._limit("score", limits.score, f64)

    def _limit(self, name: str, element: DType | None, type_: Type) -> Value | None:
        if element is None:
            return None
        return self.f.convert(
            self.f.load(storage_type(element), self.f.args.pointer(f"max_{name}")), type_
        )

    def emit(self) -> None:
        f = self.f
        begin, end = f.share(f.args.size("rows"))
        with f.loop(begin, end) as rows:
            self.row = rows.index
            self.left = f.gep(f64, f.args.pointer("left"), self.row * self.boxes)
            batch = f.udiv(self.row, f.args.size("classes"))
            first = batch * self.boxes * PARTS
            self.corners = f.gep(f64, f.args.pointer("corners"), first)
            best, place = self._start()
            picked = f.gep(i64, f.args.pointer("picked"), self.row * self.boxes)
            goes_on = f.and_(f.gt(best, float("-inf")), f.gt(self.most, 0))
            with f.if_(goes_on, carry=(f.index(0),)) as branch:
                with f.do_while(carry=(f.index(0), place)) as loop:
                    number, place = loop.carried
                    f.store(place, picked, number)
                    best, following = self._suppress(place)
                    number = number + 1
                    again = f.and_(f.gt(best, float("-inf")), f.lt(number, self.most))
                    loop.next(number, following, again=again)
                branch.next(loop.results[0])
            f.store(branch.results[0], f.args.pointer("counts"), self.row)

    def _best(self, column: Value, value: Value, totals: Sequence[Value]) -> tuple[Value, Value]:
        """The best score of each lane and its index; of equal scores, the first."""
        f = self.f
        best, places = totals
        here = f.splat(column, self.lanes) + f.iota(i64, self.lanes)
        better = f.gt(value, best)
        return f.select(better, value, best), f.select(better, here, places)

    def _nothing(self) -> tuple[Value, Value]:
        f = self.f
        return f.const(self.vector, float("-inf")), f.const(i64.vector(self.lanes), 0)

    def _joined(self, totals: Sequence[Value]) -> tuple[Value, Value]:
        """The best score of all lanes, and its first index."""
        f = self.f
        best = f.reduce_max(totals[0])
        far = f.select(f.eq(totals[0], f.splat(best, self.lanes)), totals[1], (1 << 63) - 1)
        return best, f.reduce_min(far)

    def _start(self) -> tuple[Value, Value]:
        """Copy the scores above the threshold; return the best one and its index."""
        f = self.f
        scores = f.gep(self.element, f.args.pointer("scores"), self.row * self.boxes)

        def body(column: Value, mask: Value | None, *totals: Value) -> tuple[Value, Value]:
            read = f.load(self.element.vector(self.lanes), scores, column, mask=mask)
            score = f.convert(read, f64)
            value = f.select(f.gt(score, LOWEST), score, LOWEST)
            if self.score is not None:
                value = f.select(f.gt(score, self.score), value, float("-inf"))
            if mask is not None:
                value = f.select(mask, value, float("-inf"))
            f.store(value, self.left, column, mask=mask)
            return self._best(column, value, totals)

        return self._joined(f.vectors(0, self.boxes, self.lanes, body, self._nothing()))

    def _suppress(self, place: Value) -> tuple[Value, Value]:
        """Suppress a box and those that overlap it; return the best score left and its index."""
        f = self.f
        f.store(f.const(f64, float("-inf")), self.left, place)
        parts = [f.gep(f64, self.corners, self.boxes * part) for part in range(PARTS)]
        own = [f.load(f64, part, place) for part in parts]

        def body(column: Value, mask: Value | None, *totals: Value) -> tuple[Value, Value]:
            low0, low1, high0, high1, area = (
                f.load(self.vector, part, column, mask=mask) for part in parts
            )
            sides = [
                f.max(f.min(own[2], high0) - f.max(own[0], low0), 0.0),
                f.max(f.min(own[3], high1) - f.max(own[1], low1), 0.0),
            ]
            common = sides[0] * sides[1]
            union = area + own[4] - common
            real = f.and_(f.gt(area, 0.0), f.gt(union, 0.0))
            real = f.and_(real, f.splat(f.gt(own[4], 0.0), self.lanes))
            share = f.select(real, f.div(common, f.select(real, union, 1.0)), 0.0)
            value = f.load(self.vector, self.left, column, mask=mask, default=float("-inf"))
            value = f.select(f.le(share, f.splat(self.overlap, self.lanes)), value, float("-inf"))
            f.store(value, self.left, column, mask=mask)
            return self._best(column, value, totals)

        return self._joined(f.vectors(0, self.boxes, self.lanes, body, self._nothing()))


def emit_rows(module: Module, name: str) -> Signature:
    signature = Signature(("picked", "counts", "y"), ("rows", "classes", "boxes"))
    with module.kernel(name, signature) as f:
        counts, classes = f.args.pointer("counts"), f.args.size("classes")
        begin, end = f.share(f.args.size("rows"))
        with f.loop(0, begin, carry=(f.index(0),)) as loop:
            loop.next(loop.carried[0] + f.load(i64, counts, loop.index))
        with f.loop(begin, end, carry=loop.results) as rows:
            batch = f.udiv(rows.index, classes)
            group = rows.index - batch * classes
            found = f.gep(i64, f.args.pointer("picked"), rows.index * f.args.size("boxes"))
            count = f.load(i64, counts, rows.index)
            with f.loop(0, count) as boxes:
                y = f.gep(i64, f.args.pointer("y"), (rows.carried[0] + boxes.index) * 3)
                for part, value in enumerate((batch, group, f.load(i64, found, boxes.index))):
                    f.store(value, y, part)
            rows.next(rows.carried[0] + count)
    return signature
