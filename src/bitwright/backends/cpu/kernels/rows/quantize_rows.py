"""Dynamic 8-bit quantization of rows with a scale and zero point per row, fused with a norm.

    v        the prologue, an optional norm, and the epilogue (`kernels.rows.rows`)
    scale    (max(v, 0) - min(v, 0)) / levels, or 1 for a row of zeros
    zero     rne(clip(lowest - min(v, 0) / scale))
    q        saturate(rne(v / scale) + zero)

The range is accumulated while v is computed; a second pass over the row, then in the first-level
cache, quantizes. A NaN in a row makes its scale NaN.

Division by the scale uses multiplications (`codegen.math.division`). Quotients below 1/2, where
these might underflow, quantize to 0 either way; rows with a very small or large scale use real
divisions.

    slots   those of `kernels.rows.rows`, and c0 … operands of the expression from y to v;
            q, scale, zero; y only if it has other readers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import computed, storage_type
from bitwright.backends.cpu.codegen.math.division import divider
from bitwright.backends.cpu.codegen.scalars import round_clamped
from bitwright.backends.cpu.kernels.matmul.epilogue import is_light
from bitwright.backends.cpu.kernels.rows.row_groups import emit_each_row
from bitwright.backends.cpu.kernels.rows.rows import ACCUMULATORS, RowEmission, RowKernel
from bitwright.backends.cpu.lowering.region import Part, Reads, store
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, f32
from bitwright.lir.buffer import View

_SMALLEST, _LARGEST = 2.0**-60, 2.0**100
"""The range of scales for which multiplication gives exact quotients."""


@dataclass(frozen=True)
class QuantizedRows(RowKernel):
    """A row kernel with quantized results."""

    quantize_operand: Part
    """The expression from the row kernel's result to the quantized operand."""
    quantized_extras: Reads
    stores_result: bool
    """Whether the row kernel's result is also stored."""
    to: DType

    @property
    def row_storage(self) -> str:
        if self.formula.passes:
            return "t" if super().row_storage and not self.stores_result else super().row_storage
        return "" if self.is_direct or is_light(self.before.expression) else "t"

    @property
    def slots(self) -> tuple[str, ...]:
        base = [name for name in super().slots if name != "y" or self.stores_result]
        return (*base, *self.quantized_extras.names, "q", "scale", "zero")

    @property
    def strides(self) -> dict[str, Size]:
        return super().strides | self.quantized_extras.sizes

    @property
    def pointers(self) -> dict[str, View]:
        return super().pointers | self.quantized_extras.pointers


def emit_quantize_rows(module: Module, name: str, kernel: QuantizedRows) -> Signature:
    return emit_each_row(module, name, kernel, _Emission)


class _Emission(RowEmission):
    kernel: QuantizedRows

    def __init__(
        self, f: Kernel, kernel: QuantizedRows, row: Value, index: Sequence[Value]
    ) -> None:
        super().__init__(f, kernel, row, index)
        self.row = row
        self.q = f.gep(storage_type(kernel.to), f.args.pointer("q"), f.mul(row, self.columns))
        self.quantized_extras = kernel.quantized_extras.at(f, index, self.lanes)
        self.saves_operand = not self.formula.passes and kernel.row_storage == "t"

    def write(self) -> None:
        f = self.f
        top, bottom, is_nan = self._range()
        low, high = float(self.kernel.to.min), float(self.kernel.to.max)
        spread = f.div(f.sub(top, bottom), high - low)
        scale = f.select(f.eq(top, bottom), 1.0, spread)
        scale = f.select(is_nan, math.nan, scale)
        point = f.sub(low, f.div(bottom, scale))
        zero = f.round_to_int(f.quick_min(f.quick_max(point, low), high))
        f.store(scale, f.args.pointer("scale"), self.row)
        narrow_zero = f.convert(zero, computed(self.kernel.to))
        store(f, narrow_zero, self.kernel.to, f.args.pointer("zero"), self.row)
        moved = f.convert(zero, self.type)
        self.bounds = [f.splat(f.sub(bound, moved), self.lanes) for bound in (low, high)]
        self.zero = f.splat(zero, self.lanes)
        by_scale = divider(f, scale, self.lanes)
        if not f.target.has_fma:
            self._write_qvalues(by_scale)
            return
        safe = f.and_(f.ge(scale, _SMALLEST), f.le(scale, _LARGEST))
        with f.if_(safe) as branch:
            self._write_qvalues(by_scale)
        with branch.else_():
            self._write_qvalues(lambda v: f.div(v, f.splat(scale, self.lanes)))

    def _range(self) -> tuple[Value, Value, Value]:
        """The maximum and minimum of the row and 0, and whether it contains NaN."""
        f = self.f

        def body(column: Value, mask: Value | None, *totals: Value) -> tuple[Value, ...]:
            v = self._quantize_operand(column, mask, first=True)
            if mask is not None:
                v = f.select(mask, v, 0.0)
            top, bottom, has_nan = totals[:3]
            found = (f.quick_max(v, top), f.quick_min(v, bottom), f.select(f.is_nan(v), v, has_nan))
            return (*totals[3:], *found)

        zeros = (f.const(self.type.vector(self.lanes), 0.0),) * (3 * ACCUMULATORS)
        totals = f.vectors(0, self.columns, self.lanes, body, zeros, unroll=ACCUMULATORS)
        top, bottom = (
            f.reduce(f.combine(totals[number::3], join), join)
            for number, join in enumerate((f.quick_max, f.quick_min))
        )
        has_nan = f.combine([f.is_nan(total) for total in totals[2::3]], f.or_)
        return top, bottom, f.any(has_nan)

    def _quantize_operand(self, column: Value, mask: Value | None, first: bool) -> Value:
        """The operand of the quantization; `first` is the pass that computes the range."""
        f, kernel = self.f, self.kernel
        vector = self.type.vector(self.lanes)
        if self.saves_operand and not first:
            return f.load(vector, self.kept, column, mask=mask)
        if kernel.stores_result and not first:
            y = f.load(vector, self.y, column, mask=mask)
        else:
            y = self.result(column, mask)
        if kernel.stores_result and first:
            store(f, y, f32, self.y, column, mask)
        v = kernel.quantize_operand.evaluate(
            f, [y, *self.quantized_extras.load(column, mask)], self.lanes
        )
        if self.saves_operand:
            f.store(v, self.kept, column, mask=mask)
        return v

    def _write_qvalues(self, divide: Callable[[Value], Value]) -> None:
        f, to = self.f, self.kernel.to

        def body(column: Value, mask: Value | None) -> None:
            quotient = divide(self._quantize_operand(column, mask, first=False))
            q = f.add(round_clamped(f, quotient, *self.bounds), self.zero)
            store(f, f.convert(q, computed(to)), to, self.q, column, mask)

        f.vectors(0, self.columns, self.lanes, body, unroll=2)
