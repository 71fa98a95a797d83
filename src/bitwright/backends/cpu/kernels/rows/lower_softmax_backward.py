"""Lowering of the gradients of softmax and log_softmax, with an epilogue."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.rows.lower_normalization import ROWS, merged
from bitwright.backends.cpu.kernels.rows.softmax_backward import (
    SoftmaxBackward,
    emit_softmax_backward,
)
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis


@lowers("softmax_backward", "log_softmax_backward")
def lower_softmax_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor, after = region.anchor, regions.split(region).after
    assert anchor is not None
    dy, y = anchor.operands
    regions.require_elements(y.dtype, after.dtype)
    axis = normalize_axis(anchor.attrs["axis"], y.rank)
    along_rows = all(size == 1 for size in y.shape[axis + 1 :])
    views = regions.operand_views(ctx, region, (dy, y, *after.inputs), y.shape)
    if along_rows:
        views = regions.collapse_rows(merged(ctx, node, views, axis))
    else:
        views = regions.collapse(merged(ctx, node, views, axis + 1), keep=2)
    x, extras = regions.Reads("x", views[:2]), regions.Reads("e", views[2:])
    kernel = SoftmaxBackward(anchor.op, y.dtype, along_rows, x, after, extras)
    code = ctx.kernel(
        f"{anchor.op}_{y.dtype}", kernel.key, lambda m, name: emit_softmax_backward(m, name, kernel)
    )
    pointers = {**x.pointers, **extras.pointers, "dx": ctx.output(node.outputs[0])}
    *counts, columns = views[0].shape
    sizes = {f"n{number}": size for number, size in enumerate(counts)} | {"columns": columns}
    why = ROWS if along_rows else "along an inner axis, columns in lanes"
    ctx.call(code, node, pointers, sizes | x.sizes | extras.sizes, writes=("dx",), why=why)
