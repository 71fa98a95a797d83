"""Lowering of the gradients of layer_norm, rms_norm and group_norm."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.rows import group_norm_backward, norm_backward
from bitwright.backends.cpu.kernels.rows.sum_blocks import call_sum_blocks, rows_per_block
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.ir.dim import max_size, product
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis


@lowers("layer_norm_backward", "rms_norm_backward")
def lower_norm_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    dy, x, scale = (*node.inputs, None)[:3]
    assert dy is not None and x is not None
    regions.require_elements(x.dtype)
    axis = normalize_axis(node.attrs["axis"], x.rank)
    rows, columns = product(x.shape[:axis]), product(x.shape[axis:])
    has_sums = any(ctx.graph.uses[value] for value in node.outputs[1:])
    form = norm_backward.NormBackward(
        x.dtype,
        node.op == "layer_norm_backward",
        node.attrs["eps"],
        scale is not None,
        has_sums,
    )
    pointers = {"dy": ctx.contiguous(dy), "x": ctx.contiguous(x), "dx": ctx.output(node.outputs[0])}
    if scale is not None:
        view = regions.broadcast(ctx.view(scale), x.shape[axis:])
        pointers["scale"] = ctx.packed(view, scale.name)
    block = rows_per_block(rows)
    blocks = (rows + block - 1) // block
    if has_sums:
        sums = "f64" if x.dtype.name == "f64" else "f32"
        count = max_size(blocks * columns * 2, 1)
        pointers["partial"] = ctx.scratch(f"{node.name}.partial", sums, count)
    code = ctx.kernel(
        f"{node.op}_{x.dtype}",
        form,
        lambda m, name: norm_backward.emit_norm_backward(m, name, form),
    )
    sizes = {"rows": rows, "columns": columns, "block": block}
    writes = ("dx", "partial") if has_sums else ("dx",)
    ctx.call(code, node, pointers, sizes, writes=writes, why="groups of contiguous rows")
    if has_sums:
        results = [ctx.output(value) for value in node.outputs[1:]]
        call_sum_blocks(ctx, node, pointers["partial"], results, blocks, columns)


@lowers("group_norm_backward")
def lower_group_norm_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    dy, x, scale = (*node.inputs, None)[:3]
    assert dy is not None and x is not None
    regions.require_elements(x.dtype)
    batches, channels = x.shape[:2]
    groups = node.attrs["groups"]
    form = group_norm_backward.GroupNormBackward(x.dtype, node.attrs["eps"], scale is not None)
    sums = "f64" if x.dtype.name == "f64" else "f32"
    partial = ctx.scratch(f"{node.name}.partial", sums, max_size(batches * channels * 2, 1))
    dx, *results = (ctx.output(value) for value in node.outputs)
    pointers = {"dy": ctx.contiguous(dy), "x": ctx.contiguous(x), "dx": dx, "partial": partial}
    if scale is not None:
        pointers["scale"] = ctx.contiguous(scale)
    code = ctx.kernel(
        f"group_norm_backward_{x.dtype}",
        form,
        lambda m, name: group_norm_backward.emit_group_norm_backward(m, name, form),
    )
    sizes = {
        "batches": batches,
        "groups": groups,
        "channels": channels // groups,
        "columns": product(x.shape[2:]),
    }
    ctx.call(code, node, pointers, sizes, writes=("dx", "partial"))
    call_sum_blocks(ctx, node, partial, results, batches, channels)
