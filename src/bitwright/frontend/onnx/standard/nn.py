"""Convolution, matrix products and sampling of images."""

from __future__ import annotations

from typing import Any

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.frontend.onnx.standard.index import counting
from bitwright.frontend.onnx.standard.shape import expand_to
from bitwright.frontend.onnx.windows import auto_pad_of, split_padding, window_attrs
from bitwright.ir import Dim, DType, Size, Value
from bitwright.ir.dim import product

_GRID_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@imports("Conv")
def conv(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, w, bias = inputs[0], inputs[1], inputs[2]
    return ctx.b.conv(x, w, bias, **conv_attrs(node, x, w))


def conv_attrs(node: OnnxNode, x: Value, w: Value) -> dict[str, Any]:
    if x.rank < 3 or w.rank != x.rank:
        raise ImportModelError(
            "operands have the wrong rank",
            where=node.where,
            expected="batch, channels and spatial axes in both",
            found=f"{x.type} and {w.type}",
        )
    kernel = w.shape[2:]
    return {**window_attrs(node, x.shape[2:], kernel), "groups": node.integer("group", 1)}


@imports("ConvTranspose")
def conv_transpose(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, w, bias = inputs[0], inputs[1], inputs[2]
    attrs = conv_attrs(node, x, w)
    rank = x.rank - 2
    extra = list(node.items("output_padding") or [0] * rank)
    auto_pad, wanted = auto_pad_of(node), node.items("output_shape")
    if wanted is None and auto_pad.startswith("SAME"):
        wanted = [size * stride for size, stride in zip(x.shape[2:], attrs["strides"], strict=True)]
    if wanted is not None:
        totals = []
        for axis, goal in enumerate(wanted[-rank:]):
            extent = (w.shape[2 + axis] - 1) * attrs["dilations"][axis] + 1
            natural = attrs["strides"][axis] * (x.shape[2 + axis] - 1) + extra[axis] + extent
            missing = goal - natural
            if isinstance(missing, int) and missing > 0:
                extra[axis] += missing
            totals.append(0 if isinstance(missing, int) and missing > 0 else -missing)
        pads = split_padding(totals, auto_pad == "SAME_UPPER")
        if any(isinstance(total, Dim) for total in totals):
            return _cropped_transpose(ctx, inputs, attrs, extra, pads)
        attrs["pads"] = tuple(pads)
    return ctx.b.conv_transpose(x, w, bias, output_padding=tuple(extra), **attrs)


def _cropped_transpose(
    ctx: Context, inputs: Inputs, attrs: dict[str, Any], extra: list[int], pads: list[Size]
) -> Value:
    """A transposed convolution with padding of unknown sign, which is applied afterwards."""
    x, w, bias = inputs[0], inputs[1], inputs[2]
    rank = len(extra)
    whole = {**attrs, "pads": (0,) * (2 * rank), "output_padding": tuple(extra)}
    around = [-pad for pad in pads]
    y = ctx.b.conv_transpose(x, w, **whole)
    y = ctx.b.pad(y, pads=(0, 0, *around[:rank], 0, 0, *around[rank:]))
    return y if bias is None else ctx.b.add(y, ctx.reshape(bias, [*bias.shape, *[1] * rank]))


@imports("DeformConv")
def deform_conv(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, w, offset, bias, mask = (inputs[i] for i in range(5))
    groups = node.integer("offset_group", 1)
    return ctx.b.deform_conv(
        x, w, offset, bias, mask, offset_groups=groups, **conv_attrs(node, x, w)
    )


@imports("Gemm")
def gemm(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """alpha * op(A) @ op(B) + beta * C"""
    x, w, bias = inputs[0], inputs[1], inputs[2]
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    if node.flag("transA"):
        x = ctx.transpose(x, 1, 0)
    if node.flag("transB"):
        w = ctx.transpose(w, 1, 0)
    y = ctx.b.matmul(x, w)
    if alpha != 1:
        y = _scaled(ctx, y, alpha)
    if bias is not None and beta != 0:
        y = ctx.b.add(y, bias if beta == 1 else _scaled(ctx, bias, beta))
    return y


def _scaled(ctx: Context, x: Value, factor: float) -> Value:
    if x.dtype.is_integer and not factor.is_integer():
        return ctx.cast(ctx.b.mul(ctx.cast(x, "f64"), ctx.const(factor, "f64")), x.dtype)
    return ctx.b.mul(x, ctx.like(x, factor))


@imports("Einsum")
def einsum(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.einsum(*inputs, equation=node.require("equation"))


@imports("GridSample")
def grid_sample(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    mode = node.text("mode", "linear")
    return ctx.b.grid_sample(
        *inputs,
        mode=_GRID_MODES.get(mode, mode),
        padding_mode=node.text("padding_mode", "zeros"),
        align_corners=node.flag("align_corners"),
    )


@imports("AffineGrid")
def affine_grid(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """Coordinates of a regular grid in [-1, 1], transformed by one matrix per sample."""
    theta, size = inputs
    rank = theta.shape[1]
    if not isinstance(rank, int) or size.shape != (rank + 2,):
        raise UnmappedError(f"the number of axes of {theta} and {size} is not known")
    spatial = ctx.slice(size, 0, 2, rank + 2)
    axes = []
    for axis in range(rank):
        length = ctx.reshape(ctx.slice(spatial, 0, axis, axis + 1), [])
        place = _coordinates(ctx, length, theta.dtype, node.flag("align_corners"))
        along = [place.shape[0] if i == axis else 1 for i in range(rank)]
        axes.append(expand_to(ctx, ctx.reshape(place, along), spatial))
    ones = expand_to(ctx, ctx.const(1, theta.dtype), spatial)
    columns = [ctx.unsqueeze(x, [-1]) for x in (*reversed(axes), ones)]  # x, y, (z), 1
    grid = ctx.b.concat(*columns, axis=-1)
    points = ctx.reshape(grid, [product(grid.shape[:-1]), rank + 1])
    moved = ctx.b.matmul(points, ctx.transpose(theta, 0, 2, 1))
    return ctx.reshape(moved, [theta.shape[0], *grid.shape[:-1], rank])


def _coordinates(ctx: Context, length: Value, element: DType, aligned: bool) -> Value:
    """Coordinates in [-1, 1] of the elements of an axis: their centres, or with aligned corners."""
    steps, total = ctx.cast(counting(ctx, length), element), ctx.cast(length, element)
    doubled = ctx.b.mul(steps, 2.0)
    if aligned:
        return ctx.b.sub(ctx.b.div(doubled, ctx.b.maximum(ctx.b.sub(total, 1.0), 1.0)), 1.0)
    return ctx.b.sub(ctx.b.div(ctx.b.add(doubled, 1.0), total), 1.0)


@imports("RoiAlign")
def roi_align(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    default = "half_pixel" if node.version >= 16 else "output_half_pixel"
    return ctx.b.roi_align(
        *inputs,
        mode=node.text("mode", "avg"),
        output_height=node.integer("output_height", 1),
        output_width=node.integer("output_width", 1),
        sampling_ratio=node.integer("sampling_ratio", 0),
        spatial_scale=node.number("spatial_scale", 1.0),
        coordinate_mode=node.text("coordinate_transformation_mode", default),
    )


@imports("MaxRoiPool")
def max_roi_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.max_roi_pool(
        *inputs,
        pooled_shape=node.require("pooled_shape"),
        spatial_scale=node.number("spatial_scale", 1.0),
    )


@imports("Col2Im")
def col2im(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, image, block = inputs
    image_shape = ctx.sizes(image, x)
    block_shape = ctx.need_ints(block, "the block shape")
    if image_shape is None:
        raise UnmappedError(f"the image shape {image} is computed from data")
    return ctx.b.col2im(
        x,
        image_shape=image_shape,
        block_shape=block_shape,
        **window_attrs(node, image_shape, block_shape),
    )
