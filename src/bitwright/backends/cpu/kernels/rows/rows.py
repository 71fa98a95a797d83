"""Normalization along contiguous rows (`kernels.rows.formulas`) with prologue and epilogue.

The first pass computes the row's values (residual sums, for example) and saves them in `t`, or in
the result's row where types allow; later passes read them from the first-level cache. Four
accumulators hide the latency of additions. `kernels.rows.row_groups` has the loop over rows and the
passes with a fixed order.

    slots   x0 …  operands of the prologue              w0 …  scale and bias, if present
            e0 …  operands of the epilogue              y     the result
            t     saved rows, if `row_storage` is "t"   n0 …  sizes of the row axes; columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from bitwright.backends.cpu.codegen.emit import Kernel, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import Type, computed, storage_type
from bitwright.backends.cpu.kernels.parameters import KernelParameters
from bitwright.backends.cpu.kernels.rows.formulas import Formula, formula
from bitwright.backends.cpu.lowering.region import STEP, Part, Reads, Row, store
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType
from bitwright.lir.buffer import View

ACCUMULATORS = 4


@dataclass(frozen=True)
class RowKernel(KernelParameters):
    op: str
    attr: float
    """eps or p"""
    before: Part
    x: Reads
    has_scale: bool
    has_bias: bool
    weights: Reads
    after: Part
    extras: Reads
    result: DType

    @cached_property
    def formula(self) -> Formula:
        return formula(self.op, self.attr)

    @property
    def type(self) -> Type:
        """The type that rows are computed and saved in."""
        return computed(self.before.dtype)

    @property
    def is_direct(self) -> bool:
        """Whether passes can reread the operand from memory without conversion."""
        return (
            self.before.is_empty
            and storage_type(self.before.dtype) is self.type
            and STEP not in self.x.columns
        )

    @property
    def row_storage(self) -> str:
        """The slot that saves computed rows: "" (none), "y" or "t"."""
        if self.is_direct and not self.formula.replaces:
            return ""
        return "y" if storage_type(self.result) is self.type else "t"

    def stores(self, number: int) -> bool:
        """Whether a pass saves the values that it computes."""
        changed = self.formula.passes[number].replace is not None
        return changed or (number == 0 and not self.is_direct)

    def rereads(self, number: int) -> bool:
        """Whether a pass reads saved values; the output counts as the pass after the last."""
        return any(self.stores(earlier) for earlier in range(number))

    @property
    def row_axes(self) -> int:
        """The number of row axes."""
        return self.x.rank - 1

    @property
    def slots(self) -> tuple[str, ...]:
        """The pointer slots."""
        kept = ("t",) if self.row_storage == "t" else ()
        return (*self.x.names, *self.weights.names, *self.extras.names, "y", *kept)

    @property
    def strides(self) -> dict[str, Size]:
        return self.x.sizes | self.weights.sizes | self.extras.sizes

    @property
    def signature(self) -> Signature:
        counts = tuple(f"n{axis}" for axis in range(self.row_axes))
        return Signature(self.slots, (*counts, "columns", *self.strides))

    def sizes(self, shape: Sequence[Size]) -> dict[str, Size]:
        counts = {f"n{axis}": size for axis, size in enumerate(shape[:-1])}
        return counts | {"columns": shape[-1]} | self.strides

    @property
    def pointers(self) -> dict[str, View]:
        return self.x.pointers | self.weights.pointers | self.extras.pointers

    def affine(self, f: Kernel, v: Value, weights: Sequence[Value]) -> Value:
        """v * scale + bias, each if present."""
        if self.has_scale and self.has_bias:
            return f.fma(v, weights[0], weights[1])
        if self.has_scale:
            return f.mul(v, weights[0])
        return f.add(v, weights[0]) if self.has_bias else v


class RowEmission:
    """Emits one row."""

    def __init__(self, f: Kernel, kernel: RowKernel, row: Value, index: Sequence[Value]) -> None:
        self.f, self.kernel, self.index = f, kernel, index
        self.formula, self.type = kernel.formula, kernel.type
        self.lanes = f.target.lanes(self.type.bits)
        self.columns = f.args.size("columns")
        start = f.mul(row, self.columns)
        rows = {
            slot: f.gep(type_, f.args.pointer(slot), start)
            for slot, type_ in (("y", storage_type(kernel.result)), ("t", self.type))
            if slot in kernel.slots
        }
        self.y = rows.get("y", start)
        self.kept = rows.get("t", self.y)
        self.x, self.weights, self.extras = (
            reads.at(f, index, self.lanes) for reads in (kernel.x, kernel.weights, kernel.extras)
        )
        self.stats: list[Value] = []

    def reads(self, lanes: int) -> Row:
        """The operands of the prologue in vectors of `lanes`."""
        return self.x if lanes == self.lanes else self.kernel.x.at(self.f, self.index, lanes)

    def value(self, number: int, column: Value, mask: Value | None, x: Row) -> Value:
        """The values that a pass accumulates."""
        step = self.formula.passes[number]
        v = self._value(number, column, mask, x)
        return v if step.replace is None else step.replace(self.f, v, self.stats)

    def save(self, number: int, v: Value, column: Value, mask: Value | None) -> None:
        """Save the values of a pass, if it `stores` them."""
        if self.kernel.stores(number):
            self.f.store(v, self.kept, column, mask=mask)

    def run_pass(self, number: int) -> Value:
        """The result of a pass without a fixed order."""
        f, step = self.f, self.formula.passes[number]

        def body(column: Value, mask: Value | None, *totals: Value) -> tuple[Value, ...]:
            v = self.value(number, column, mask, self.x)
            self.save(number, v, column, mask)
            total = step.accumulate(f, totals[0], v, self.stats)
            if mask is not None:
                total = f.select(mask, total, totals[0])
            return (*totals[1:], total)

        start = (f.const(self.type.vector(self.lanes), step.start),) * ACCUMULATORS
        totals = f.vectors(0, self.columns, self.lanes, body, start, unroll=ACCUMULATORS)
        together = f.combine(totals, partial(step.combine, f))
        total = f.reduce(together, partial(step.combine, f))
        return step.finish(f, total, f.convert(self.columns, self.type))

    def _value(self, number: int, column: Value, mask: Value | None, x: Row) -> Value:
        if self.kernel.rereads(number):
            return self.f.load(self.type.vector(x.lanes), self.kept, column, mask=mask)
        return self.kernel.before.evaluate(self.f, x.load(column, mask), x.lanes)

    def write(self) -> None:
        """Emit the output after the passes."""
        self.f.vectors(0, self.columns, self.lanes, self._write, unroll=2)

    def result(self, column: Value, mask: Value | None) -> Value:
        """The computed output at some columns."""
        f = self.f
        v = self._value(len(self.formula.passes), column, mask, self.x)
        v = self.formula.output(f, v, self.stats)
        v = self.kernel.affine(f, v, self.weights.load(column, mask))
        operands = [v, *self.extras.load(column, mask)]
        return self.kernel.after.evaluate(f, operands, self.lanes)

    def _write(self, column: Value, mask: Value | None) -> None:
        store(self.f, self.result(column, mask), self.kernel.result, self.y, column, mask)
