"""Gradients of layer_norm and rms_norm along contiguous rows.

With n columns, c = x - mean (x for rms_norm), r = 1 / √(Σ c² / n + eps) and g = dy · scale:

    first pass    mean                          of layer_norm only
    second pass   Σ c², Σ g, Σ g · c            the normalized value is c · r
    third pass    dx = r · (g - Σ g / n - c · r² · Σ g · c / n)
                  partial sums over rows: dscale += dy · c · r, dbias += dy

A group of rows goes through the passes together: their sums are independent, and partial sums are
read and written once per group. Threads share blocks of rows (`kernels.rows.sum_blocks`), which
have partial sums of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, storage_type
from bitwright.backends.cpu.codegen.emit.types import computed
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.kernels.rows.sum_blocks import GROUP
from bitwright.backends.cpu.lowering.region import store
from bitwright.ir.dtype import DType


@dataclass(frozen=True)
class NormBackward:
    element: DType
    is_centred: bool
    """Whether the mean is subtracted: layer_norm."""
    eps: float
    has_scale: bool
    has_sums: bool
    """Whether dscale or dbias is needed."""

    @property
    def signature(self) -> Signature:
        scale, partial = ("scale",) * self.has_scale, ("partial",) * self.has_sums
        return Signature(("dy", "x", *scale, "dx", *partial), ("rows", "columns", "block"))


def emit_norm_backward(module: Module, name: str, form: NormBackward) -> Signature:
    with module.kernel(name, form.signature) as f:
        rows, block = f.args.size("rows"), f.args.size("block")
        begin, end = f.share(f.udiv(rows + (block - 1), block))
        with f.loop(begin, end) as loop:
            first = loop.index * block
            _Block(f, form, loop.index).emit(first, f.min(first + block, rows))
    return form.signature


class _Block:
    """Emits the rows of one block."""

    def __init__(self, f: Kernel, form: NormBackward, block: Value) -> None:
        self.f, self.form = f, form
        self.type, self.stored = computed(form.element), storage_type(form.element)
        self.lanes = f.target.lanes(self.type.bits)
        self.vector = self.type.vector(self.lanes)
        self.columns = f.args.size("columns")
        self.sums: list[Value] = []
        if form.has_sums:
            at = block * 2 * self.columns
            dscale = f.gep(self.type, f.args.pointer("partial"), at)
            self.sums = [dscale, f.gep(self.type, dscale, self.columns)]

    def emit(self, first: Value, last: Value) -> None:
        f = self.f
        if self.sums:
            f.vectors(0, self.columns, self.lanes, self._clear)
        count = GROUP if f.target.vector_registers >= 32 else GROUP // 2
        whole = last - f.urem(last - first, count)
        with f.loop(first, whole, count) as loop:
            self._emit_rows([loop.index + row for row in range(count)])
        with f.loop(whole, last) as loop:
            self._emit_rows([loop.index])

    def _clear(self, column: Value, mask: Value | None) -> None:
        for pointer in self.sums:
            self.f.store(self.f.const(self.vector, 0.0), pointer, column, mask=mask)

    def _emit_rows(self, rows: Sequence[Value]) -> None:
        f = self.f
        starts = [f.mul(row, self.columns) for row in rows]
        x, dy, dx = (
            [f.gep(self.stored, f.args.pointer(name), start) for start in starts]
            for name in ("x", "dy", "dx")
        )
        count = f.convert(self.columns, self.type)
        means = [f.const(self.vector, 0.0)] * len(rows)
        if self.form.is_centred:
            sums = self._sum_columns(x)
            means = [self._spread(f.div(total, count)) for total in sums]
        rates, shifts, slopes = [], [], []
        for squares, gradients, products in self._sum_products(x, dy, means):
            rate = f.div(1.0, f.sqrt(f.add(f.div(squares, count), self.form.eps)))
            rates.append(self._spread(rate))
            shifts.append(self._spread(f.div(gradients, count)))
            slopes.append(self._spread(f.neg(f.div(products, count) * rate)))
        self._write(x, dy, dx, (means, rates, shifts, slopes))

    def _spread(self, number: Value) -> Value:
        return self.f.splat(number, self.lanes)

    def _load(self, row: Value, column: Value, mask: Value | None) -> Value:
        return load_computed(self.f, self.form.element, self.lanes, row, column, mask=mask)

    def _scale(self, column: Value, mask: Value | None) -> Value | None:
        if not self.form.has_scale:
            return None
        return self._load(self.f.args.pointer("scale"), column, mask)

    def _sum_columns(self, x: Sequence[Value]) -> list[Value]:
        """The sum of each row."""
        f = self.f

        def body(column: Value, mask: Value | None, *totals: Value) -> list[Value]:
            return [
                total + self._load(row, column, mask) for total, row in zip(totals, x, strict=True)
            ]

        start = [f.const(self.vector, 0.0)] * len(x)
        totals = f.vectors(0, self.columns, self.lanes, body, start, unroll=2)
        return [f.reduce_add(total) for total in totals]

    def _sum_products(
        self, x: Sequence[Value], dy: Sequence[Value], means: Sequence[Value]
    ) -> list[tuple[Value, Value, Value]]:
        """Σ c², Σ g and Σ g · c of each row."""
        f, is_centred = self.f, self.form.is_centred
        zero = f.const(self.vector, 0.0)

        def body(column: Value, mask: Value | None, *totals: Value) -> list[Value]:
            scale, found = self._scale(column, mask), []
            for number, mean in enumerate(means):
                squares, gradients, products = totals[3 * number : 3 * number + 3]
                c = self._load(x[number], column, mask)
                g = self._load(dy[number], column, mask)
                if scale is not None:
                    g = g * scale
                if is_centred:
                    c = c - mean
                    c = c if mask is None else f.select(mask, c, 0.0)
                    gradients = gradients + g
                found += [f.fma(c, c, squares), gradients, f.fma(g, c, products)]
            return found

        totals = f.vectors(0, self.columns, self.lanes, body, [zero] * (3 * len(x)))
        sums = [f.reduce_add(total) for total in totals]
        return list(zip(sums[::3], sums[1::3], sums[2::3], strict=True))

    def _write(
        self,
        x: Sequence[Value],
        dy: Sequence[Value],
        dx: Sequence[Value],
        stats: tuple[Sequence[Value], ...],
    ) -> None:
        f, form = self.f, self.form

        def body(column: Value, mask: Value | None) -> None:
            scale = self._scale(column, mask)
            loaded = [
                (self._load(there, column, mask), self._load(here, column, mask))
                for here, there in zip(x, dy, strict=True)
            ]
            sums = [f.load(self.vector, pointer, column, mask=mask) for pointer in self.sums]
            results = []
            for (g, c), mean, rate, shift, slope in zip(loaded, *stats, strict=True):
                c = (c - mean) * rate if form.is_centred else c * rate
                if sums:
                    sums = [f.fma(g, c, sums[0]), sums[1] + g]
                g = g if scale is None else g * scale
                g = g - shift if form.is_centred else g
                results.append(f.fma(c, slope, g) * rate)
            for result, row in zip(results, dx, strict=True):
                store(f, result, form.element, row, column, mask)
            for total, pointer in zip(sums, self.sums, strict=True):
                f.store(total, pointer, column, mask=mask)

        f.vectors(0, self.columns, self.lanes, body)
