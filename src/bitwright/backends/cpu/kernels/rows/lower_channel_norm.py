"""Lowering of group norm, instance norm, batch norm and local response normalization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bitwright.backends.cpu.kernels.rows import channel_norm
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View


def _as_shape(ctx: Lowering, value: Value, shape: Sequence[Size]) -> View:
    """The value in another shape, with a contiguous last axis."""
    view = ctx.view(value).reshape(shape)
    if view is not None and (view.strides[-1] == 1 or view.shape[-1] == 1):
        return view
    return regions.reshaped(ctx, ctx.contiguous(value), shape, value.name)


@lowers("group_norm", "instance_norm")
def lower_group_norm(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor, after = region.anchor, regions.split(region).after
    assert anchor is not None
    x, *_ = (region.outer(value) for value in anchor.operands)
    weights = dict(zip(("scale", "bias"), anchor.inputs[1:], strict=False))
    given = {name: region.outer(value) for name, value in weights.items() if value is not None}
    regions.require_elements(x.dtype, after.dtype, *(value.dtype for value in given.values()))
    batches, channels = x.shape[:2]
    groups: Size = anchor.attrs.get("groups", channels)
    shape = (batches, groups, channels // groups, product(x.shape[2:]))
    reads = regions.Reads("x", [_as_shape(ctx, x, shape)])
    views = regions.operand_views(ctx, region, after.inputs, x.shape)
    extras = regions.Reads("e", [regions.reshaped(ctx, view, shape, node.name) for view in views])
    has = "scale" in given, "bias" in given
    kernel = channel_norm.GroupNorm(x.dtype, anchor.attrs["eps"], reads, *has, after, extras)
    family = f"group_norm_{x.dtype}"
    code = ctx.kernel(
        family, kernel.key, lambda m, name: channel_norm.emit_group_norm(m, name, kernel)
    )
    pointers = {name: ctx.contiguous(value) for name, value in given.items()}
    pointers |= {**reads.pointers, **extras.pointers, "y": ctx.output(node.outputs[0])}
    names = ("batches", "groups", "channels", "columns")
    sizes = dict(zip(names, shape, strict=True)) | reads.sizes | extras.sizes
    ctx.call(code, node, pointers, sizes)


@lowers("batch_norm")
def lower_batch_norm(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, *parameters = node.operands
    regions.require_elements(*(value.dtype for value in node.operands))
    views = [ctx.view(x), *(_by_channel(ctx.view(value), x) for value in parameters)]
    reads = regions.Reads("x", regions.collapse_rows(views))
    kernel = channel_norm.BatchNorm(x.dtype, node.attrs["eps"], reads)
    family = f"batch_norm_{x.dtype}"
    code = ctx.kernel(
        family, kernel.key, lambda m, name: channel_norm.emit_batch_norm(m, name, kernel)
    )
    *rows, columns = reads.views[0].shape
    sizes = {f"n{axis}": size for axis, size in enumerate(rows)} | {"columns": columns}
    pointers = {**reads.pointers, "y": ctx.output(node.outputs[0])}
    ctx.call(code, node, pointers, sizes | reads.sizes)


def _by_channel(view: View, x: Value) -> View:
    """A vector of channels broadcast to the shape of x; channels are axis 1 if there is one."""
    if x.rank < 2:
        return regions.broadcast(view, x.shape)
    behind = x.rank - 2
    along = replace(
        view, shape=(*view.shape, *(1,) * behind), strides=(*view.strides, *(0,) * behind)
    )
    return regions.broadcast(along, x.shape)


@lowers("lrn")
def lower_lrn(ctx: Lowering, node: Node, region: RegionView) -> None:
    (x,) = node.operands
    regions.require_elements(x.dtype)
    shape = (*x.shape[:2], product(x.shape[2:]))
    reads = regions.Reads("x", [_as_shape(ctx, x, shape)])
    attrs = node.attrs
    how = attrs["size"], attrs["alpha"], attrs["beta"], attrs["bias"]
    kernel = channel_norm.Lrn(x.dtype, *how, reads)
    family = f"lrn_{x.dtype}"
    code = ctx.kernel(family, kernel.key, lambda m, name: channel_norm.emit_lrn(m, name, kernel))
    pointers = {**reads.pointers, "y": ctx.output(node.outputs[0])}
    names = ("batches", "channels", "columns")
    ctx.call(code, node, pointers, dict(zip(names, shape, strict=True)) | reads.sizes)
