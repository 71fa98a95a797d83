"""Lowering of dropout (`kernels.elementwise.dropout`)."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.elementwise.dropout import emit_dropout
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.graph import Node


@lowers("dropout")
def lower_dropout(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, key = node.operands
    require_elements(x.dtype)
    rate = float(node.attrs["rate"])
    kernel = ctx.kernel(
        f"dropout_{x.dtype}",
        (x.dtype, rate),
        lambda m, name: emit_dropout(m, name, x.dtype, rate),
    )
    pointers = {"x": ctx.contiguous(x), "key": ctx.contiguous(key)}
    pointers["y"] = ctx.output(node.outputs[0])
    ctx.call(kernel, node, pointers, {"count": x.tensor.count})
