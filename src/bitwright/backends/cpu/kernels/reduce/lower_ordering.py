"""Lowering of argmax, argmin, hardmax, top_k, cumsum and cumprod."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bitwright.backends.cpu.kernels.reduce.arg_reduce import ArgReduction, emit_arg_reduction
from bitwright.backends.cpu.kernels.reduce.lower_reduction import arrange
from bitwright.backends.cpu.kernels.reduce.ordering import Order
from bitwright.backends.cpu.kernels.reduce.scan import Scan, emit_scan
from bitwright.backends.cpu.kernels.reduce.top_k import TopK, emit_top_k
from bitwright.backends.cpu.kernels.rows.lower_normalization import merged
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View


def _operand(ctx: Lowering, node: Node, region: RegionView) -> tuple[regions.Part, list[View], int]:
    """The prologue, the views of its operands, and the axis."""
    before = regions.split(region).before
    regions.require_elements(before.dtype)
    anchor = region.anchor
    assert anchor is not None and anchor.inputs[0] is not None
    shape = anchor.inputs[0].shape
    axis = normalize_axis(anchor.attrs["axis"], len(shape))
    return before, regions.operand_views(ctx, region, before.inputs, shape), axis


def _axis_last(axis: int, rank: int) -> tuple[int, ...]:
    return (*(other for other in range(rank) if other != axis), axis)


@lowers("argmax", "argmin")
def lower_arg_reduction(ctx: Lowering, node: Node, region: RegionView) -> None:
    before, views, axis = _operand(ctx, node, region)
    found = arrange(views, [axis])
    order = Order(before.dtype, node.op == "argmax")
    x = regions.Reads("x", found.views)
    kernel = ArgReduction(order, node.attrs["select_last"], before, x, found.kept, found.along_rows)
    family = f"{node.op}_{before.dtype}"
    code = ctx.kernel(family, kernel.key, lambda m, name: emit_arg_reduction(m, name, kernel))
    y = ctx.output(node.outputs[0])
    pointers = {**x.pointers, "y": y, "fault": ctx.fault()}
    sizes = found.sizes | x.sizes | {"node": ctx.number(node)}
    ctx.call(code, node, pointers, sizes, why=found.why)


@lowers("hardmax")
def lower_hardmax(ctx: Lowering, node: Node, region: RegionView) -> None:
    """The result is written with the axis innermost in memory."""
    before, views, axis = _operand(ctx, node, region)
    order = _axis_last(axis, len(views[0].shape))
    views = regions.collapse_rows([view.transpose(order) for view in views])
    x = regions.Reads("x", views)
    kernel = ArgReduction(Order(before.dtype, True), False, before, x, x.rank - 1, True, hard=True)
    family = f"hardmax_{before.dtype}"
    code = ctx.kernel(family, kernel.key, lambda m, name: emit_arg_reduction(m, name, kernel))
    y = ctx.output(node.outputs[0], order)
    sizes = {f"k{n}": size for n, size in enumerate(views[0].shape[:-1])}
    sizes["columns"] = views[0].shape[-1]
    ctx.call(code, node, {**x.pointers, "y": y}, sizes | x.sizes)


@lowers("top_k")
def lower_top_k(ctx: Lowering, node: Node, region: RegionView) -> None:
    before, views, axis = _operand(ctx, node, region)
    count = node.attrs.get("k")
    if count is None:
        count = node.outputs[0].shape[axis]
        counts = [value.shape[axis] for value in node.outputs]
        k = node.inputs[1]
        assert k is not None
        ctx.read_sizes(node, [k], counts, lambda arrays, _: [int(arrays[0].item())] * 2)
    order = _axis_last(axis, len(views[0].shape))
    views = regions.collapse_rows([view.transpose(order) for view in views])
    largest = node.attrs["largest"]
    x = regions.Reads("x", views)
    kernel = TopK(Order(before.dtype, largest, nan_first=largest), before, x)
    family = f"top_k_{before.dtype}"
    code = ctx.kernel(family, kernel.key, lambda m, name: emit_top_k(m, name, kernel))
    values, places = (ctx.output(value, order) for value in node.outputs)
    sizes = {f"k{n}": size for n, size in enumerate(views[0].shape[:-1])}
    sizes |= {"columns": views[0].shape[-1], "count": count, "node": ctx.number(node)}
    pointers = {**x.pointers, "values": values, "places": places, "fault": ctx.fault()}
    ctx.call(code, node, pointers, sizes | x.sizes, writes=("values", "places"))


@lowers("cumsum", "cumprod")
def lower_scan(ctx: Lowering, node: Node, region: RegionView) -> None:
    before, views, axis = _operand(ctx, node, region)
    views = regions.collapse(_with_columns(ctx, node, views, axis), keep=2)
    shape = views[0].shape
    x = regions.Reads("x", views)
    attrs = node.attrs
    has_columns = shape[-1] != 1
    how = node.op, attrs["exclusive"], attrs["reverse"]
    kernel = Scan(*how, before, x, len(shape) - 2, has_columns)
    family = f"{node.op}_{before.dtype}"
    code = ctx.kernel(family, kernel.key, lambda m, name: emit_scan(m, name, kernel))
    y = ctx.output(node.outputs[0])
    sizes = {f"k{n}": size for n, size in enumerate(shape[:-2])}
    sizes |= {"count": shape[-2], "columns": shape[-1]}
    ctx.call(code, node, {**x.pointers, "y": y}, sizes | x.sizes)


def _with_columns(ctx: Lowering, node: Node, views: Sequence[View], axis: int) -> list[View]:
    """The views with all axes after `axis` merged."""
    if axis == len(views[0].shape) - 1:
        return [replace(v, shape=(*v.shape, 1), strides=(*v.strides, 0)) for v in views]
    return merged(ctx, node, views, axis + 1)
