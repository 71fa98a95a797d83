"""Sums over rows as partial sums of blocks, which one kernel writes and another adds up.

    partial[block][number][column]                      -> y<number>[column] = Σ partial[block]

Blocks depend on sizes alone and are added in order, so results do not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import computed
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.lowering.region import store
from bitwright.ir.dim import Size, max_size, min_size
from bitwright.ir.dtype import DType
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View

BLOCK = 64
"""Rows of a block, if there are many."""
LEAST_BLOCKS, GROUP = 16, 4
"""Fewer rows are divided into this many blocks, each a multiple of a group of rows."""


def rows_per_block(rows: Size) -> Size:
    """The number of rows whose sums are added up by one thread."""
    groups = (rows + (LEAST_BLOCKS * GROUP - 1)) // (LEAST_BLOCKS * GROUP)
    return min_size(max_size(groups, 1) * GROUP, BLOCK)


@dataclass(frozen=True)
class SumBlocks:
    element: DType
    """The element type of the results; partial sums have its computed type."""
    results: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"y{number}" for number in range(self.results))

    @property
    def signature(self) -> Signature:
        return Signature(("x", *self.names), ("blocks", "columns"))


def emit_sum_blocks(module: Module, name: str, form: SumBlocks) -> Signature:
    type_ = computed(form.element)
    with module.kernel(name, form.signature) as f:
        lanes = f.target.lanes(type_.bits)
        blocks, columns = f.args.size("blocks"), f.args.size("columns")
        chunks = pieces(f, columns, lanes)
        begin, end = f.share(chunks * form.results)
        with f.loop(begin, end) as loop:
            number = f.udiv(loop.index, chunks)
            column = (loop.index - number * chunks) * lanes
            mask = f.mask(columns - column, lanes)
            zero = f.const(type_.vector(lanes), 0.0)
            with f.loop(0, blocks, carry=(zero,)) as rows:
                at = (rows.index * form.results + number) * columns + column
                row = f.load(zero.type, f.args.pointer("x"), at, mask=mask)
                rows.next(rows.carried[0] + row)
            to: Value = f.args.pointer("y0")
            for other in range(1, form.results):
                to = f.select(f.eq(number, other), f.args.pointer(f"y{other}"), to)
            store(f, rows.results[0], form.element, to, column, mask)
    return form.signature


def call_sum_blocks(
    ctx: Lowering, node: Node, partial: View, results: Sequence[View], blocks: Size, columns: Size
) -> None:
    """Append the step that adds up the blocks of partial sums."""
    form = SumBlocks(results[0].dtype, len(results))
    code = ctx.kernel(
        f"sum_blocks_{form.element}", form, lambda m, name: emit_sum_blocks(m, name, form)
    )
    pointers = {"x": partial, **dict(zip(form.names, results, strict=True))}
    ctx.call(code, node, pointers, {"blocks": blocks, "columns": columns}, writes=form.names)
