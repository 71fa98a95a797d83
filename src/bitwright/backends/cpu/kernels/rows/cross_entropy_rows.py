"""Cross entropy of contiguous rows of classes (`kernels.rows.cross_entropy`).

A row is read from memory once: its maximum, then the sum of powers. A gradient saves the powers in
its result, scales them there, and writes the class of the label last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f64, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.codegen.math.exp_nonpositive import exp_nonpositive
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.kernels.rows.cross_entropy import (
    BLOCK,
    CrossEntropy,
    divisor_of,
    factor_of,
    load_dy,
    read_labels,
)
from bitwright.backends.cpu.lowering.region import store

ACCUMULATORS = 4


def emit_rows(module: Module, name: str, form: CrossEntropy) -> Signature:
    with module.kernel(name, form.signature) as f:
        rows = f.args.size("rows")
        if form.is_gradient:
            divisor = divisor_of(f, form)
            begin, end = f.share(rows)
            with f.loop(begin, end) as loop:
                _Row(f, form, loop.index).emit_gradient(divisor)
        elif form.reduction == "none":
            begin, end = f.share(rows)
            with f.loop(begin, end) as loop:
                loss, _ = _Row(f, form, loop.index).emit_loss()
                store(f, loss, form.element, f.args.pointer("y"), loop.index)
        else:
            begin, end = f.share(pieces(f, rows, BLOCK))
            with f.loop(begin, end) as blocks:
                _emit_block(f, form, blocks.index)
    return form.signature


def _emit_block(f: Kernel, form: CrossEntropy, block: Value) -> None:
    """The sums of losses and weights of a block of rows."""
    first = block * BLOCK
    zero = f.const(f64, 0.0)
    stop = f.min(first + BLOCK, f.args.size("rows"))
    with f.loop(first, stop, carry=(zero, zero)) as loop:
        found = _Row(f, form, loop.index).emit_loss()
        sums = zip(loop.carried, found, strict=True)
        loop.next(*(total + f.convert(v, f64) for total, v in sums))
    for number, total in enumerate(loop.results):
        f.store(total, f.args.pointer("y"), block * 2 + number)


@dataclass(frozen=True)
class _Softmax:
    top: Value
    total: Value
    """Σ e^(v - top)"""


class _Row:
    def __init__(self, f: Kernel, form: CrossEntropy, row: Value) -> None:
        self.f, self.form, self.row = f, form, row
        self.lanes = f.target.lanes(form.type.bits)
        self.classes = f.args.size("classes")
        stored, start = storage_type(form.element), row * self.classes
        self.x = f.gep(stored, f.args.pointer("logits"), start)
        self.y = f.gep(stored, f.args.pointer("y"), start) if form.is_gradient else None

    def emit_loss(self) -> tuple[Value, Value]:
        """The loss of the row and its weight; a row with an ignored label is not read."""
        f, form = self.f, self.form
        label = read_labels(f, form, self.row)
        is_used = f.const(f.eq(self.classes, 0).type, 1)
        if label.is_ignored is not None:
            is_used = f.not_(label.is_ignored)
        with f.if_(is_used, carry=(f.const(form.type, 0.0),)) as branch:
            log_prob = self._at(label.number)
            if not form.from_log_probs:
                found = self._softmax(saves=False)
                log_prob = log_prob - found.top - vector_math.log(f, found.total)
            branch.next(f.neg(log_prob) * label.weight)
        return branch.results[0], label.weight

    def emit_gradient(self, divisor: Value) -> None:
        f, form = self.f, self.form
        label = read_labels(f, form, self.row)
        dy = load_dy(f, form, self.row, 1, None)
        factor = factor_of(f, form, label, divisor, dy)
        here = f.const(form.type, 0.0)
        if form.from_log_probs:
            self._fill(here * factor)
        else:
            chosen = self._at(label.number)
            found = self._softmax(saves=form.saves_powers)
            share = f.div(1.0, found.total)
            self._scale(found.top, share * factor)
            here = exp_nonpositive(f, chosen - found.top) * share
        with f.if_(f.gt(self.classes, 0)):
            assert self.y is not None
            store(f, (here - 1.0) * factor, form.element, self.y, label.number)

    def _at(self, number: Value) -> Value:
        """The logit of a class; there may be no classes."""
        some = self.f.gt(self.classes, 0)
        return load_computed(self.f, self.form.element, 1, self.x, number, mask=some)

    def _load(self, at: Value, mask: Value | None, default: float = 0) -> Value:
        element = self.form.element
        return load_computed(self.f, element, self.lanes, self.x, at, mask=mask, default=default)

    def _softmax(self, saves: bool) -> _Softmax:
        """The maximum and the sum of powers; `saves` writes the powers to the result."""
        f, vector = self.f, self.form.type.vector(self.lanes)

        def highest(at: Value, mask: Value | None, *tops: Value) -> tuple[Value, ...]:
            # the maximum does not propagate NaN, but the powers do
            return (*tops[1:], f.quick_max(self._load(at, mask, -math.inf), tops[0]))

        start = (f.const(vector, -math.inf),) * ACCUMULATORS
        tops = f.vectors(0, self.classes, self.lanes, highest, start, unroll=ACCUMULATORS)
        top = f.reduce(f.combine(tops, f.quick_max), f.quick_max)
        below = f.splat(top, self.lanes)

        def add(at: Value, mask: Value | None, *totals: Value) -> tuple[Value, ...]:
            power = exp_nonpositive(f, self._load(at, mask) - below)
            if saves:
                assert self.y is not None
                f.store(power, self.y, at, mask=mask)
            power = power if mask is None else f.select(mask, power, 0.0)
            return (*totals[1:], totals[0] + power)

        start = (f.const(vector, 0.0),) * ACCUMULATORS
        totals = f.vectors(0, self.classes, self.lanes, add, start, unroll=ACCUMULATORS)
        return _Softmax(top, f.reduce_add(f.combine(totals, f.add)))

    def _scale(self, top: Value, share: Value) -> None:
        """Write the powers times a number."""
        f, form = self.f, self.form
        top, share = f.splat(top, self.lanes), f.splat(share, self.lanes)
        assert self.y is not None
        y = self.y

        def body(at: Value, mask: Value | None) -> None:
            if form.saves_powers:
                power = f.load(form.type.vector(self.lanes), y, at, mask=mask)
            else:
                power = exp_nonpositive(f, self._load(at, mask) - top)
            store(f, power * share, form.element, y, at, mask)

        f.vectors(0, self.classes, self.lanes, body, unroll=2)

    def _fill(self, number: Value) -> None:
        f, form = self.f, self.form
        whole = f.splat(number, self.lanes)
        assert self.y is not None
        y = self.y
        f.vectors(
            0, self.classes, self.lanes, lambda at, mask: store(f, whole, form.element, y, at, mask)
        )
