"""Lowering of counts between edges (`kernels.reduce.range_counts`)."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.reduce.range_counts import (
    BLOCK,
    RangeCounts,
    emit_range_counts,
    emit_range_total,
)
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.layout import image_order
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import max_size
from bitwright.ir.graph import Node
from bitwright.ops.math.range_counts import EXTRA


@lowers("range_counts")
def lower_range_counts(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, edges = (region.outer(value) for value in node.operands)
    require_elements(x.dtype)
    if not isinstance(edges.shape[0], int):
        raise NoKernelError("the number of edges is not fixed")
    form = RangeCounts(x.dtype, edges.shape[0])
    data = ctx.ordered(x, image_order(ctx.view(x)))  # counts do not depend on the order
    blocks = (data.count + (BLOCK - 1)) // BLOCK
    partial = ctx.scratch(f"{node.name}.partial", "f64", max_size(blocks, 1) * (form.edges + EXTRA))
    code = ctx.kernel(
        f"range_counts_{x.dtype}", form, lambda m, name: emit_range_counts(m, name, form)
    )
    pointers = {"x": data, "edges": ctx.contiguous(edges), "y": partial}
    sizes = {"count": data.count, "blocks": blocks}
    ctx.call(code, node, pointers, sizes, why="one pass over blocks of values")
    total = ctx.kernel(
        f"range_total_{x.dtype}", form, lambda m, name: emit_range_total(m, name, form)
    )
    results = {"x": partial, "y": ctx.output(node.outputs[0])}
    ctx.call(total, f"{node.name}.total", results, {"blocks": blocks})
