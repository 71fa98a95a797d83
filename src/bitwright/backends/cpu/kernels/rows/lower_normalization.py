"""Lowering of norms, softmax and dynamic quantization: along rows, or along an inner axis."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.kernels.rows.columns import emit_columns
from bitwright.backends.cpu.kernels.rows.quantize_rows import QuantizedRows, emit_quantize_rows
from bitwright.backends.cpu.kernels.rows.row_groups import emit_rows
from bitwright.backends.cpu.kernels.rows.rows import RowKernel
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View

ROWS = "along contiguous rows"


@lowers("layer_norm", "rms_norm", "softmax", "log_softmax", "lp_norm")
def lower_normalization(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    if quantize_node(region) is not None:
        lower_quantize_rows(ctx, node, region)
        return
    parts = regions.split(region)
    before, after = parts.before, parts.after
    regions.require_elements(before.dtype, after.dtype)
    shape = anchor.outputs[0].shape
    axis = normalize_axis(anchor.attrs["axis"], len(shape))
    trailing = anchor.op in ("layer_norm", "rms_norm")
    along_rows = trailing or all(size == 1 for size in shape[axis + 1 :])
    weights = [value for value in anchor.inputs[1:] if value is not None]
    views = regions.operand_views(ctx, region, (*before.inputs, *weights, *after.inputs), shape)
    if along_rows:
        views = regions.collapse_rows(merged(ctx, node, views, axis))
    else:
        views = regions.collapse(merged(ctx, node, views, axis + 1), keep=2)
    first, second = len(before.inputs), len(before.inputs) + len(weights)
    kernel = RowKernel(
        anchor.op,
        anchor.attrs.get("eps", anchor.attrs.get("p", 0)),
        before,
        regions.Reads("x", views[:first]),
        len(anchor.inputs) > 1 and anchor.inputs[1] is not None,
        len(anchor.inputs) > 2 and anchor.inputs[2] is not None,
        regions.Reads("w", views[first:second]),
        after,
        regions.Reads("e", views[second:]),
        after.dtype,
    )
    y = ctx.output(node.outputs[0])
    pointers, writes = {**kernel.pointers, "y": y}, ["y"]
    if kernel.row_storage == "t":
        kept = "f64" if before.dtype.name == "f64" else "f32"
        pointers["t"] = ctx.scratch(f"{node.name}.rows", kept, y.count)
        writes.append("t")
    emit = emit_rows if along_rows else emit_columns
    family = f"{anchor.op}_{before.dtype}"
    code = ctx.kernel(family, (along_rows, kernel.key), lambda m, name: emit(m, name, kernel))
    why = ROWS if along_rows else "along an inner axis, columns in lanes"
    ctx.call(code, node, pointers, kernel.sizes(views[0].shape), writes=writes, why=why)


@lowers("dynamic_quantize")
def lower_quantize_rows(ctx: Lowering, node: Node, region: RegionView) -> None:
    """Quantize rows, possibly after a norm; the norm's result is the last output if it has other
    readers."""
    anchor, quantize = region.anchor, quantize_node(region)
    assert anchor is not None and quantize is not None and quantize.inputs[0] is not None
    is_norm, stores_result = anchor is not quantize, len(node.outputs) > 3
    operand = quantize.inputs[0]
    shown = region.body.outputs[3][1] if region.body is not None and stores_result else operand
    before = regions.part_before(region)
    source = anchor.outputs[0] if is_norm else operand
    after, quantize_operand = (
        regions.part_between(region, source, shown),
        regions.part_between(region, shown, operand),
    )
    weights = [value for value in anchor.inputs[1:] if value is not None]
    shape = operand.shape
    axis = normalize_axis(anchor.attrs["axis"], len(shape)) if is_norm else len(shape) - 1
    groups = (before.inputs, weights, after.inputs, quantize_operand.inputs)
    values = [value for group in groups for value in group]
    views = iter(
        regions.collapse_rows(
            merged(ctx, node, regions.operand_views(ctx, region, values, shape), axis)
        )
    )
    x, w, e, c = (
        regions.Reads(k, [next(views) for _ in g]) for k, g in zip("xwec", groups, strict=True)
    )
    kernel = QuantizedRows(
        anchor.op,
        anchor.attrs.get("eps", 0),
        before,
        x,
        len(anchor.inputs) > 1 and anchor.inputs[1] is not None,
        len(anchor.inputs) > 2 and anchor.inputs[2] is not None,
        w,
        after,
        e,
        after.dtype,
        quantize_operand,
        c,
        stores_result,
        quantize.outputs[0].dtype,
    )
    writes = ["q", "scale", "zero", *(["y"] if stores_result else [])]
    results = {slot: ctx.output(v) for slot, v in zip(writes, node.outputs, strict=True)}
    if kernel.row_storage == "t":
        results["t"] = ctx.scratch(f"{node.name}.rows", "f32", operand.tensor.count)
    family = f"{f'{anchor.op}_' if is_norm else ''}dynamic_quantize_rows_{kernel.to}"
    code = ctx.kernel(family, kernel.key, lambda m, name: emit_quantize_rows(m, name, kernel))
    pointers, sizes = {**kernel.pointers, **results}, kernel.sizes(x.views[0].shape)
    ctx.call(code, node, pointers, sizes, writes=list(results), why=ROWS)


def quantize_node(region: RegionView) -> Node | None:
    """The `dynamic_quantize` node of a region, if any."""
    nodes = [region.anchor] if region.body is None else region.body.nodes
    return next((n for n in nodes if n is not None and n.op == "dynamic_quantize"), None)


def merged(ctx: Lowering, node: Node, views: Sequence[View], axis: int) -> list[View]:
    """The views with all axes from `axis` on merged; copied where the strides do not allow it."""
    shape = views[0].shape
    target: tuple[Size, ...] = (*shape[:axis], product(shape[axis:]))
    return [regions.reshaped(ctx, view, target, node.name) for view in views]
