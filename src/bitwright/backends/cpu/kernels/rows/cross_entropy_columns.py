"""Cross entropy along an inner axis (`kernels.rows.cross_entropy`), one vector of columns at a
time.

Logits are [rows, classes, columns] and labels [rows, columns]: every lane has a label of its own.
"""

from __future__ import annotations

import math

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import (
    Kernel,
    Module,
    Signature,
    Value,
    f64,
    i32,
    i64,
    storage_type,
)
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.codegen.math.exp_nonpositive import exp_nonpositive
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.kernels.rows.cross_entropy import (
    PIECE,
    CrossEntropy,
    divisor_of,
    factor_of,
    load_dy,
    read_labels,
)
from bitwright.backends.cpu.lowering.region import store

VECTORS = 4
"""Vectors of columns that are computed together, as one wide vector."""


def emit_columns(module: Module, name: str, form: CrossEntropy) -> Signature:
    with module.kernel(name, form.signature) as f:
        rows, columns = f.args.size("rows"), f.args.size("columns")
        lanes = VECTORS * f.target.lanes(form.type.bits)
        divisor = divisor_of(f, form) if form.is_gradient else None
        parts = pieces(f, columns, PIECE)
        begin, end = f.share(rows * parts)
        with f.loop(begin, end) as units:
            row = f.udiv(units.index, parts)
            first = (units.index - row * parts) * PIECE
            stop = f.min(first + PIECE, columns)
            zeros = [f.const(form.type.vector(lanes), 0.0)] * 2
            with f.loop(first, stop, lanes, carry=zeros) as loop:
                chunk = _Chunk(f, form, row, loop.index, lanes)
                if divisor is None:
                    sums = zip(loop.carried, chunk.emit_loss(), strict=True)
                    loop.next(*(total + v for total, v in sums))
                else:
                    chunk.emit_gradient(divisor)
                    loop.next(*loop.carried)
            if divisor is None and form.reduction != "none":
                for number, total in enumerate(loop.results):
                    value = f.convert(f.reduce_add(total), f64)
                    f.store(value, f.args.pointer("y"), units.index * 2 + number)
    return form.signature


class _Chunk:
    """One vector of columns."""

    def __init__(
        self, f: Kernel, form: CrossEntropy, row: Value, column: Value, lanes: int
    ) -> None:
        self.f, self.form, self.lanes = f, form, lanes
        self.classes, self.columns = f.args.size("classes"), f.args.size("columns")
        self.mask = f.mask(self.columns - column, lanes)
        self.start = row * self.classes * self.columns + column
        self.place = row * self.columns + column
        self.label = read_labels(f, form, self.place, lanes, self.mask)
        self.vector = form.type.vector(lanes)
        word = i32 if form.type.bits == 32 else i64
        self.number = f.convert(self.label.number, word)

    def _load(self, number: Value) -> Value:
        x, at = self.f.args.pointer("logits"), self.start + number * self.columns
        return load_computed(self.f, self.form.element, self.lanes, x, at, mask=self.mask)

    def _is_label(self, number: Value) -> Value:
        word = self.number.type.scalar
        return self.f.eq(self.number, self.f.splat(self.f.convert(number, word), self.lanes))

    def emit_loss(self) -> tuple[Value, Value]:
        """The losses, which are stored if nothing reduces them, and the weights."""
        f, form = self.f, self.form
        log_prob = self._chosen()
        if not form.from_log_probs:
            top = self._highest()
            log_prob = log_prob - top - vector_math.log(f, self._powers(top))
        loss = f.neg(log_prob) * self.label.weight
        if self.label.is_ignored is not None:
            loss = f.select(self.label.is_ignored, 0.0, loss)
        if form.reduction == "none":
            store(f, loss, form.element, f.args.pointer("y"), self.place, self.mask)
        return f.select(self.mask, loss, 0.0), f.select(self.mask, self.label.weight, 0.0)

    def _chosen(self) -> Value:
        """The logit of the label."""
        f = self.f
        some = f.and_(self.mask, f.splat(f.gt(self.classes, 0), self.lanes))
        x = f.gep(storage_type(self.form.element), f.args.pointer("logits"), self.start)
        at = self.label.number * f.splat(self.columns, self.lanes)
        at = at + f.iota(i64, self.lanes)
        stored = storage_type(self.form.element).vector(self.lanes)
        return f.convert(f.gather(stored, x, at, mask=some), self.form.type)

    def _highest(self) -> Value:
        f = self.f
        with f.loop(0, self.classes, carry=(f.const(self.vector, -math.inf),)) as loop:
            loop.next(f.quick_max(self._load(loop.index), loop.carried[0]))
        return loop.results[0]

    def _powers(self, top: Value) -> Value:
        """Σ e^(v - top); a gradient saves the powers, if its result can hold them."""
        f, form = self.f, self.form
        with f.loop(0, self.classes, carry=(f.const(self.vector, 0.0),)) as loop:
            power = exp_nonpositive(f, self._load(loop.index) - top)
            if form.is_gradient and form.saves_powers:
                at = self.start + loop.index * self.columns
                f.store(power, f.args.pointer("y"), at, mask=self.mask)
            loop.next(loop.carried[0] + power)
        return loop.results[0]

    def emit_gradient(self, divisor: Value) -> None:
        f, form = self.f, self.form
        dy = load_dy(f, form, self.place, self.lanes, self.mask)
        factor = factor_of(f, form, self.label, divisor, dy)
        top = share = f.const(self.vector, 0.0)
        if not form.from_log_probs:
            top = self._highest()
            share = f.div(1.0, self._powers(top))
        with f.loop(0, self.classes) as loop:
            at = self.start + loop.index * self.columns
            if form.from_log_probs:
                value = f.const(self.vector, 0.0)
            elif form.saves_powers:
                value = f.load(self.vector, f.args.pointer("y"), at, mask=self.mask) * share
            else:
                value = exp_nonpositive(f, self._load(loop.index) - top) * share
            value = f.select(self._is_label(loop.index), value - 1.0, value) * factor
            store(f, value, form.element, f.args.pointer("y"), at, self.mask)
