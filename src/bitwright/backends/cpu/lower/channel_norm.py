"""Normalizations with channels: group, instance and batch norm, local response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bitwright.backends.cpu.kernels.channel_norm import (
    BatchNorm,
    GroupNorm,
    Lrn,
    emit_batch_norm,
    emit_group_norm,
    emit_lrn,
)
from bitwright.backends.cpu.lowering import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.region import Reads, broadcast, collapse_rows, require_elements
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View


def _as_shape(ctx: Lowering, value: Value, shape: Sequence[Size]) -> View:
    """The value in another shape, with its last axis close."""
    view = ctx.view(value).reshape(shape)
    if view is None or (view.strides[-1] != 1 and view.shape[-1] != 1):
        view = ctx.contiguous(value).reshape(shape)
    if view is None:
        raise NoKernelError(f"{value.tensor} cannot be seen as {list(shape)}")
    return view


@lowers("group_norm", "instance_norm")
def lower_group_norm(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, *_ = node.operands
    weights = dict(zip(("scale", "bias"), node.inputs[1:], strict=False))
    given = {name: value for name, value in weights.items() if value is not None}
    require_elements(x.dtype, *(value.dtype for value in given.values()))
    batches, channels = x.shape[:2]
    groups: Size = node.attrs.get("groups", channels)
    shape = (batches, groups, channels // groups, product(x.shape[2:]))
    reads = Reads("x", [_as_shape(ctx, x, shape)])
    kernel = GroupNorm(x.dtype, node.attrs["eps"], reads, "scale" in given, "bias" in given)
    code = ctx.kernel("group_norm", kernel.key, lambda m, name: emit_group_norm(m, name, kernel))
    pointers = {name: ctx.contiguous(value) for name, value in given.items()}
    pointers |= {**reads.pointers, "y": ctx.output(node.outputs[0])}
    names = ("batches", "groups", "channels", "columns")
    ctx.call(code, node, pointers, dict(zip(names, shape, strict=True)) | reads.sizes)


@lowers("batch_norm")
def lower_batch_norm(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, *parameters = node.operands
    require_elements(*(value.dtype for value in node.operands))
    views = [ctx.view(x), *(_by_channel(ctx.view(value), x) for value in parameters)]
    reads = Reads("x", collapse_rows(views))
    kernel = BatchNorm(x.dtype, node.attrs["eps"], reads)
    code = ctx.kernel("batch_norm", kernel.key, lambda m, name: emit_batch_norm(m, name, kernel))
    *rows, columns = reads.views[0].shape
    sizes = {f"n{axis}": size for axis, size in enumerate(rows)} | {"columns": columns}
    pointers = {**reads.pointers, "y": ctx.output(node.outputs[0])}
    ctx.call(code, node, pointers, sizes | reads.sizes)


def _by_channel(view: View, x: Value) -> View:
    """A vector of channels in the shape of x; channels are axis 1, or there is only one."""
    if x.rank < 2:
        return broadcast(view, x.shape)
    behind = x.rank - 2
    along = replace(
        view, shape=(*view.shape, *(1,) * behind), strides=(*view.strides, *(0,) * behind)
    )
    return broadcast(along, x.shape)


@lowers("lrn")
def lower_lrn(ctx: Lowering, node: Node, region: RegionView) -> None:
    (x,) = node.operands
    require_elements(x.dtype)
    shape = (*x.shape[:2], product(x.shape[2:]))
    reads = Reads("x", [_as_shape(ctx, x, shape)])
    attrs = node.attrs
    how = attrs["size"], attrs["alpha"], attrs["beta"], attrs["bias"]
    kernel = Lrn(x.dtype, *how, reads)
    code = ctx.kernel("lrn", kernel.key, lambda m, name: emit_lrn(m, name, kernel))
    pointers = {**reads.pointers, "y": ctx.output(node.outputs[0])}
    names = ("batches", "channels", "columns")
    ctx.call(code, node, pointers, dict(zip(names, shape, strict=True)) | reads.sizes)
