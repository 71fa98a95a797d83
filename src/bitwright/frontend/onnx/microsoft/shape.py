"""Ops that move or index elements, mostly older forms of standard ONNX ops."""

from __future__ import annotations

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import microsoft, required, standard
from bitwright.ir.types import normalize_axis


@microsoft("ExpandDims", needs=2)
def expand_dims(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.unsqueeze(inputs[0], ctx.need_ints(inputs[1], "the axis"))


@microsoft("Trilu")
def trilu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return standard(ctx, node, "Trilu", inputs, version=14)


@microsoft("GatherND", needs=2)
def gather_nd(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.gather_nd(inputs[0], inputs[1])


@microsoft("GridSample", needs=2, most=2)
def grid_sample(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """ONNX's op, except for cubic sampling with a border: this op clamps each of the 16 neighbours,
    ONNX clamps the point. Both give the same on an image with a replicated border."""
    x, grid = inputs
    if x.rank != 4:
        raise ImportModelError("its operand is not an image", where=node.where, found=x.type)
    if node.text("mode", "bilinear") == "bicubic" and node.text("padding_mode", "") == "border":
        margin, less = 3, 1 if node.flag("align_corners") else 0
        height, width = x.shape[2:]
        pads = (0, 0, margin, margin, 0, 0, margin, margin)
        ratios = []
        for size in (width, height):
            length = ctx.cast(ctx.need_vector([size - less], x), x.dtype)
            ratios.append(ctx.b.div(length, ctx.b.add(length, ctx.like(x, 2 * margin))))
        grid = ctx.b.mul(grid, ctx.b.concat(*ratios, axis=0))
        x = ctx.b.pad(x, pads=pads, mode="edge")
    return standard(ctx, node, "GridSample", [x, grid], version=16)


@microsoft("Pad", needs=2)
def pad(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, pads, value = inputs[0], inputs[1], inputs[2]
    if value is not None:
        value = ctx.reshape(value, [])
    if pads.rank == 2:
        pads = ctx.reshape(pads, [pads.shape[1]])
    return standard(ctx, node, "Pad", [x, pads, value], version=13)


@microsoft("Range", needs=2)
def range_(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    start, limit, delta = inputs[0], inputs[1], inputs[2]
    step = ctx.like(start, 1) if delta is None else delta
    return standard(ctx, node, "Range", [start, limit, step], version=11)


@microsoft("Unique")
def unique(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """Unique values in order of appearance; ONNX sorts them."""
    y, _, inverse, counts = ctx.b.unique(inputs[0], axis=None, sorted=False)
    return [y, inverse, counts]


@microsoft("UnfoldTensor")
def unfold_tensor(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """Overlapping windows of an axis; their elements are a new last axis."""
    x, size, step = inputs[0], required(node, "size"), node.integer("step", 1)
    axis = normalize_axis(node.integer("dim", -1), x.rank)
    pieces = (x.shape[axis] - size) // step + 1
    starts = ctx.b.mul(ctx.b.iota(length=pieces, dtype="i64"), ctx.const(step))
    inside = ctx.b.iota(length=size, dtype="i64")
    places = ctx.b.add(ctx.unsqueeze(starts, [1]), inside)
    taken = ctx.b.gather(x, places, axis=axis)
    order = [i for i in range(taken.rank) if i != axis + 1]
    return ctx.transpose(taken, *order, axis + 1)


@microsoft("Crop", domain="")
def crop(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """An image without its border (left, top, right, bottom), or a crop of size `scale`."""
    x, border, size = inputs[0], node.items("border", []), node.items("scale")
    if x.rank != 4 or len(border) != 4 or len(size or (0, 0)) != 2:
        raise ImportModelError(
            "its border, scale or operand does not fit", where=node.where, found=f"{border}, {size}"
        )
    left, top, right, bottom = border
    if size:
        stop_y, stop_x = top + size[0], left + size[1]
    else:
        stop_y, stop_x = x.shape[2] - bottom, x.shape[3] - right
    return ctx.slice(ctx.slice(x, 2, top, stop_y), 3, left, stop_x)
