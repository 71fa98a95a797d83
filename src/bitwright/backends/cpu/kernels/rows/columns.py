"""Normalization along an inner axis (`kernels.rows.formulas`), one vector of columns at a time.

The loop strides along the axis; lanes run along the contiguous axis after it, so reductions need no
horizontal step. `kernels.rows.rows` defines the parameters; views have the axis as last but one.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, storage_type
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces, position, product
from bitwright.backends.cpu.kernels.rows.rows import RowKernel
from bitwright.backends.cpu.lowering.region import store


def emit_columns(module: Module, name: str, kernel: RowKernel) -> Signature:
    with module.kernel(name, kernel.signature) as f:
        axes = [f.args.size(f"n{axis}") for axis in range(kernel.row_axes)]
        lanes = f.target.lanes(kernel.type.bits)
        chunks = pieces(f, f.args.size("columns"), lanes)
        space = [*axes[:-1], chunks]
        begin, end = f.share(product(f, space))
        with f.loop(begin, end) as loop:
            *outer, chunk = position(f, space, loop.index)
            row = f.udiv(loop.index, chunks)
            _Emission(f, kernel, outer, row, chunk * lanes, lanes).emit(axes[-1])
    return kernel.signature


class _Emission:
    """Emits one vector of columns."""

    def __init__(
        self,
        f: Kernel,
        kernel: RowKernel,
        outer: Sequence[Value],
        row: Value,
        column: Value,
        lanes: int,
    ) -> None:
        self.f, self.kernel, self.outer = f, kernel, tuple(outer)
        self.row, self.column, self.lanes = row, column, lanes
        self.formula, self.type = kernel.formula, kernel.type
        self.columns = f.args.size("columns")
        self.mask = f.mask(f.sub(self.columns, column), lanes)
        self.stats: list[Value] = []

    def emit(self, size: Value) -> None:
        f = self.f
        count = f.convert(size, self.type)
        for number in range(len(self.formula.passes)):
            self._run_pass(number, size, count)
        with f.loop(0, size) as loop:
            self._write(loop.index, size)

    def _place(self, at: Value, size: Value) -> Value:
        """The offset of the columns in the result."""
        f = self.f
        return f.add(f.mul(f.add(f.mul(self.row, size), at), self.columns), self.column)

    def _run_pass(self, number: int, size: Value, count: Value) -> None:
        f, step = self.f, self.formula.passes[number]
        start = f.const(self.type.vector(self.lanes), step.start)
        with f.loop(0, size, carry=(start,)) as loop:
            v = self._value(number, loop.index, size)
            if step.replace is not None:
                v = step.replace(f, v, self.stats)
            if self.kernel.stores(number):
                kept = f.args.pointer(self.kernel.row_storage)
                f.store(v, kept, self._place(loop.index, size), mask=self.mask)
            loop.next(step.accumulate(f, loop.carried[0], v, self.stats))
        self.stats.append(step.finish(f, loop.results[0], f.splat(count, self.lanes)))

    def _value(self, number: int, at: Value, size: Value) -> Value:
        f = self.f
        if self.kernel.rereads(number):
            vector, kept = self.type.vector(self.lanes), f.args.pointer(self.kernel.row_storage)
            return f.load(vector, kept, self._place(at, size), mask=self.mask)
        loaded = self.kernel.x.at(f, (*self.outer, at), self.lanes).load(self.column, self.mask)
        return self.kernel.before.evaluate(f, loaded, self.lanes)

    def _write(self, at: Value, size: Value) -> None:
        f, kernel = self.f, self.kernel
        index = (*self.outer, at)
        v = self._value(len(self.formula.passes), at, size)
        v = self.formula.output(f, v, self.stats)
        weights = kernel.weights.at(f, index, self.lanes).load(self.column, self.mask)
        v = kernel.affine(f, v, weights)
        extras = kernel.extras.at(f, index, self.lanes).load(self.column, self.mask)
        v = kernel.after.evaluate(f, [v, *extras], self.lanes)
        y = f.gep(storage_type(kernel.result), f.args.pointer("y"), self._place(at, size))
        store(f, v, kernel.result, y, 0, self.mask)
