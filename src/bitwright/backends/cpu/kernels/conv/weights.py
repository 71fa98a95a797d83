"""Filters of convolutions: constant arrays, or views of what is known at run time.

Both have the shape [out, in, height, width]. A constant is packed at compile time; a view is packed
by a kernel (`kernels.conv.pack_weights`) in front of the convolution that reads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.conv import winograd
from bitwright.backends.cpu.kernels.conv.pack_weights import PackFilter, emit_pack_filter
from bitwright.backends.cpu.kernels.conv.runtime_int8 import RuntimeInt8Filter
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import DotProduct
from bitwright.backends.cpu.kernels.matmul.filters import Filter
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.ir.dim import Size
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View, contiguous

Array = np.ndarray[Any, Any]
Weight = Array | View


def weight_of(ctx: Lowering, w: Value) -> Weight | None:
    """The filter of a convolution: a constant, or a view of f32 numbers; None for others."""
    known = constant_value(w)
    if known is not None:
        return known
    is_static = all(isinstance(size, int) and size > 0 for size in w.shape)
    return ctx.view(w) if w.dtype == f32 and is_static else None


def part(weight: Weight, axis: int, start: int, count: int, step: int = 1) -> Weight:
    """Every `step`-th of an axis from `start` on, `count` in all; a step may be negative."""
    if isinstance(weight, View):
        return weight.slice(axis, start, count, step)
    places = start + step * np.arange(count)
    return np.take(weight, places, axis=axis)


def exchanged(weight: Weight) -> Weight:
    """Input and output channels exchanged."""
    return weight.transpose((1, 0, 2, 3))


def flipped(weight: Weight) -> Weight:
    """Lines and columns in reverse order."""
    for axis in (2, 3):
        size = sizes_of(weight)[axis]
        weight = part(weight, axis, size - 1, size, -1)
    return weight


def sizes_of(weight: Weight) -> tuple[int, int, int, int]:
    columns, channels, height, width = weight.shape
    assert isinstance(columns, int) and isinstance(channels, int)
    assert isinstance(height, int) and isinstance(width, int)
    return columns, channels, height, width


def packed_panels(
    ctx: Lowering,
    node: Node,
    weight: Weight,
    filter: Filter,
    tile: Tile,
    dot: DotProduct,
    run: int,
) -> View:
    """The panels of a plain convolution, whose windows are read in runs of `run` elements."""
    columns, channels, height, width = sizes_of(weight)
    depth = height * width * channels
    if not isinstance(weight, View):
        runs = weight.transpose(2, 3, 1, 0).reshape(depth // run, run, columns)
        return ctx.constant(filter.pack(runs, tile, dot), f"{node.name}.weight")
    if isinstance(filter, RuntimeInt8Filter):
        return filter.pack_view(ctx, node, weight, tile, dot, run)
    form = PackFilter(tile, weight.strides[0] == 1)
    sizes: dict[str, Size] = {"height": height, "width": width}
    return _pack(ctx, node, weight, form, depth, sizes)


def packed_winograd(ctx: Lowering, node: Node, weight: Weight, results: int, tile: Tile) -> View:
    """The transformed filter of a Winograd convolution."""
    if not isinstance(weight, View):
        transformed = winograd.pack_filter(weight.astype(np.float32, copy=False), results, tile)
        return ctx.constant(transformed, f"{node.name}.weight")
    form = PackFilter(tile, weight.strides[0] == 1, results)
    depth = -(-sizes_of(weight)[1] // tile.lanes) * tile.lanes
    count = (results + winograd.TAPS - 1) ** 2 * depth
    return _pack(ctx, node, weight, form, count, {"depth": depth})


def packed_taps(ctx: Lowering, node: Node, weight: Weight) -> View:
    """The filter of a depthwise convolution as [height · width, channels], in f32."""
    channels, _, height, width = sizes_of(weight)
    if not isinstance(weight, View):
        taps = np.ascontiguousarray(weight.reshape(channels, -1).T, np.float32)
        return ctx.constant(taps, f"{node.name}.weight")
    shape = (height, width, channels, 1)
    place = ctx.scratch(f"{node.name}.weight", "f32", height * width * channels)
    ctx.copy(weight.transpose((2, 3, 0, 1)), contiguous(place.buffer, shape), f"{node.name}.weight")
    return place


def _pack(
    ctx: Lowering,
    node: Node,
    weight: View,
    form: PackFilter,
    rows: int,
    sizes: dict[str, Size],
) -> View:
    """Calls the kernel that packs a filter in panels of `rows` rows."""
    columns, channels, _, _ = sizes_of(weight)
    kernel = ctx.kernel(
        "pack_winograd_f32" if form.results else "pack_filter_f32",
        form,
        lambda m, name: emit_pack_filter(m, name, form),
    )
    panels = -(-columns // form.tile.columns)
    place = ctx.scratch(f"{node.name}.weight", "f32", panels * rows * form.tile.columns)
    names = ("w.out", "w.in", "w.line", "w.column")
    sizes |= {"columns": columns, "channels": channels}
    sizes |= dict(zip(names, weight.strides, strict=True))
    why = "packs weights known at run time"
    ctx.call(kernel, f"{node.name}.weight", {"w": weight, "y": place}, sizes, why=why)
    return place
