"""Gradients of softmax and log_softmax from their results y, along rows or along an inner axis.

    softmax_backward      total = Σ dy · y;   dx = y · (dy - total)
    log_softmax_backward  total = Σ dy;       dx = dy - e^y · total

Along an inner axis, lanes run along the contiguous axis behind it, and the total is a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, storage_type
from bitwright.backends.cpu.codegen.emit.types import Type, computed
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces, position, product
from bitwright.backends.cpu.kernels.parameters import KernelParameters
from bitwright.backends.cpu.lowering.region import Part, Reads, Row, store
from bitwright.ir.dtype import DType

ACCUMULATORS = 4
VECTORS = 4
"""Vectors of columns that are computed together, as one wide vector."""


@dataclass(frozen=True)
class SoftmaxBackward(KernelParameters):
    """The operands dy and y; their last axis is that of the sum, or the one behind it."""

    op: str
    element: DType
    along_rows: bool
    x: Reads
    after: Part
    extras: Reads

    @property
    def type(self) -> Type:
        return computed(self.element)

    @property
    def axes(self) -> int:
        """The number of axes before the last."""
        return self.x.rank - 1

    @property
    def signature(self) -> Signature:
        counts = tuple(f"n{axis}" for axis in range(self.axes))
        sizes = (*counts, "columns", *self.x.sizes, *self.extras.sizes)
        return Signature((*self.x.names, *self.extras.names, "dx"), sizes)

    def accumulate(self, f: Kernel, total: Value, dy: Value, y: Value) -> Value:
        return f.fma(dy, y, total) if self.op == "softmax_backward" else total + dy

    def result(self, f: Kernel, total: Value, dy: Value, y: Value) -> Value:
        if self.op == "softmax_backward":
            return y * (dy - total)
        return f.fma(vector_math.exp(f, y), f.neg(total), dy)

    def write(
        self, f: Kernel, rows: tuple[Row, Row], total: Value, column: Value, mask: Value | None
    ) -> Value:
        """The result of the epilogue at some columns."""
        x, extras = rows
        dx = self.result(f, total, *x.load(column, mask))
        return self.after.evaluate(f, [dx, *extras.load(column, mask)], x.lanes)


def emit_softmax_backward(module: Module, name: str, kernel: SoftmaxBackward) -> Signature:
    with module.kernel(name, kernel.signature) as f:
        counts = [f.args.size(f"n{axis}") for axis in range(kernel.axes)]
        (_emit_rows if kernel.along_rows else _emit_columns)(f, kernel, counts)
    return kernel.signature


def _emit_rows(f: Kernel, kernel: SoftmaxBackward, counts: list[Value]) -> None:
    lanes, columns = f.target.lanes(kernel.type.bits), f.args.size("columns")
    zero = f.const(kernel.type.vector(lanes), 0.0)
    begin, end = f.share(product(f, counts))
    with f.loop(begin, end) as loop:
        index = position(f, counts, loop.index)
        x, extras = (reads.at(f, index, lanes) for reads in (kernel.x, kernel.extras))

        def fold(column: Value, mask: Value | None, *totals: Value) -> tuple[Value, ...]:
            total = kernel.accumulate(f, totals[0], *x.load(column, mask))
            if mask is not None:  # a broadcast operand has values in all lanes
                total = f.select(mask, total, totals[0])
            return (*totals[1:], total)

        start = (zero,) * ACCUMULATORS
        totals = f.vectors(0, columns, lanes, fold, start, unroll=ACCUMULATORS)
        total = f.splat(f.reduce_add(f.combine(totals, f.add)), lanes)
        to = f.gep(storage_type(kernel.after.dtype), f.args.pointer("dx"), loop.index * columns)

        def body(column: Value, mask: Value | None) -> None:
            v = kernel.write(f, (x, extras), total, column, mask)
            store(f, v, kernel.after.dtype, to, column, mask)

        f.vectors(0, columns, lanes, body, unroll=2)


def _emit_columns(f: Kernel, kernel: SoftmaxBackward, counts: list[Value]) -> None:
    lanes, columns = VECTORS * f.target.lanes(kernel.type.bits), f.args.size("columns")
    *outer, size = counts
    chunks = pieces(f, columns, lanes)
    begin, end = f.share(product(f, (*outer, chunks)))
    with f.loop(begin, end) as loop:
        *index, chunk = position(f, [*outer, chunks], loop.index)
        column = chunk * lanes
        mask = f.mask(columns - column, lanes)
        zero = f.const(kernel.type.vector(lanes), 0.0)
        with f.loop(0, size, carry=(zero,)) as steps:
            x = kernel.x.at(f, (*index, steps.index), lanes)
            total = kernel.accumulate(f, steps.carried[0], *x.load(column, mask))
            steps.next(total)
        (total,) = steps.results
        first = f.udiv(loop.index, chunks) * size
        with f.loop(0, size) as steps:
            rows = tuple(
                reads.at(f, (*index, steps.index), lanes) for reads in (kernel.x, kernel.extras)
            )
            v = kernel.write(f, (rows[0], rows[1]), total, column, mask)
            at = (first + steps.index) * columns + column
            store(f, v, kernel.after.dtype, f.args.pointer("dx"), at, mask)
