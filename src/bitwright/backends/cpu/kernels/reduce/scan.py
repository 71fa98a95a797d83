"""Cumulative sums and products along an axis, with lanes along the columns after it.

Floats are accumulated in f64, so a long axis loses no accuracy; integers wrap. Without columns (the
axis is the last) there is one lane. Slots: `k0` … kept axes, `count` the axis, `columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import computed, f64, storage_type
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces, position, product
from bitwright.backends.cpu.lowering.region import Part, Reads, store


@dataclass(frozen=True)
class Scan:
    op: str
    exclusive: bool
    reverse: bool
    before: Part
    x: Reads
    kept: int
    has_columns: bool

    @property
    def key(self) -> tuple[Any, ...]:
        how = self.op, self.exclusive, self.reverse, self.kept, self.has_columns
        return *how, self.before.expression, self.x.key

    @property
    def signature(self) -> Signature:
        kept = [f"k{axis}" for axis in range(self.kept)]
        return Signature((*self.x.names, "y"), (*kept, "count", "columns", *self.x.sizes))


def emit_scan(module: Module, name: str, kernel: Scan) -> Signature:
    element = kernel.before.dtype
    with module.kernel(name, kernel.signature) as f:
        kept = [f.args.size(f"k{axis}") for axis in range(kernel.kept)]
        columns = f.args.size("columns")
        lanes = f.target.lanes(computed(element).bits) if kernel.has_columns else 1
        chunks = pieces(f, columns, lanes)
        space = [*kept, chunks]
        begin, end = f.share(product(f, space))
        with f.loop(begin, end) as loop:
            *index, chunk = position(f, space, loop.index)
            mask = f.mask(columns - chunk * lanes, lanes) if lanes > 1 else None
            row = f.udiv(loop.index, chunks)
            _run(f, kernel, index, row, chunk * lanes, lanes, mask)
    return kernel.signature


def _run(
    f: Kernel,
    kernel: Scan,
    index: Sequence[Value],
    row: Value,
    column: Value,
    lanes: int,
    mask: Value | None,
) -> None:
    element = kernel.before.dtype
    type_ = f64 if element.is_float else computed(element)
    count, columns = f.args.size("count"), f.args.size("columns")
    join = f.mul if kernel.op == "cumprod" else f.add
    start = f.const(type_.vector(lanes), 1 if kernel.op == "cumprod" else 0)
    with f.loop(0, count, carry=(start,)) as loop:
        at = count - 1 - loop.index if kernel.reverse else loop.index
        loaded = kernel.x.at(f, (*index, at), lanes).load(column, mask)
        v = f.convert(kernel.before.evaluate(f, loaded, lanes), type_, element.is_signed)
        total = loop.carried[0]
        after = join(total, v)
        y = f.gep(storage_type(element), f.args.pointer("y"), (row * count + at) * columns + column)
        result = total if kernel.exclusive else after
        store(f, f.convert(result, computed(element)), element, y, 0, mask)
        loop.next(after)
