"""Convolutions and matrix products with fused epilogues, channels-last layouts, and linear
algebra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import microsoft, refuse, single, standard
from bitwright.frontend.onnx.microsoft.elementwise import activate
from bitwright.ir import Value

OPSET = 17
_DEFAULTS: dict[str, Sequence[float]] = {
    "LeakyRelu": (0.01,),
    "Elu": (1.0,),
    "ThresholdedRelu": (1.0,),
}


def channels_first(ctx: Context, x: Value) -> Value:
    """[N, spatial..., C] as [N, C, spatial...]."""
    return ctx.transpose(x, 0, x.rank - 1, *range(1, x.rank - 1))


def channels_last(ctx: Context, x: Value) -> Value:
    """[N, C, spatial...] as [N, spatial..., C]."""
    return ctx.transpose(x, 0, *range(2, x.rank), 1)


@microsoft("FusedConv", needs=2)
def fused_conv(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """activation(conv(x, w) + bias + z)"""
    x, w, bias, z = (inputs[i] for i in range(4))
    y = single(standard(ctx, node, "Conv", [x, w, bias], OPSET))
    if z is not None:
        y = ctx.b.add(y, z)
    name = node.text("activation", "")
    return activate(ctx, node, y, name, node.items("activation_params", _DEFAULTS.get(name, ())))


@microsoft("NhwcFusedConv", needs=2)
def nhwc_fused_conv(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, w, bias, z = (inputs[i] for i in range(4))
    first = [channels_first(ctx, x), w, bias, None if z is None else channels_first(ctx, z)]
    return channels_last(ctx, single(fused_conv(ctx, node, Inputs(first))))


@microsoft("NhwcMaxPool")
def nhwc_max_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    y = standard(ctx, node, "MaxPool", [channels_first(ctx, inputs[0])], 12)
    return channels_last(ctx, single(y))


@microsoft("ConvTransposeWithDynamicPads", needs=2)
def conv_transpose_with_dynamic_pads(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, w, pads, bias = (inputs[i] for i in range(4))
    attrs: dict[str, Any] = {}
    if pads is not None:
        attrs["pads"] = ctx.need_ints(pads, "the padding")
    return standard(ctx, node, "ConvTranspose", [x, w, bias], 11, **attrs)


def _activation_numbers(node: OnnxNode, name: str) -> Sequence[float]:
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    given = [node.number(attribute) for attribute in names]
    present = [number for number in given if number is not None]
    return present or _DEFAULTS.get(name, ())


@microsoft("FusedGemm", needs=2)
def fused_gemm(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    y = single(standard(ctx, node, "Gemm", inputs, 13))
    name = node.text("activation", "")
    return activate(ctx, node, y, name, _activation_numbers(node, name))


@microsoft("GemmFastGelu", needs=2)
def gemm_fast_gelu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, w, bias = inputs[0], inputs[1], inputs[2]
    y = ctx.b.matmul(x, w)
    return ctx.b.gelu(y if bias is None else ctx.b.add(y, bias), approximate="tanh")


@microsoft("FusedMatMul", "TransposeMatMul", needs=2)
def fused_matmul(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """alpha * A @ B, each with its axes permuted"""
    x, w = _permuted(ctx, node, inputs[0], "A"), _permuted(ctx, node, inputs[1], "B")
    y = ctx.b.matmul(x, w)
    alpha = node.number("alpha", 1.0)
    return y if alpha == 1 else ctx.b.mul(y, ctx.like(y, alpha))


@microsoft("FusedMatMulActivation", needs=2)
def fused_matmul_activation(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    y = single(fused_matmul(ctx, node, inputs))
    name = node.text("activation", "")
    if name == "Softmax":
        return ctx.b.softmax(y, axis=node.integer("activation_axis", -1))
    return activate(ctx, node, y, name, _activation_numbers(node, name))


def _permuted(ctx: Context, node: OnnxNode, x: Value, letter: str) -> Value:
    """The operand with its axes permuted: `trans` swaps the axes of the matrix, and with
    `transBatch` axis 0 is the rows and the axes between are the batch."""
    if x.rank < 2:
        return x
    *outer, last = range(x.rank)
    if node.flag(f"transBatch{letter}"):
        outer = [*outer[1:], outer[0]]
    *batch, rows = outer
    matrix = [last, rows] if node.flag(f"trans{letter}") else [rows, last]
    return ctx.transpose(x, *batch, *matrix)


@microsoft("Inverse")
def inverse(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    size = x.shape[-1] if x.rank else 0
    if x.rank < 2 or not isinstance(size, int):
        raise refuse(node, f"the size of the matrices {x.type} is not known")
    wide = ctx.cast(x, "f32") if x.dtype.bits < 32 else x
    identity = ctx.const(np.eye(size), wide.dtype)
    return ctx.cast(ctx.b.solve(wide, identity), x.dtype)


@microsoft("CDist", needs=2, most=2)
def cdist(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """Distances between rows: |a|^2 + |b|^2 - 2 a b', or its root."""
    x, y = inputs
    rows = ctx.b.reduce_sum(ctx.b.mul(x, x), axes=[1], keepdims=True)
    columns = ctx.transpose(ctx.b.reduce_sum(ctx.b.mul(y, y), axes=[1], keepdims=True), 1, 0)
    product = ctx.b.matmul(x, ctx.transpose(y, 1, 0))
    squares = ctx.b.sub(ctx.b.add(rows, columns), ctx.b.mul(product, ctx.like(x, 2)))
    squares = ctx.b.maximum(squares, ctx.like(x, 0))
    metric = node.text("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise refuse(node, f"the metric {metric!r} is not known")
    return squares if metric == "sqeuclidean" else ctx.b.sqrt(squares)


@microsoft("Rfft", "Irfft")
def real_fourier(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """Transforms of real signals; real and imaginary parts are the last axis."""
    x = inputs[0]
    if node.flag("normalized") or not node.flag("onesided", 1):
        raise refuse(node, "its transform is two-sided or normalized")
    if node.integer("signal_ndim", 1) != 1:
        raise refuse(node, "its signal has several dimensions")
    if node.op_type == "Rfft":
        return ctx.b.dft(ctx.unsqueeze(x, [-1]), axis=-2, onesided=True)
    if x.rank < 2:
        raise ImportModelError("has no axis of terms", where=node.where, found=x.type)
    signal = ctx.b.dft(x, axis=-2, inverse=True, onesided=True)
    return ctx.squeeze(signal, [-1])


@microsoft("CropAndResize", needs=4, most=4)
def crop_and_resize(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """Boxes [y1, x1, y2, x2] of the unit square, each sampled on a grid between its corners."""
    x, boxes, images, target = inputs
    height, width = ctx.need_ints(target, "the size of the crops")
    mode = node.text("mode", "bilinear")
    if mode not in ("bilinear", "nearest"):
        raise refuse(node, f"the mode {mode!r} is not known")
    top, left, bottom, right = ctx.b.split(boxes, axis=1, sizes=(1, 1, 1, 1))
    rows = _coordinates(ctx, top, bottom, height)
    columns = _coordinates(ctx, left, right, width)
    count = boxes.shape[0]
    rows = ctx.b.expand(ctx.unsqueeze(rows, [2]), shape=(count, height, width))
    columns = ctx.b.expand(ctx.unsqueeze(columns, [1]), shape=(count, height, width))
    grid = ctx.b.concat(ctx.unsqueeze(columns, [-1]), ctx.unsqueeze(rows, [-1]), axis=-1)
    one, two = ctx.like(x, 1), ctx.like(x, 2)
    points = _round_points(ctx, x, grid) if mode == "nearest" else grid
    y = ctx.b.grid_sample(
        ctx.b.gather(x, images, axis=0),
        ctx.b.sub(ctx.b.mul(points, two), one),
        mode="linear" if mode == "bilinear" else mode,
        padding_mode="border",
        align_corners=True,
    )
    sides = (ctx.b.ge(grid, ctx.like(x, 0)), ctx.b.le(grid, one))
    inside = ctx.b.reduce_min(ctx.cast(ctx.b.and_(*sides), "i32"), axes=[-1], keepdims=False)
    is_inside = ctx.unsqueeze(ctx.cast(inside, "bool"), [1])
    return ctx.b.where(is_inside, y, ctx.like(x, node.number("extrapolation_value", 0.0)))


def _coordinates(ctx: Context, start: Value, stop: Value, count: int) -> Value:
    """[boxes, count] coordinates from start to stop; the middle if the count is 1."""
    if count == 1:
        return ctx.b.mul(ctx.b.add(start, stop), ctx.like(start, 0.5))
    steps = ctx.const(np.arange(count) / max(count - 1, 1), start.dtype)
    return ctx.b.add(start, ctx.b.mul(ctx.b.sub(stop, start), steps))


def _round_points(ctx: Context, x: Value, grid: Value) -> Value:
    """Points rounded to the nearest element, halves up; grid_sample rounds halves to even."""
    height, width = x.shape[2:]
    last = ctx.cast(ctx.need_vector([width - 1, height - 1], x), x.dtype)
    cells = ctx.b.floor(ctx.b.add(ctx.b.mul(grid, last), ctx.like(x, 0.5)))
    return ctx.b.div(cells, ctx.b.maximum(last, ctx.like(x, 1)))
