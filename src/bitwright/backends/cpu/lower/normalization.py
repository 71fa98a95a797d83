"""Norms and softmax: along contiguous rows, or along an inner axis for many columns at once."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.kernels.columns import emit_columns
from bitwright.backends.cpu.kernels.rows import RowKernel, emit_rows
from bitwright.backends.cpu.lowering import Lowering, RegionView, lowers
from bitwright.backends.cpu.region import (
    Reads,
    collapse,
    collapse_rows,
    operand_views,
    require_elements,
    reshaped,
    split,
)
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View


@lowers("layer_norm", "rms_norm", "softmax", "log_softmax", "lp_norm")
def lower_normalization(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    parts = split(region)
    before, after = parts.before, parts.after
    require_elements(before.dtype, after.dtype)
    shape = anchor.outputs[0].shape
    axis = normalize_axis(anchor.attrs["axis"], len(shape))
    trailing = anchor.op in ("layer_norm", "rms_norm")
    along_rows = trailing or all(size == 1 for size in shape[axis + 1 :])
    weights = [value for value in anchor.inputs[1:] if value is not None]
    views = operand_views(ctx, region, (*before.inputs, *weights, *after.inputs), shape)
    if along_rows:
        views = collapse_rows(merged(ctx, node, views, axis))
    else:
        views = collapse(merged(ctx, node, views, axis + 1), keep=2)
    first, second = len(before.inputs), len(before.inputs) + len(weights)
    kernel = RowKernel(
        anchor.op,
        anchor.attrs.get("eps", anchor.attrs.get("p", 0)),
        before,
        Reads("x", views[:first]),
        len(anchor.inputs) > 1 and anchor.inputs[1] is not None,
        len(anchor.inputs) > 2 and anchor.inputs[2] is not None,
        Reads("w", views[first:second]),
        after,
        Reads("e", views[second:]),
        after.dtype,
    )
    y = ctx.output(node.outputs[0])
    pointers, writes = {**kernel.pointers, "y": y}, ["y"]
    if kernel.keeps == "t":
        kept = "f64" if before.dtype.name == "f64" else "f32"
        pointers["t"] = ctx.scratch(f"{node.name}.rows", kept, y.count)
        writes.append("t")
    emit = emit_rows if along_rows else emit_columns
    code = ctx.kernel(anchor.op, (along_rows, kernel.key), lambda m, name: emit(m, name, kernel))
    why = "along contiguous rows" if along_rows else "along an inner axis, columns in lanes"
    ctx.call(code, node, pointers, kernel.sizes(views[0].shape), writes=writes, why=why)


def merged(ctx: Lowering, node: Node, views: Sequence[View], axis: int) -> list[View]:
    """The views with all axes from `axis` on as one; copied where their strides forbid it."""
    shape = views[0].shape
    target: tuple[Size, ...] = (*shape[:axis], product(shape[axis:]))
    return [reshaped(ctx, view, target, node.name) for view in views]
